"""PlanCompare: the reader's plan beside the planner's, every control answered at once, and a button that runs it.

The controls ask a `Question`; the answers are drawn by the registered views. Work that takes longer than a blink (a
run on the ranks) happens in a thread, so the kernel stays free; whatever goes wrong is written into the widget.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import ipywidgets as ipw

from recshard_lab.embedding.configs import BaseEmbeddingConfig, check_tables
from recshard_lab.lab import views
from recshard_lab.lab.measure import Measured, measure_plan
from recshard_lab.lab.view import View, message_view
from recshard_lab.lab.views.registry import reason
from recshard_lab.lab.widgets import controls, page
from recshard_lab.lab.widgets.question import Answer, Question, answer, explained, python_for
from recshard_lab.lab.widgets.steps import batch_sizes, memory_caps, world_sizes
from recshard_lab.planner import Workload
from recshard_lab.sharding import Topology

MOST_MENUS = 48  # tables with a menu of their own; the smaller ones share one
PICTURE_WIDTH = 500
KNOWN = ("plan", "tables", "topology", "estimate", "measured", "width")


class PlanCompare(ipw.VBox):
    """Compares a plan chosen by hand with the planner's own.

    Args:
        tables: the configs.
        topology: the ranks to begin with; its speeds hold for every number of ranks.
        workload: the step; its batch size is where the control begins.
        schemes: table -> scheme to begin with; tables left out are "auto".

    Raises:
        ValueError: no tables, two of one name, or a scheme or table that does not exist.
    """

    def __init__(
        self,
        tables: Sequence[BaseEmbeddingConfig],
        topology: Topology,
        workload: Workload | None = None,
        schemes: Mapping[str, str] | None = None,
    ) -> None:
        check_tables(tables)
        self.tables, self.topology, self.workload = list(tables), topology, workload or Workload()
        self.measured: Measured | None = None
        self.last_response_ms = 0.0
        self._answers: dict[str, Answer] = {}
        self._views: dict[str, dict[str, View]] = {}
        self._cached: dict[Any, Answer] = {}
        self._quiet = False
        self._running: threading.Thread | None = None
        self._explaining: threading.Timer | None = None
        self._build()
        super().__init__(self._rows(), layout=ipw.Layout(width="100%", max_width="1180px"))
        self.add_class("recshard-plan-compare")
        self.set(schemes)

    # ---- what a reader asks from Python ----

    @property
    def question(self) -> Question:
        """The state of the controls."""
        schemes = {name: menu.value for name, menu in self.menus.items()}
        if self.others is not None:
            schemes |= dict.fromkeys(self._sharing, self.others.value)
        return Question(schemes, self.world_size.value, self.batch_size.value, self.memory_cap.value)

    @property
    def mine(self) -> Answer:
        """The reader's plan, its estimate and, where it does not fit, the refusal."""
        return self._answers["mine"]

    @property
    def automatic(self) -> Answer:
        """The planner's plan under the same ranks, batch and memory."""
        return self._answers["auto"]

    @property
    def python(self) -> str:
        """The reader's plan in Python."""
        return python_for(self.question, self.topology, self.workload, len(self.tables))

    def set(
        self,
        schemes: Mapping[str, str] | None = None,
        *,
        world_size: int | None = None,
        batch_size: int | None = None,
        memory_cap: int | None = None,
    ) -> None:
        """Moves several controls and answers once: ``widget.set({"movies": "row_wise"}, world_size=8)``.

        Raises:
            ValueError: a table, a scheme or a step that the controls do not have.
        """
        with self._quietly():
            for name, scheme in (schemes or {}).items():
                self._menu_of(name).value = self._checked(scheme)
            moves = ((self.world_size, world_size), (self.batch_size, batch_size), (self.memory_cap, memory_cap))
            for slider, value in moves:
                if value is not None:
                    slider.value = value
        self.respond()

    def respond(self) -> None:
        """Answers the controls as they stand: both plans, all views, all numbers. Timed in ``last_response_ms``."""
        begun = perf_counter()
        try:
            self._answer()
            self._show()
        except Exception as error:
            self.status.value = page.alert(f"This could not be answered. {reason(error)}")
        self.last_response_ms = 1000 * (perf_counter() - begun)
        if self._explaining is not None:
            self._explaining.cancel()
        if any(shown.problem for shown in self._answers.values()):
            self._explaining = threading.Timer(0.5, self.explain)
            self._explaining.daemon = True
            self._explaining.start()

    def explain(self) -> None:
        """Replaces a short refusal by the planner's full one, with the smallest changes that fit."""
        for side, shown in list(self._answers.items()):
            full = explained(shown, self.tables)
            if self._answers.get(side) is shown and full is not shown:  # the controls may have moved on
                self._cached[self._key(shown.question)] = self._answers[side] = full
                self.cards[side].value = page.card(side, full, None)

    def run(self, steps: int = 10) -> Measured:
        """Runs the shown plan on the launched ranks and waits for the numbers; the button does the same in a thread.

        Raises:
            ValueError: no ranks are launched, or not as many as the plan has.
        """
        shown = self.mine
        ranks = self._ranks_for(shown)
        assert shown.plan is not None
        found = measure_plan(ranks, shown.plan, self.tables, shown.workload, steps=steps)
        if self.mine is shown:  # the controls may have moved on
            self.measured = found
            self._draw()
            self._show()
        return found

    # ---- building ----

    def _build(self) -> None:
        own = sorted(self.tables, key=lambda table: -table.weight_bytes)[:MOST_MENUS]
        self.menus = {table.name: controls.menu(table.name, page.facts(table)) for table in self.tables if table in own}
        self._sharing = [table.name for table in self.tables if table.name not in self.menus]
        self.others = controls.menu(f"{len(self._sharing)} others", "the smaller tables") if self._sharing else None
        self.set_all = controls.set_all()
        cap, size, batch = self.topology.memory_cap_bytes, self.topology.world_size, self.workload.batch_size
        self.world_size = controls.slider("Ranks", world_sizes(size), size, "world_size")
        self.batch_size = controls.slider("Batch per rank", batch_sizes(batch), batch, "batch_size")
        self.memory_cap = controls.slider("Memory per rank", memory_caps(self.tables, cap), cap, "bytes of one rank")
        self.picture = controls.choice([(views.view_label(name), name) for name in views.views_of(*KNOWN)])
        self.cards = {side: controls.wide_html() for side in page.SIDES}
        self.pictures = {side: controls.wide_html() for side in page.SIDES}
        self.verdict, self.status, self.code = ipw.HTML(), ipw.HTML(), controls.wide_html()
        hint = "runs your plan on the launched ranks and lays the measured numbers beside the predicted"
        self.button = ipw.Button(description="Run on ranks", tooltip=hint, icon="play", button_style="primary")
        for control in [*self._all_menus(), self.world_size, self.batch_size, self.memory_cap]:
            control.observe(self._changed, names="value")
        self.set_all.observe(self._all_changed, names="value")
        self.picture.observe(lambda _: self._show(), names="value")
        self.button.on_click(lambda _: self._clicked())

    def _all_menus(self) -> list[ipw.Dropdown]:
        return [*self.menus.values(), *([self.others] if self.others is not None else [])]

    def _rows(self) -> list[ipw.Widget]:
        return [
            ipw.HTML(page.STYLE),
            controls.row([self.world_size, self.batch_size, self.memory_cap]),
            controls.row([ipw.HTML("<b>Scheme of each table</b>"), self.set_all]),
            controls.grid(self._all_menus()),
            self.verdict,
            self.picture,
            controls.halves([self.cards[side], self.pictures[side]] for side in page.SIDES),
            controls.row([self.button, self.status]),
            self.code,
        ]

    # ---- answering ----

    def _changed(self, _: Any) -> None:
        if not self._quiet:
            self.respond()

    def _all_changed(self, change: Any) -> None:
        if not change["new"]:
            return
        with self._quietly():
            for menu in self._all_menus():
                menu.value = change["new"]
            self.set_all.value = ""
        self.respond()

    def _answer(self) -> None:
        asked = self.question
        self._answers = {"mine": self._cached_answer(asked), "auto": self._cached_answer(asked.automatic())}
        self.measured = None
        self.status.value = ""
        self._draw()

    def _cached_answer(self, asked: Question) -> Answer:
        key = self._key(asked)
        if key not in self._cached:
            if len(self._cached) > 64:
                self._cached.pop(next(iter(self._cached)))
            self._cached[key] = answer(asked, self.tables, self.topology, self.workload)
        return self._cached[key]

    @staticmethod
    def _key(asked: Question) -> tuple[Any, ...]:
        return tuple(sorted(asked.chosen.items())), asked.world_size, asked.batch_size, asked.memory_cap

    def _draw(self) -> None:
        """All views of both plans."""
        names = [name for _, name in self.picture.options]
        self._views = {side: {name: self._view(name, side) for name in names} for side in self._answers}
        self._markup = {
            (side, name): view.inline(f"{self.model_id[:8]}-{side}-{name}")
            for side, drawn in self._views.items()
            for name, view in drawn.items()
        }

    def _view(self, name: str, side: str) -> View:
        shown = self._answers[side]
        if shown.plan is None or shown.estimate is None:
            return message_view(name, views.view_label(name), shown.problem)
        return views.draw(
            name,
            plan=shown.plan,
            tables=self.tables,
            topology=shown.topology,
            estimate=shown.estimate,
            measured=self.measured if side == "mine" else None,
            width=PICTURE_WIDTH,
        )

    def _show(self) -> None:
        """Sends what is looked at; the other pictures are drawn and wait."""
        name = self.picture.value
        for side in self._answers:
            measured = self.measured if side == "mine" else None
            self.cards[side].value = page.card(side, self._answers[side], measured)
            self.pictures[side].value = page.picture(self._markup[side, name])
        self.verdict.value = page.verdict(self.mine, self.automatic)
        self.code.value = page.code(self.python)

    # ---- running ----

    def _ranks_for(self, shown: Answer) -> Any:
        from recshard_lab.launcher import current

        ranks, wanted = current(), shown.question.world_size
        if ranks is None:
            raise ValueError(f"No ranks are launched. Launch them in a cell: %recshard_launch -n {wanted}")
        if ranks.world_size != wanted:
            raise ValueError(
                f"The plan is for {wanted} ranks, {ranks.world_size} are launched. Set Ranks to {ranks.world_size}, "
                f"or relaunch: %recshard_stop, then %recshard_launch -n {wanted}"
            )
        if shown.plan is None or shown.problem:
            raise ValueError("This plan does not fit, so it is not run. " + shown.problem)
        return ranks

    def _clicked(self) -> None:
        if self._running is not None and self._running.is_alive():
            return
        try:
            self._ranks_for(self.mine)
        except Exception as error:
            self.status.value = page.alert(reason(error))
            return
        self.button.disabled = True
        self.status.value = page.note(f"Running on {self.mine.question.world_size} ranks …")
        self._running = threading.Thread(target=self._run_and_tell, name="recshard-plan-compare", daemon=True)
        self._running.start()

    def _run_and_tell(self) -> None:
        try:
            found = self.run()
            self.status.value = page.note(f"Measured: {found}.")
        except Exception as error:
            self.status.value = page.alert(reason(error))
        finally:
            self.button.disabled = False

    # ---- small things ----

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        self._quiet = True
        try:
            yield
        finally:
            self._quiet = False

    def _menu_of(self, table: str) -> ipw.Dropdown:
        if table in self.menus:
            return self.menus[table]
        if self.others is not None and table in self._sharing:
            raise ValueError(
                f"table {table!r} shares one menu with {len(self._sharing)} small tables: set .others.value"
            )
        raise ValueError(f"there is no table {table!r}; tables: {', '.join(self.menus)}")

    def _checked(self, scheme: str) -> str:
        known = [value for _, value in controls.scheme_options()]
        if scheme not in known:
            raise ValueError(f"there is no scheme {scheme!r}; schemes: {', '.join(known)}")
        return str(scheme)

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        """The widget, and for pages without a kernel the placement of both plans."""
        bundle = super()._repr_mimebundle_(**kwargs) or {}
        static = "".join(
            page.card(side, self._answers[side], None) + self._views[side]["placement"].img for side in self._answers
        )
        lines = [f"{page.SIDES[side]}: {page.sentence(shown)}" for side, shown in self._answers.items()]
        return {**bundle, "text/html": static, "text/plain": "\n".join(lines)}
