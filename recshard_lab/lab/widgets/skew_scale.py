"""SkewScale: what skew, more rows, larger batches and more ranks do to steps, memory and the planner's choices.

::

    sliders  --Setting-->  Scaled (tables, topology, workload)
             --compare_plans-->  the planner's plan, and all tables under each scheme

The planner's plan answers at once; the schemes, one after the other, and the reasons follow from the widget's thread.
With many ranks or tables all of it does. A slider that moves on ends what was being computed for where it stood.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import ipywidgets as ipw

from recshard_lab.embedding.configs import BaseEmbeddingConfig, check_tables
from recshard_lab.lab import views
from recshard_lab.lab.compare import scaling
from recshard_lab.lab.compare.plan_comparison import PLANNER, PlanComparison, compare_plans
from recshard_lab.lab.compare.question import Answer
from recshard_lab.lab.compare.scaling import Choice, Scaled, Setting
from recshard_lab.lab.draw.theme import counted
from recshard_lab.lab.views.registry import reason
from recshard_lab.lab.widgets import controls, page
from recshard_lab.lab.widgets.base import LabWidget
from recshard_lab.lab.widgets.export_control import ExportControl, ExportsComparison
from recshard_lab.lab.widgets.newest import Newest
from recshard_lab.lab.widgets.steps import batch_sizes, world_sizes
from recshard_lab.planner import Workload
from recshard_lab.sharding import Topology

AT_ONCE = 2 * 26 * 8  # tables x ranks of a plan that is made while the slider waits
REASONS = 12  # tables whose change of scheme is explained
KEPT = 64  # settings whose answers are remembered


class SkewScale(ExportsComparison, LabWidget):
    """Sliders over skew and scale of one set of tables.

    Args:
        tables: the configs.
        topology: the ranks to begin with.
        workload: the step to begin with.

    Raises:
        ValueError: no tables, or two of one name.
    """

    def __init__(
        self, tables: Sequence[BaseEmbeddingConfig], topology: Topology, workload: Workload | None = None
    ) -> None:
        check_tables(tables)
        self.tables, self.topology, self.workload = list(tables), topology, workload or Workload()
        self.last_response_ms = self.last_answer_ms = 0.0
        self._kept: dict[Setting, dict[str, Answer]] = {}
        self._reasons: dict[tuple[Setting, Setting], list[Choice]] = {}
        self._lock = threading.RLock()
        self._newest = Newest("skew-scale")
        self._quiet = False
        self._build()
        super().__init__(self._rows(), layout=ipw.Layout(width="100%", max_width="1180px"))
        self.add_class("recshard-plan-compare")
        self.add_class("recshard-skew-scale")
        self.pinned = self.setting
        self.respond()

    # ---- what a reader asks from Python ----

    @property
    def setting(self) -> Setting:
        """Where the sliders stand."""
        return Setting(
            self.world_size.value,
            self.batch_size.value,
            self.skew.value,
            self.rows.value,
            self.pooling.value,
            self.machine.value,
            self.sorted_ids.value,
        )

    @property
    def scaled(self) -> Scaled:
        """The tables, ranks and workload that the sliders stand for."""
        return Scaled.by(self.setting, self.tables, self.topology, self.workload)

    @property
    def comparison(self) -> PlanComparison:
        """The planner's plan and each scheme's where the sliders stand; waits for what is being computed."""
        self.wait()
        return PlanComparison(self.scaled.tables, dict(self._kept[self.setting]))

    @property
    def changed(self) -> list[Choice]:
        """The tables whose scheme the planner changes from the pinned setting to this one, and why; waits."""
        self.wait()
        return list(self._reasons.get((self.pinned, self.setting), []))

    @property
    def python(self) -> str:
        """The setting in Python."""
        return scaling.python_for_setting(self.setting, self.topology, self.workload)

    @property
    def python_of_all(self) -> str:
        """The same, for `export`."""
        return self.python

    def set(self, **values: Any) -> None:
        """Moves several controls and answers once: ``widget.set(world_size=64, machine="h100", skew=1.05)``.

        Args:
            values: fields of `Setting`, each at a step of its slider.

        Raises:
            ValueError: no such field, or a value that is no step of its control.
        """
        known = self._by_field()
        for name in values:
            if name not in known:
                raise ValueError(f"there is no control {name!r}; there are: {', '.join(known)}")
        self._quiet = True
        try:
            for name, value in values.items():
                control = known[name]
                if control is self.machine and value not in scaling.machines():
                    raise ValueError(f"there is no machine {value!r}; there are: {', '.join(scaling.machines())}")
                control.value = value
        finally:
            self._quiet = False
        self.respond()

    def pin(self) -> None:
        """Takes where the sliders stand as what choices are compared with from now on."""
        self.pinned = self.setting
        self.respond()

    def wait(self, timeout_s: float = 120.0) -> bool:
        """Waits for what is being computed in the background; whether it ended in time."""
        return self._newest.wait(timeout_s)

    def close(self) -> None:
        """Ends what is being computed."""
        if hasattr(self, "_newest"):
            self._newest.forget()
        super().close()

    def respond(self) -> None:
        """Answers the controls as they stand. Timed in `last_response_ms`; when all schemes and reasons are there, in
        `last_answer_ms`."""
        begun = perf_counter()
        setting = self.setting
        self._newest.forget()
        with self._lock:
            try:
                made = Scaled.by(setting, self.tables, self.topology, self.workload)
                self._show_setting(setting, made)
                known = self._kept.get(setting, {})
                if PLANNER not in known and len(self.tables) * setting.world_size <= AT_ONCE:
                    self._answer(setting, made, PLANNER)
                self._show(setting, made)
                if len(self._kept.get(setting, {})) < len(scaling.columns()) or self._unexplained(setting):
                    self._newest.ask(lambda wanted: self._later(setting, made, begun, wanted))
                else:
                    self.last_answer_ms = 1000 * (perf_counter() - begun)
            except Exception as error:
                self.status.value = page.alert(f"This could not be answered. {reason(error)}")
        self.last_response_ms = 1000 * (perf_counter() - begun)

    # ---- building ----

    def _build(self) -> None:
        size, batch = self.topology.world_size, self.workload.batch_size
        hint = "how unevenly rows are used: p(k) ~ k ** -alpha, or as Meta published of its tables in 2021"
        self.skew = controls.slider("Skew", scaling.skews(), scaling.AS_GIVEN, hint)
        self.rows = controls.slider("Rows x", scaling.factors(), 1.0, "times as many rows in every table")
        self.pooling = controls.slider("Ids a bag", scaling.poolings(), None, "pooling factor of every feature")
        self.batch_size = controls.slider("Batch per rank", batch_sizes(batch), batch, "samples of one rank")
        self.world_size = controls.slider("Ranks", world_sizes(size), size, "how many ranks the tables are spread over")
        given = f"as given ({self.topology.compute_device})"
        options = [(given if name == scaling.AS_GIVEN else name, name) for name in scaling.machines()]
        self.machine = controls.pick("Machine", "whose published figures the ranks have", options, "240px")
        hint = "row 0 is the most used: then equal numbers of rows are no equal work, and plans may cut by use"
        self.sorted_ids = ipw.Checkbox(value=False, description="ids sorted by use", tooltip=hint, indent=False)
        self.sorted_ids.layout.width = "auto"
        largest = sorted(self.tables, key=lambda table: -table.num_embeddings)
        names = [(table.name, table.name) for table in largest]
        self.table = controls.pick("Table", "whose use of rows is drawn", names, "220px")
        self.pinning = controls.button(
            "Pin", "compares the planner's choices with where the sliders stand now", "thumb-tack"
        )
        self.note, self.status = controls.wide_html(), ipw.HTML()
        self.card, self.choices, self.code = (controls.wide_html() for _ in range(3))
        self.exports = ExportControl(self, "skew_and_scale")
        self.schemes, self.use = controls.wide_html(), controls.wide_html()
        for control in self._by_field().values():
            control.observe(lambda _: self._moved(), names="value")
        self.table.observe(lambda _: self._looked(), names="value")
        self.pinning.on_click(lambda _: self.pin())

    def _by_field(self) -> dict[str, Any]:
        return {
            "world_size": self.world_size,
            "batch_size": self.batch_size,
            "skew": self.skew,
            "rows_factor": self.rows,
            "pooling_factor": self.pooling,
            "machine": self.machine,
            "sorted_ids": self.sorted_ids,
        }

    def _rows(self) -> list[ipw.Widget]:
        return [
            ipw.HTML(page.STYLE),
            controls.sliders([self.skew, self.rows, self.pooling, self.batch_size, self.world_size]),
            controls.row([self.machine, self.sorted_ids, self.table, self.pinning]),
            self.note,
            self.card,
            self.status,
            controls.halves([[self.schemes, self.choices], [self.use]]),
            controls.foot(self.exports, self.code),
        ]

    # ---- answering ----

    def _moved(self) -> None:
        if not self._quiet:
            self.respond()

    def _looked(self) -> None:
        begun = perf_counter()
        with self._lock:
            self._show_use(self.setting, self.scaled)
        self.last_response_ms = 1000 * (perf_counter() - begun)

    def _answer(self, setting: Setting, made: Scaled, name: str) -> None:
        """One plan of a setting, remembered."""
        plans = {name: scaling.columns()[name]}
        found = compare_plans(made.tables, made.topology, plans, made.workload)[name]
        if setting not in self._kept and len(self._kept) >= KEPT:
            self._kept.pop(next(each for each in self._kept if each not in (self.pinned, setting)))
        self._kept.setdefault(setting, {})[name] = found

    def _later(self, setting: Setting, made: Scaled, begun: float, wanted: Callable[[], bool]) -> None:
        """What a slider does not wait for, as long as it stands there."""
        try:
            for name in scaling.columns():
                if not wanted():
                    return
                if name not in self._kept.get(setting, {}):
                    self._answer(setting, made, name)
                    if name == PLANNER:
                        self._showing(setting, made, wanted)
            self._showing(setting, made, wanted)
            self._explain(setting, wanted)
            if wanted():
                self._showing(setting, made, wanted)
                self.last_answer_ms = 1000 * (perf_counter() - begun)
        except Exception as error:
            self.status.value = page.alert(f"This could not be answered. {reason(error)}")

    def _showing(self, setting: Setting, made: Scaled, wanted: Callable[[], bool]) -> None:
        with self._lock:
            if wanted():
                self._show(setting, made)

    def _changes(self, setting: Setting) -> list[Choice]:
        """What changes from the pinned setting, with reasons where they are known."""
        before, after = (self._kept.get(each, {}).get(PLANNER) for each in (self.pinned, setting))
        if before is None or after is None:
            return []
        return self._reasons.get((self.pinned, setting)) or scaling.choices_changed(before, after)

    def _unexplained(self, setting: Setting) -> bool:
        return bool(self._changes(setting)) and (self.pinned, setting) not in self._reasons

    def _explain(self, setting: Setting, wanted: Callable[[], bool]) -> None:
        """The reasons for the changes of the largest tables."""
        if not self._unexplained(setting):
            return
        pinned, after = self.pinned, self._kept[setting][PLANNER]
        rows = {table.name: table.weight_bytes for table in self.tables}
        changes = sorted(self._changes(setting), key=lambda choice: -rows[choice.table])
        told = scaling.with_reasons(changes[:REASONS], after, wanted)
        why = f"not looked into: {REASONS} larger tables change, too"
        told += [replace(choice, why=why) for choice in changes[REASONS:]]
        if wanted():
            self._reasons[pinned, setting] = told

    # ---- showing ----

    def _show_setting(self, setting: Setting, made: Scaled) -> None:
        """What needs no plan."""
        ranks = counted(setting.world_size, "rank")
        words = f"Prediction for {ranks}; nothing is running."
        if setting.machine != scaling.AS_GIVEN:
            words = f"Simulated: {ranks} of {setting.machine}, by its published figures; nothing is running."
        self.note.value = page.note(words)
        self.code.value = page.code(self.python)
        self.status.value = ""
        self._show_use(setting, made)

    def _show_use(self, setting: Setting, made: Scaled) -> None:
        name = self.table.value
        rows = next(table.num_embeddings for table in made.tables if table.name == name)
        note = "Ids are sorted by use." if setting.sorted_ids else "Drawn as if ids were sorted by use; they are not."
        view = views.access_skew(
            {name: made.shares(name)},
            num_embeddings=rows,
            world_size=setting.world_size,
            note=note,
            width=controls.HALF_WIDTH,
        )
        self.use.value = page.picture(view.inline(f"{self.model_id[:8]}-use"))

    def _show(self, setting: Setting, made: Scaled) -> None:
        """As far as it is known."""
        known = self._kept.get(setting, {})
        missing = len(scaling.columns()) - len(known)
        if PLANNER in known:
            self.card.value = page.card(PLANNER, known[PLANNER], None, "The planner's plan", planned=True)
            self.choices.value = page.choices_table(self._changes(setting), setting == self.pinned)
        else:
            self.card.value = page.waiting(PLANNER, "The planner's plan", self.card.value)
        if missing:
            self.status.value = page.note(f"computing: {missing} of {len(scaling.columns())} plans …")
            if len(known) > 1:
                return  # drawn once all are there
        else:
            self.status.value = ""
        if known and not (missing and self.schemes.value):
            ordered = {name: known[name] for name in scaling.columns() if name in known}
            view = views.side_by_side(PlanComparison(made.tables, ordered), width=controls.HALF_WIDTH)
            self.schemes.value = page.picture(view.inline(f"{self.model_id[:8]}-schemes"), missing > 0)
        elif missing and self.schemes.value:
            self.schemes.value = page.stale(self.schemes.value)

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        """The widget, and for pages without a kernel the schemes as a picture and as numbers."""
        bundle = super()._repr_mimebundle_(**kwargs) or {}
        found = self.comparison
        view = views.side_by_side(found)
        return {**bundle, "text/html": self.note.value + view.img + view.table, "text/plain": found.text}
