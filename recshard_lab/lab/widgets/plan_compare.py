"""PlanCompare: 2 to 6 plans side by side, every control answered at once, and a button that runs them.

::

    columns (`plan_columns.py`, edited by `column_bar.py`)  --question-->  answers (`compare/question.py`)
    answers  -->  PlanComparison (`compare/plan_comparison.py`): numbers, best of each row, diff, pictures to one scale

Work that takes longer than a blink (many ranks, a run on the ranks) happens in a thread, so the kernel stays free;
whatever goes wrong is written into the widget.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import ipywidgets as ipw

from recshard_lab.embedding.configs import BaseEmbeddingConfig, check_tables
from recshard_lab.lab import views
from recshard_lab.lab.compare.measure import Measured, measure_plan
from recshard_lab.lab.compare.plan_comparison import PlanComparison, Wish, views_of_plans
from recshard_lab.lab.compare.question import Answer, Question, answer, explained
from recshard_lab.lab.compare.question_code import python_for
from recshard_lab.lab.views.registry import reason
from recshard_lab.lab.widgets import controls, page
from recshard_lab.lab.widgets.base import LabWidget
from recshard_lab.lab.widgets.column_bar import ColumnBar
from recshard_lab.lab.widgets.diff_panel import DiffPanel
from recshard_lab.lab.widgets.export_control import ExportControl, ExportsComparison
from recshard_lab.lab.widgets.newest import Newest
from recshard_lab.lab.widgets.plan_cells import PlanCells
from recshard_lab.lab.widgets.plan_columns import column_of, first_columns, python_of_all
from recshard_lab.lab.widgets.plan_pictures import PlanPictures
from recshard_lab.lab.widgets.run_bar import RunBar, ranks_for
from recshard_lab.lab.widgets.steps import batch_sizes, memory_caps, world_sizes
from recshard_lab.planner import Workload
from recshard_lab.sharding import Topology

AT_ONCE = 3 * 26 * 8  # tables x ranks to be planned, summed over plans, that a control answers without a thread


class PlanCompare(ExportsComparison, LabWidget):
    """Compares plans of the same tables for the same ranks and the same step.

    Args:
        tables: the configs.
        topology: the ranks to begin with; its speeds hold for every number of ranks.
        workload: the step; its batch size is where the control begins.
        schemes: table -> scheme of "Your plan" to begin with; tables left out are "auto".
        plans: name -> plan, 2 to 6 of them, each as `compare_plans` takes it; left out, "Your plan" (key "mine"), by
            hand, beside "The planner's plan" (key "auto").

    Raises:
        ValueError: no tables, two of one name, a scheme or table that does not exist, fewer plans than 2 or more
            than 6, or one that is nothing that `compare_plans` takes.
    """

    def __init__(
        self,
        tables: Sequence[BaseEmbeddingConfig],
        topology: Topology,
        workload: Workload | None = None,
        schemes: Mapping[str, str] | None = None,
        *,
        plans: Mapping[str, Wish] | None = None,
    ) -> None:
        check_tables(tables)
        self.tables, self.topology, self.workload = list(tables), topology, workload or Workload()
        self.columns = first_columns(self.tables, topology, self.workload, plans, None if plans is None else schemes)
        self.last_response_ms = self.last_answer_ms = 0.0
        self._answers: dict[str, Answer] = {}
        self._cached: dict[Any, Answer] = {}
        self._ran: dict[str, tuple[Answer, Measured]] = {}
        self._lock = threading.RLock()  # the reader's moves and a thread's news are shown one after the other
        self._newest = Newest("plan-compare")
        self._quiet = False
        self._explaining: threading.Timer | None = None
        self._build()
        super().__init__(self._rows(), layout=ipw.Layout(width="100%", max_width="1180px"))
        self.add_class("recshard-plan-compare")
        self.set(schemes if plans is None else None)

    # ---- what a reader asks from Python ----

    @property
    def answers(self) -> dict[str, Answer]:
        """Key -> plan, estimate and, where it does not fit, the refusal; waits for what is being computed."""
        self.wait()
        return dict(self._answers)

    @property
    def comparison(self) -> PlanComparison:
        """The comparison as `compare_plans` gives it, with what was measured."""
        self.wait()
        return self._comparison()

    @property
    def question(self) -> Question:
        """What the controls ask of the plan that they change."""
        return self.bar.chosen.question(*self._step)

    @property
    def mine(self) -> Answer:
        """The plan that the controls change."""
        return self.answers[self.bar.chosen.key]

    @property
    def automatic(self) -> Answer:
        """The planner's plan under the same ranks, batch and memory."""
        return self._cached_answer(self.question.automatic())

    @property
    def measured(self) -> Measured | None:
        """What the ranks reported of the plan that the controls change, where it was run as it stands."""
        return self._measured(self.bar.chosen.key)

    @property
    def python(self) -> str:
        """The plan that the controls change, in Python."""
        return self.python_of(self.bar.chosen.key)

    def python_of(self, key: str) -> str:
        """One plan in Python."""
        asked = self.columns[key].question(*self._step)
        return python_for(asked, self.topology, self.workload, len(self.tables))

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
            column: key of the plan that they change from now on.

        Raises:
            ValueError: a plan, a table, a scheme or a step that the controls do not have.
        """
        if column is not None:
            self.bar.choose(column)
        for name, scheme in (schemes or {}).items():
            self.bar.set_scheme(name, scheme)
        self.bar.show()
        self._quiet = True
        try:
            moves = ((self.world_size, world_size), (self.batch_size, batch_size), (self.memory_cap, memory_cap))
            for slider, value in moves:
                if value is not None:
                    slider.value = value
        finally:
            self._quiet = False
        self.respond()

    def add(self, name: str, plan: Wish) -> None:
        """Adds a plan, as `compare_plans` takes it, and lets the controls change it.

        Raises:
            ValueError: there are 6 already, or one of this name; as `compare_plans`.
        """
        self.bar.put(column_of(name, plan, self.tables, self.topology, self.workload))

    def remove(self, key: str) -> None:
        """Takes a plan out.

        Raises:
            ValueError: there is none of this key, or only 2 are left.
        """
        self.bar.remove_column(key)

    def wait(self, timeout_s: float = 60.0) -> bool:
        """Waits for what is being computed in the background; whether it ended in time."""
        return self._newest.wait(timeout_s) and self.drawn.wait(timeout_s)

    def respond(self) -> None:
        """Answers the controls as they stand: all plans, what is looked at, all numbers. Timed in `last_response_ms`;
        where planning takes longer, the cards say so and a thread fills them in: `last_answer_ms` after the control."""
        begun = perf_counter()
        asked = {key: column.question(*self._step) for key, column in self.columns.items()}
        self._newest.forget()
        if self._explaining is not None:
            self._explaining.cancel()
        new = [each for each in asked.values() if each.key not in self._cached and each.plan is None]
        with self._lock:
            self._arrange()
            if len(new) * len(self.tables) * self.world_size.value <= AT_ONCE:
                self._finish(asked, begun, lambda: True)
            else:
                self._show_waiting(asked)
                self._newest.ask(lambda wanted: self._finish(asked, begun, wanted))
        self.last_response_ms = 1000 * (perf_counter() - begun)

    def explain(self) -> None:
        """Replaces short refusals by the planner's full ones, with the smallest changes that fit."""
        for key, shown in list(self._answers.items()):
            full = explained(shown, self.tables)
            with self._lock:
                if self._answers.get(key) is shown and full is not shown:  # the controls may have moved on
                    self._cached[shown.question.key] = self._answers[key] = full
                    self._show_cards()

    def run(self, steps: int = 10, column: str | None = None) -> Measured:
        """Runs a plan on the launched ranks and waits for the numbers; the button does the same in a thread.

        Args:
            steps: how many are timed.
            column: key of the plan; the one that the controls change when left out.

        Raises:
            ValueError: no ranks are launched, or not as many as the plan has.
        """
        key = column or self.bar.chosen.key
        shown = self.answers[key]
        ranks = ranks_for(shown)
        assert shown.plan is not None
        found = measure_plan(ranks, shown.plan, self.tables, shown.workload, steps=steps)
        with self._lock:
            self._ran[key] = (shown, found)
            if self._answers.get(key) is shown:  # the controls may have moved on
                self.drawn.forget()
                self._show()
        return found

    # ---- building ----

    def _build(self) -> None:
        self.verdict, self.status = ipw.HTML(), ipw.HTML()
        self.bar = ColumnBar(self.columns, self.tables, self.respond, self._plan_of, self._tell)
        self.menus, self.others, self.set_all = self.bar.menus, self.bar.others, self.bar.set_all
        cap, size, batch = self.topology.memory_cap_bytes, self.topology.world_size, self.workload.batch_size
        self.world_size = controls.slider("Ranks", world_sizes(size), size, "world_size")
        self.batch_size = controls.slider("Batch per rank", batch_sizes(batch), batch, "batch_size")
        self.memory_cap = controls.slider("Memory per rank", memory_caps(self.tables, cap), cap, "bytes of one rank")
        self.picture = controls.choice([(views.view_label(name), name) for name in views_of_plans()])
        self.cells, self.code = PlanCells(), controls.wide_html()
        self.drawn = PlanPictures(self.cells.pictures, lambda: self.model_id[:8], self._lock)
        self.cards, self.pictures, self.codes = self.cells.cards, self.cells.pictures, self.cells.codes
        self.changes = DiffPanel(self._looked)
        self.runs = RunBar(self.status, lambda key: self._answers[key], lambda key: self.run(column=key))
        self.button, self.exports = self.runs.button, ExportControl(self, "plan_comparison")
        for control in (self.world_size, self.batch_size, self.memory_cap):
            control.observe(self._moved, names="value")
        self.picture.observe(lambda _: self._looked(self._show_pictures), names="value")

    def _rows(self) -> list[ipw.Widget]:
        return [
            ipw.HTML(page.STYLE),
            controls.sliders([self.world_size, self.batch_size, self.memory_cap]),
            self.bar,
            controls.row([self.runs, self.status]),
            self.verdict,
            self.cells.card_grid,
            self.picture,
            self.cells.picture_grid,
            self.changes,
            controls.foot(self.exports, self.code),
        ]

    def _arrange(self) -> None:
        """Room for every column, and menus that name them."""
        self.cells.arrange(list(self.columns))
        names = {key: column.name for key, column in self.columns.items()}
        for each in (self.changes, self.runs, self.exports):
            each.arrange(names)

    # ---- answering ----

    @property
    def _step(self) -> tuple[int, int, int]:
        return self.world_size.value, self.batch_size.value, self.memory_cap.value

    def _moved(self, _: Any) -> None:
        if not self._quiet:
            self.respond()

    def _looked(self, what: Callable[[], None]) -> None:
        """Answers a control that only chooses what is looked at."""
        if self._quiet:
            return
        begun = perf_counter()
        with self._lock:
            what()
        self.last_response_ms = 1000 * (perf_counter() - begun)

    def _finish(self, asked: Mapping[str, Question], begun: float, wanted: Callable[[], bool]) -> None:
        """Answers all columns and shows them, unless something newer is wished for meanwhile."""
        try:
            found = {}
            for key, each in asked.items():
                if not wanted():
                    return
                found[key] = self._cached_answer(each)
            with self._lock:
                if not wanted():
                    return
                self._answers = found
                self.drawn.forget()
                self.status.value = ""
                self._show()
                self.last_answer_ms = 1000 * (perf_counter() - begun)
                if any(shown.problem and shown.question.plan is None for shown in found.values()):
                    self._explaining = threading.Timer(0.5, self.explain)
                    self._explaining.daemon = True
                    self._explaining.start()
        except Exception as error:
            self._tell(f"This could not be answered. {reason(error)}")

    def _cached_answer(self, asked: Question) -> Answer:
        found = self._cached.get(asked.key)
        if found is None:
            if len(self._cached) > 96:
                self._cached.pop(next(iter(self._cached)))
            found = self._cached[asked.key] = answer(asked, self.tables, self.topology, self.workload)
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
        self._show_difference()
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

    def _show_waiting(self, asked: Mapping[str, Question]) -> None:
        """What is shown stays, marked as out of date."""
        for key, column in self.columns.items():
            self.cards[key].value = page.waiting(key, column.name, self.cards[key].value)
        words = f"Computing {len(asked)} plans of {len(self.tables):,} tables on {self.world_size.value} ranks …"
        self.verdict.value = page.note(words)

    def _show_pictures(self) -> None:
        """Sends what is looked at, drawn when it is first looked at."""
        names = {key: column.name for key, column in self.columns.items() if key in self._answers}
        self.drawn.show(self.picture.value, self._comparison(), names, self.cells.picture_width)

    def _show_difference(self) -> None:
        self.changes.show(self._comparison())

    def _tell(self, words: str) -> None:
        self.status.value = page.alert(words)

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        """The widget, and for pages without a kernel the placement and the numbers of every plan."""
        bundle = super()._repr_mimebundle_(**kwargs) or {}
        found = self.comparison
        drawn = found.views("placement").values()
        cards = (
            page.card(key, self._answers[key], self._measured(key), self.columns[key].name, planned=True)
            for key in self.columns
        )
        static = "".join(card + view.img for card, view in zip(cards, drawn, strict=True))
        lines = [f"{name}: {page.sentence(shown)}" for name, shown in found.answers.items()]
        return {**bundle, "text/html": static, "text/plain": "\n".join(lines)}
