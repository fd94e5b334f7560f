"""PlanCompare: 2 to 6 plans side by side. Every control is answered at once, and a button runs the plans on ranks.

::

    columns (`plan_columns.py`)  --question-->  answers (`compare/question.py`)
    answers  -->  PlanComparison (`compare/plan_comparison.py`): numbers, best of each row, diff, pictures to one scale

Long work (many ranks, a run on the ranks) happens in threads, so the kernel stays free.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from time import perf_counter
from typing import Any, TypeVar

import ipywidgets as ipw

from recshard_lab.embedding.configs import BaseEmbeddingConfig, check_tables
from recshard_lab.lab import views
from recshard_lab.lab.compare.measure import Measured, measure_plan
from recshard_lab.lab.compare.plan_comparison import SEARCHED, PlanComparison, PlanSpec, views_of_plans
from recshard_lab.lab.compare.question import Answer, Question, answer, explained
from recshard_lab.lab.compare.question_code import python_for
from recshard_lab.lab.draw.theme import counted
from recshard_lab.lab.draw.view import View, message_view
from recshard_lab.lab.exporting.exportable import Exportable
from recshard_lab.lab.views.registry import reason
from recshard_lab.lab.widgets import controls, page
from recshard_lab.lab.widgets.base import LabWidget, Quiet
from recshard_lab.lab.widgets.chart_box import ChartBox
from recshard_lab.lab.widgets.plan_columns import ColumnBar, column_of, first_columns, python_of_all
from recshard_lab.planner import Workload
from recshard_lab.sharding import PlanError, Topology

AT_ONCE = 3 * 26 * 8  # tables x ranks to be planned, summed over plans, that a control answers without a thread
MOST_ANSWERS = 96  # remembered
EVERY = "every plan"
Cell = TypeVar("Cell", bound=ipw.Widget)


class PlanCompare(LabWidget):
    """Compares plans of the same tables for the same ranks and the same step.

    Args:
        tables: the configs.
        topology: the first ranks; its speeds hold for every number of ranks.
        workload: the step; its batch size is the first value of the control.
        schemes: table -> first scheme of "Your plan"; other tables are "auto".
        plans: name -> plan, 2 to 6 of them, each as `compare_plans` takes it. By default "Your plan" (key "mine"), by
            hand, beside "The planner's plan" (key "auto"). The menu of a table with `ParameterConstraints` shows what
            they give it. Another choice replaces them, except for what they state about lookups, such as
            `pooling_factors`.

    Raises:
        ValueError: no tables, two of one name, an unknown scheme or table, fewer plans than 2 or more than 6, or a
            plan that `compare_plans` does not take.
    """

    def __init__(
        self,
        tables: Sequence[BaseEmbeddingConfig],
        topology: Topology,
        workload: Workload | None = None,
        schemes: Mapping[str, str] | None = None,
        *,
        plans: Mapping[str, PlanSpec] | None = None,
    ) -> None:
        check_tables(tables)
        self.tables, self.topology, self.workload = list(tables), topology, workload or Workload()
        self.workload.check_names(self.tables)
        self.columns = first_columns(self.tables, topology, self.workload, plans, None if plans is None else schemes)
        self.last_response_ms = self.last_answer_ms = 0.0
        self._answers: dict[str, Answer] = {}
        self._cached: dict[Any, Answer] = {}
        self._ran: dict[str, tuple[Answer, Measured]] = {}
        self._lock = threading.RLock()  # the reader's moves and results of threads are shown one after the other
        super().__init__("plan-compare", "plan_comparison")
        self._build()
        self.set(schemes if plans is None else None)

    # ---- for use from Python ----

    @property
    def answers(self) -> dict[str, Answer]:
        """Key -> plan, estimate and, if it does not fit, the refusal; waits for running work."""
        self.wait()
        return dict(self._answers)

    @property
    def comparison(self) -> PlanComparison:
        """The comparison as `compare_plans` returns it, with measurements; waits for running work."""
        self.wait()
        return self._comparison()

    @property
    def question(self) -> Question:
        """The question of the plan that the controls change."""
        return self.bar.chosen.question(*self._step)

    @property
    def mine(self) -> Answer:
        """The plan that the controls change."""
        return self.answers[self.bar.chosen.key]

    @property
    def automatic(self) -> Answer:
        """The planner's plan for the same ranks, batch and memory."""
        return self._cached_answer(self.question.automatic())

    @property
    def measured(self) -> Measured | None:
        """The measurement of the plan that the controls change; None if this plan was not run."""
        return self._measured(self.bar.chosen.key)

    @property
    def python(self) -> str:
        """The plan that the controls change, in Python."""
        return self.python_of(self.bar.chosen.key)

    def python_of(self, key: str) -> str:
        """One plan in Python."""
        question = self.columns[key].question(*self._step)
        return python_for(question, self.topology, self.workload, len(self.tables))

    @property
    def python_of_all(self) -> str:
        """The whole comparison in Python."""
        step, shown = self._step, list(self.columns.values())
        return python_of_all(shown, step, self.topology, self.workload, len(self.tables), self.changes.python)

    def set(
        self,
        schemes: Mapping[str, str] | None = None,
        *,
        column: str | None = None,
        world_size: int | None = None,
        batch_size: int | None = None,
        memory_cap: int | None = None,
    ) -> None:
        """Moves several controls and answers once: ``widget.set({"movies": "row_wise"}, world_size=8)``.

        Args:
            schemes: table -> scheme, of the plan that the controls change.
            column: key of the plan that they change afterwards.

        Raises:
            ValueError: an unknown plan, table, scheme or step of a slider.
        """
        if column is not None:
            self.bar.choose(column)
        for name, scheme in (schemes or {}).items():
            self.bar.set_scheme(name, scheme)
        self.bar.show()
        with self.quietly():
            moves = ((self.world_size, world_size), (self.batch_size, batch_size), (self.memory_cap, memory_cap))
            for slider, value in moves:
                if value is not None:
                    slider.value = value
        self.respond()

    def add(self, name: str, plan: PlanSpec) -> None:
        """Adds a plan, as `compare_plans` takes it, and lets the controls change it.

        Raises:
            ValueError: there are 6 already, or one of this name; as `compare_plans`.
        """
        self.bar.put(column_of(name, plan, self.tables, self.topology, self.workload))

    def remove(self, key: str) -> None:
        """Removes a plan.

        Raises:
            ValueError: an unknown key, or only 2 are left.
        """
        self.bar.remove_column(key)

    def wait(self, timeout_s: float = 60.0) -> bool:
        """Waits for plans and pictures in the background. Returns whether they ended in time."""
        return self.worker.wait("plans", "pictures", timeout_s=timeout_s)

    def respond(self) -> None:
        """Answers the controls: all plans, all numbers, the chosen picture. Its time is `last_response_ms`.

        Long planning happens in a thread; the cards show that. `last_answer_ms` is the time until its end.
        """
        begun = perf_counter()
        questions = {key: column.question(*self._step) for key, column in self.columns.items()}
        self.worker.cancel("plans")
        self.worker.cancel("explain")
        new = [each for each in questions.values() if each.key not in self._cached and each.plan is None]
        with self._lock:
            names = {key: column.name for key, column in self.columns.items()}
            for part in (self.cells, self.changes, self.runs, self.exports):
                part.arrange(names)
            if len(new) * len(self.tables) * self.world_size.value <= AT_ONCE:
                self._finish(questions, begun, lambda: True)
            else:
                self._show_waiting(questions)
                self.worker.newest(lambda is_current: self._finish(questions, begun, is_current), "plans")
        self.last_response_ms = 1000 * (perf_counter() - begun)

    def explain(self) -> None:
        """Replaces short refusals by the planner's full ones, with a fix."""
        for key, shown in list(self._answers.items()):
            full = explained(shown, self.tables)
            with self._lock:
                if self._answers.get(key) is shown and full is not shown:  # the controls may have moved meanwhile
                    self._cached[shown.question.key] = self._answers[key] = full
                    self._show_cards()

    def run(self, steps: int = 10, column: str | None = None) -> Measured:
        """Runs a plan on the launched ranks and waits for the result; the button does this in a thread.

        Args:
            steps: number of timed steps.
            column: key of the plan; by default the one that the controls change.

        Raises:
            ValueError: no ranks are launched, or another number than the plan has.
        """
        key = column or self.bar.chosen.key
        shown = self.answers[key]
        ranks = ranks_for(shown)
        assert shown.plan is not None
        found = measure_plan(ranks, shown.plan, self.tables, shown.workload, steps=steps)
        with self._lock:
            self._ran[key] = (shown, found)
            if self._answers.get(key) is shown:  # the controls may have moved meanwhile
                self.cells.forget()
                self._show()
        return found

    def exportable(self) -> Exportable:
        """All plans side by side."""
        return self.comparison.exportable(self.python_of_all)

    # ---- building ----

    def _build(self) -> None:
        self.verdict = ipw.HTML()
        self.bar = ColumnBar(self.columns, self.tables, self.respond, self._plan_of, self.message.fail)
        self.menus, self.others, self.set_all = self.bar.menus, self.bar.others, self.bar.set_all
        cap, size, batch = self.topology.memory_cap_bytes, self.topology.world_size, self.workload.batch_size
        self.world_size = controls.slider("Ranks", controls.world_sizes(size), size, "number of ranks")
        self.batch_size = controls.slider("Batch per rank", controls.batch_sizes(batch), batch, "samples per rank")
        caps = controls.memory_caps(self.tables, cap)
        self.memory_cap = controls.slider("Memory per rank", caps, cap, "memory of each rank, before the reserve")
        self.picture = controls.choice([(views.view_label(name), name) for name in views_of_plans()])
        self.cells = _Cells(self)
        self.cards, self.pictures, self.codes = self.cells.cards, self.cells.pictures, self.cells.codes
        self.changes, self.runs = _Changes(self._look), _Runs(self)
        self.button = self.runs.button
        for control in (self.world_size, self.batch_size, self.memory_cap):
            self.on(control, lambda _: self.respond())
        self.on(self.picture, lambda _: self._look(self._show_pictures))
        self.lay_out(
            [
                controls.sliders([self.world_size, self.batch_size, self.memory_cap]),
                self.bar,
                controls.row([self.runs, self.message]),
                self.verdict,
                self.cells.card_grid,
                self.picture,
                self.cells.picture_grid,
                self.changes,
            ]
        )

    # ---- answering ----

    @property
    def _step(self) -> tuple[int, int, int]:
        return self.world_size.value, self.batch_size.value, self.memory_cap.value

    def _look(self, show: Callable[[], None]) -> None:
        """Answers a control that only chooses what is shown."""
        begun = perf_counter()
        with self._lock:
            show()
        self.last_response_ms = 1000 * (perf_counter() - begun)

    def _finish(self, questions: Mapping[str, Question], begun: float, is_current: Callable[[], bool]) -> None:
        """Answers all columns and shows them, unless a newer request replaces this one."""
        try:
            found = {}
            for key, each in questions.items():
                if not is_current():
                    return
                found[key] = self._cached_answer(each)
            with self._lock:
                if not is_current():
                    return
                self._answers = found
                self.cells.forget()
                self.message.show()
                self._show()
                self.last_answer_ms = 1000 * (perf_counter() - begun)
                if any(shown.problem and shown.question.plan is None for shown in found.values()):
                    self.worker.newest(lambda _: self.explain(), "explain", delay_s=0.5)
        except Exception as error:
            self.message.fail(f"The plans could not be computed. {reason(error)}")

    def _cached_answer(self, question: Question) -> Answer:
        found = self._cached.get(question.key)
        if found is None:
            if len(self._cached) > MOST_ANSWERS:
                self._cached.pop(next(iter(self._cached)))
            found = self._cached[question.key] = answer(question, self.tables, self.topology, self.workload)
        return found

    def _comparison(self) -> PlanComparison:
        names = {key: self.columns[key].name for key in self._answers if key in self.columns}
        ran = {name: found for key, name in names.items() if (found := self._measured(key)) is not None}
        return PlanComparison(self.tables, {name: self._answers[key] for key, name in names.items()}, ran)

    def _measured(self, key: str) -> Measured | None:
        shown, found = self._ran.get(key, (None, None))
        return found if shown is not None and shown is self._answers.get(key) else None

    def _plan_of(self, key: str) -> Any:
        found = self._answers.get(key)
        return None if found is None else found.plan

    # ---- showing ----

    def _show(self) -> None:
        self._show_cards()
        self._show_pictures()
        self.changes.show(self._comparison())
        for key, column in self.columns.items():
            self.codes[key].value = page.code(self.python_of(key), f"{column.name} in Python", key)
        self.code.value = page.code(self.python_of_all, "The whole comparison in Python", "all")

    def _show_cards(self) -> None:
        names = {key: column.name for key, column in self.columns.items()}
        best = self._comparison().best
        for key, name in names.items():
            good = [row for row, holders in best.items() if name in holders]
            shown = self._answers[key]
            self.cards[key].value = page.card(key, shown, self._measured(key), name, good, len(names) > 2, planned=True)
        self.verdict.value = page.verdict(names, self._answers)

    def _show_waiting(self, questions: Mapping[str, Question]) -> None:
        """Marks the cards as out of date."""
        for key, column in self.columns.items():
            self.cards[key].value = page.waiting(key, column.name, self.cards[key].value)
        size = f"{counted(len(self.tables), 'table')} on {counted(self.world_size.value, 'rank')}"
        self.verdict.value = page.note(f"Computing {len(questions)} plans of {size} …")

    def _show_pictures(self) -> None:
        names = {key: column.name for key, column in self.columns.items() if key in self._answers}
        self.cells.show(self.picture.value, self._comparison(), names)

    def static(self) -> tuple[str, str]:
        """The placement and the numbers of every plan."""
        found = self.comparison
        drawn = found.views("placement").values()
        cards = (
            page.card(key, self._answers[key], self._measured(key), self.columns[key].name, planned=True)
            for key in self.columns
        )
        lines = [f"{name}: {page.sentence(shown)}" for name, shown in found.answers.items()]
        return "".join(card + view.img for card, view in zip(cards, drawn, strict=True)), "\n".join(lines)


def ranks_for(shown: Answer) -> Any:
    """The launched ranks, if this plan can run on them.

    Raises:
        ValueError: no ranks are launched, another number than the plan has, or the plan does not fit.
    """
    from recshard_lab.launcher import current

    ranks, needed = current(), shown.question.world_size
    if ranks is None:
        raise ValueError(f"No ranks are launched. Fix: launch them in a cell with %recshard_launch -n {needed}")
    if ranks.world_size != needed:
        launched = f"{ranks.world_size} {'is' if ranks.world_size == 1 else 'are'} launched"
        raise ValueError(
            f"The plan is for {counted(needed, 'rank')}, {launched}. Fix: set Ranks to {ranks.world_size}, or relaunch "
            f"with %recshard_stop and %recshard_launch -n {needed}"
        )
    if not shown.fits:
        raise ValueError(f"This plan does not fit, so it is not run. {shown.problem}")
    return ranks


class _Cells:
    """The card, picture and Python of every plan, by its key, in grids that wrap on a narrow page.

    A view is drawn when it is first shown, in a thread if the planner must search again for it.
    """

    def __init__(self, of: PlanCompare) -> None:
        self.of = of
        self.cards: dict[str, ipw.HTML] = {}
        self.pictures: dict[str, ChartBox] = {}
        self.codes: dict[str, ipw.HTML] = {}
        self.card_grid, self.picture_grid = controls.columns_of("250px"), controls.columns_of("440px")
        self.card_grid.add_class("rs-cards")
        self._views: dict[str, dict[str, View]] = {}  # name of a view -> key -> view

    def arrange(self, names: Mapping[str, str]) -> None:
        """Makes room for these plans, key -> name. Old contents stay."""
        if list(self.cards) == list(names):
            return
        for cells, make in (
            (self.cards, controls.wide_html),
            (self.pictures, ChartBox),
            (self.codes, controls.wide_html),
        ):
            old = dict(cells)
            cells.clear()
            cells.update({key: old.get(key) or make() for key in names})
        least = {
            self.card_grid: "250px" if len(names) <= 3 else "168px",  # in one row if there is room
            self.picture_grid: "440px" if self._two_in_a_row else "340px",
        }
        for grid, width in least.items():
            grid.layout.grid_template_columns = controls.template_of(width)
        pairs = zip(self.pictures.values(), self.codes.values(), strict=True)
        self.card_grid.children = tuple(self.cards.values())
        self.picture_grid.children = tuple(controls.column(pair) for pair in pairs)

    @property
    def _two_in_a_row(self) -> bool:
        return len(self.cards) in (2, 4)

    def forget(self) -> None:
        """Drops all drawn pictures, because the plans have changed."""
        self.of.worker.cancel("pictures")
        self._views.clear()

    def show(self, view: str, found: PlanComparison, names: Mapping[str, str]) -> None:
        """Shows a view of every plan.

        Args:
            view: its name.
            found: the plans.
            names: key -> name of the plan in `found`.
        """
        self.of.worker.cancel("pictures")
        if view not in self._views and (view not in SEARCHED or found.searched):
            self._views[view] = self._drawn(view, found, names)
        if view in self._views:
            self._send(view, names)
            return
        for key in names:
            self.pictures[key].say(page.note("Repeating the planner's search to record it …"))
        self.of.worker.newest(lambda is_current: self._search(is_current, view, found, names), "pictures")

    def _drawn(self, view: str, found: PlanComparison, names: Mapping[str, str]) -> dict[str, View]:
        width = controls.HALF_WIDTH if self._two_in_a_row else controls.THIRD_WIDTH  # never enlarged
        drawn = found.views(view, width)
        return {key: drawn[plan] for key, plan in names.items()}

    def _search(
        self, is_current: Callable[[], bool], view: str, found: PlanComparison, names: Mapping[str, str]
    ) -> None:
        try:
            found.search(is_current)
            drawn = self._drawn(view, found, names) if is_current() else {}
        except Exception as error:
            drawn = dict.fromkeys(names, message_view(view, views.view_label(view), reason(error)))
        with self.of._lock:
            if is_current():
                self._views[view] = drawn
                self._send(view, names)

    def _send(self, view: str, names: Mapping[str, str]) -> None:
        for place, (key, shown) in enumerate(self._views[view].items()):
            head = f'<h4 class="rs-over">{escape(names[key])}</h4>' if len(names) > 2 else ""
            self.pictures[key].show(shown, f"{self.of.uid}-{place}-{view}", head)


def _keep(cells: dict[str, Cell], keys: Iterable[str], make: Callable[[], Cell]) -> None:
    """Leaves the cells of these keys, in their order, and makes those that are missing."""
    old = dict(cells)
    cells.clear()
    cells.update({key: old.get(key) or make() for key in keys})


class _Runs(ipw.HBox):
    """A menu of plans and the button that runs one on the launched ranks, or all one after the other."""

    def __init__(self, of: PlanCompare) -> None:
        self.of = of
        self.which = controls.pick("Run", "the plan that runs on the launched ranks", [("", "")], "230px")
        hint = "runs the plan on the launched ranks and shows the measured numbers beside the predicted ones"
        self.button = controls.button("Run on ranks", hint, "play", "primary")
        self.button.on_click(lambda _: self._clicked())
        self._names: dict[str, str] = {}
        super().__init__([self.which, self.button], layout=ipw.Layout(flex_flow="row wrap"))

    def arrange(self, names: Mapping[str, str]) -> None:
        """Offers these plans, key -> name."""
        self._names = dict(names)
        options = [*((name, key) for key, name in names.items()), (EVERY, EVERY)]
        now = self.which.value if self.which.value in (*names, EVERY) else options[0][1]
        if list(self.which.options) != options:
            self.which.options = options
        self.which.value = now

    def _clicked(self) -> None:
        keys = list(self._names) if self.which.value == EVERY else [self.which.value]
        try:
            for key in keys:
                ranks = ranks_for(self.of._answers[key])
        except Exception as error:
            self.of.message.fail(error)
            return
        self.of.run_in_background(lambda: self._run(keys), f"Running on {counted(ranks.world_size, 'rank')} …", "run")

    def _run(self, keys: Sequence[str]) -> str:
        self.button.disabled = True
        try:
            return f"Measured: {'; '.join(f'{self._names[key]}: {self.of.run(column=key)}' for key in keys)}."
        finally:
            self.button.disabled = False


class _Changes(Quiet, ipw.VBox):
    """Two menus of plans, and a table of the changes from one to the other.

    Args:
        look: called with the function that shows another pair, when the reader chooses one.
    """

    def __init__(self, look: Callable[[Callable[[], None]], None]) -> None:
        width = "max-content"  # names of plans are long
        self.baseline = controls.pick("Changes from", "the plan before the changes", [("", "")], width)
        self.compared = controls.pick("to", "the plan after the changes", [("", "")], width)
        self.table = controls.wide_html()
        self._names: dict[str, str] = {}
        self._shown: PlanComparison | None = None
        for menu in (self.baseline, self.compared):
            self.on(menu, lambda _: look(self._show))
        super().__init__([controls.row([self.baseline, self.compared]), self.table], layout=ipw.Layout(width="100%"))

    def arrange(self, names: Mapping[str, str]) -> None:
        """Offers these plans, key -> name. Begins with the planner's own, if any, and the first other."""
        keys, self._names = list(names), dict(names)
        entries = [(name, key) for key, name in names.items()]
        first = self.baseline.value if self.baseline.value in keys else "auto" if "auto" in keys else keys[0]
        other = next(key for key in keys if key != first)
        second = self.compared.value if self.compared.value in keys else other
        with self.quietly():
            for menu, value in ((self.baseline, first), (self.compared, second)):
                if list(menu.options) != entries:
                    menu.options = entries
                menu.value = value

    def show(self, comparison: PlanComparison) -> None:
        """Lists the changes between the chosen two."""
        self._shown = comparison
        self._show()

    @property
    def python(self) -> str:
        """The table in Python, for a comparison in the variable ``found``."""
        before, after = (self._names[menu.value] for menu in (self.baseline, self.compared))
        return f"print(found.diff({after!r}, baseline={before!r}))"

    def _show(self) -> None:
        if self._shown is None:
            return
        if self.baseline.value == self.compared.value:
            self.table.value = page.note("Choose two plans to see the changes from one to the other.")
            return
        before, after = (self._names[menu.value] for menu in (self.baseline, self.compared))
        try:
            found = self._shown.diff(after, before)
        except (PlanError, ValueError) as error:
            self.table.value = page.note(f"No changes to list. {error}")
            return
        self.table.value = page.diff_table(found, before, after)
