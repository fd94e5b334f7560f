"""SkewScale: the effect of skew, more rows, larger batches and more ranks on steps, memory and the planner's choices.

::

    sliders  --Setting-->  Scaled (tables, topology, workload)
             --compare_plans-->  the planner's plan, and all tables under each scheme

The planner's plan is computed at once. The schemes and the reasons follow in a thread; for many ranks or tables, the
planner's plan does too. A slider that moves again replaces the work for its old position.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

from recshard_lab.embedding.configs import BaseEmbeddingConfig, check_tables
from recshard_lab.lab import views
from recshard_lab.lab.compare import scaling
from recshard_lab.lab.compare.plan_comparison import PLANNER, PlanComparison, compare_plans
from recshard_lab.lab.compare.question import Answer
from recshard_lab.lab.compare.scaling import Choice, Scaled, Setting
from recshard_lab.lab.draw.theme import counted
from recshard_lab.lab.exporting.exportable import Exportable
from recshard_lab.lab.views.registry import reason
from recshard_lab.lab.widgets import controls, page
from recshard_lab.lab.widgets.base import LabWidget
from recshard_lab.lab.widgets.chart_box import ChartBox
from recshard_lab.planner import Workload
from recshard_lab.sharding import Topology

AT_ONCE = 2 * 26 * 8  # tables x ranks of a plan that a slider waits for
REASONS = 12  # tables whose change of scheme is explained
MOST_SETTINGS = 64  # whose answers are remembered


class SkewScale(LabWidget):
    """Sliders for skew and scale of one set of tables.

    Args:
        tables: the configs.
        topology: the first ranks.
        workload: the first step.

    Raises:
        ValueError: no tables, or two of one name.
    """

    def __init__(
        self, tables: Sequence[BaseEmbeddingConfig], topology: Topology, workload: Workload | None = None
    ) -> None:
        check_tables(tables)
        self.tables, self.topology, self.workload = list(tables), topology, workload or Workload()
        self.workload.check_names(self.tables)
        self.last_response_ms = self.last_answer_ms = 0.0
        self._answers: dict[Setting, dict[str, Answer]] = {}
        self._reasons: dict[tuple[Setting, Setting], list[Choice]] = {}
        self._lock = threading.RLock()
        super().__init__("skew-scale", "skew_and_scale")
        self._build()
        self.pinned = self.setting
        self.respond()

    # ---- for use from Python ----

    @property
    def setting(self) -> Setting:
        """The positions of the sliders."""
        return Setting(**{name: control.value for name, control in self._by_field().items()})

    @property
    def scaled(self) -> Scaled:
        """Tables, ranks and workload of the setting."""
        return Scaled.by(self.setting, self.tables, self.topology, self.workload)

    @property
    def comparison(self) -> PlanComparison:
        """The planner's plan and each scheme's for this setting; waits for running work."""
        self.wait()
        return PlanComparison(self.scaled.tables, dict(self._answers[self.setting]))

    @property
    def changed(self) -> list[Choice]:
        """The tables whose scheme the planner changes from the pinned setting to this one, and why; waits."""
        self.wait()
        return list(self._reasons.get((self.pinned, self.setting), []))

    @property
    def python(self) -> str:
        """The setting in Python."""
        return scaling.python_for_setting(self.setting, self.topology, self.workload)

    def set(self, **values: Any) -> None:
        """Moves several controls and answers once: ``widget.set(world_size=64, machine="h100", skew=1.05)``.

        Args:
            values: fields of `Setting`, each a step of its slider.

        Raises:
            ValueError: an unknown field, or a value that is not a step of its control.
        """
        known = self._by_field()
        for name in values:
            if name not in known:
                raise ValueError(f"unknown control {name!r}; controls: {', '.join(known)}")
        with self.quietly():
            for name, value in values.items():
                if name == "machine" and value not in scaling.machines():
                    raise ValueError(f"unknown machine {value!r}; machines: {', '.join(scaling.machines())}")
                known[name].value = value
        self.respond()

    def pin(self) -> None:
        """Pins this setting: later choices of the planner are compared with those of here."""
        self.pinned = self.setting
        self.respond()

    def wait(self, timeout_s: float = 120.0) -> bool:
        """Waits for work in the background. Returns whether it ended in time."""
        return self.worker.wait("plans", timeout_s=timeout_s)

    def respond(self) -> None:
        """Answers the controls. Its time is `last_response_ms`; `last_answer_ms` is that until all schemes and reasons
        are shown."""
        begun = perf_counter()
        setting = self.setting
        self.worker.cancel("plans")
        with self._lock:
            try:
                scaled = Scaled.by(setting, self.tables, self.topology, self.workload)
                self._show_setting(setting, scaled)
                known = self._answers.get(setting, {})
                if PLANNER not in known and len(self.tables) * setting.world_size <= AT_ONCE:
                    self._answer(setting, scaled, PLANNER)
                self._show(setting, scaled)
                if len(self._answers.get(setting, {})) < len(scaling.columns()) or self._unexplained(setting):
                    self.worker.newest(lambda is_current: self._later(setting, scaled, begun, is_current), "plans")
                else:
                    self.last_answer_ms = 1000 * (perf_counter() - begun)
            except Exception as error:
                self.message.fail(f"The plans could not be computed. {reason(error)}")
        self.last_response_ms = 1000 * (perf_counter() - begun)

    def exportable(self) -> Exportable:
        """All plans side by side."""
        return self.comparison.exportable(self.python)

    # ---- building ----

    def _build(self) -> None:
        size, batch = self.topology.world_size, self.workload.batch_size
        hint = "how unevenly rows are used: p(k) ~ k ** -alpha, or as Meta published for its tables in 2021"
        self.skew = controls.slider("Skew", scaling.skews(), scaling.UNCHANGED, hint)
        self.rows = controls.slider("Rows, times", scaling.factors(), 1.0, "factor on the rows of every table")
        self.pooling = controls.slider("Ids per bag", scaling.poolings(), None, "pooling factor of every feature")
        batches = controls.batch_sizes(batch)
        self.batch_size = controls.slider("Batch per rank", batches, batch, "samples per rank")
        self.world_size = controls.slider("Ranks", controls.world_sizes(size), size, "number of ranks")
        unchanged = f"unchanged ({self.topology.compute_device})"
        options = [(unchanged if name == scaling.UNCHANGED else name, name) for name in scaling.machines()]
        self.machine = controls.pick("Machine", "the machine whose published figures are used", options, "240px")
        hint = (
            "row 0 is the most used. Equal row shards are then unequal work, and the planner may split rows by load "
            "instead"
        )
        self.sorted_ids = controls.tick("ids sorted by use", hint, value=False)
        largest = sorted(self.tables, key=lambda table: -table.num_embeddings)
        names = [(table.name, table.name) for table in largest]
        self.table = controls.pick("Table", "the table whose use of rows is drawn", names, "220px")
        self.pinning = controls.button("Pin", "compares later choices of the planner with these settings", "thumb-tack")
        self.note, self.card, self.choices = (controls.wide_html() for _ in range(3))
        self.schemes, self.use = ChartBox(), ChartBox()
        for control in self._by_field().values():
            self.on(control, lambda _: self.respond())
        self.on(self.table, lambda _: self._look())
        self.pinning.on_click(lambda _: self.pin())
        self.lay_out(
            [
                controls.sliders([self.skew, self.rows, self.pooling, self.batch_size, self.world_size]),
                controls.row([self.machine, self.sorted_ids, self.table, self.pinning]),
                self.note,
                self.card,
                self.message,
                controls.halves([[self.schemes, self.choices], [self.use]]),
            ]
        )

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

    # ---- answering ----

    def _look(self) -> None:
        begun = perf_counter()
        with self._lock:
            self._show_use(self.setting, self.scaled)
        self.last_response_ms = 1000 * (perf_counter() - begun)

    def _answer(self, setting: Setting, scaled: Scaled, name: str) -> None:
        """Computes and remembers one plan of a setting."""
        plans = {name: scaling.columns()[name]}
        found = compare_plans(scaled.tables, scaled.topology, plans, scaled.workload)[name]
        if setting not in self._answers and len(self._answers) >= MOST_SETTINGS:
            self._answers.pop(next(each for each in self._answers if each not in (self.pinned, setting)))
        self._answers.setdefault(setting, {})[name] = found

    def _later(self, setting: Setting, scaled: Scaled, begun: float, is_current: Callable[[], bool]) -> None:
        """The plans and reasons that a slider does not wait for."""
        try:
            for name in scaling.columns():
                if not is_current():
                    return
                if name not in self._answers.get(setting, {}):
                    self._answer(setting, scaled, name)
                    if name == PLANNER:
                        self._show_if(is_current, setting, scaled)
            self._show_if(is_current, setting, scaled)
            self._explain(setting, is_current)
            if is_current():
                self._show_if(is_current, setting, scaled)
                self.last_answer_ms = 1000 * (perf_counter() - begun)
        except Exception as error:
            self.message.fail(f"The plans could not be computed. {reason(error)}")

    def _show_if(self, is_current: Callable[[], bool], setting: Setting, scaled: Scaled) -> None:
        with self._lock:
            if is_current():
                self._show(setting, scaled)

    def _changes(self, setting: Setting) -> list[Choice]:
        """The changes from the pinned setting, with reasons if they are known."""
        before, after = (self._answers.get(each, {}).get(PLANNER) for each in (self.pinned, setting))
        if before is None or after is None:
            return []
        return self._reasons.get((self.pinned, setting)) or scaling.choices_changed(before, after)

    def _unexplained(self, setting: Setting) -> bool:
        return bool(self._changes(setting)) and (self.pinned, setting) not in self._reasons

    def _explain(self, setting: Setting, is_current: Callable[[], bool]) -> None:
        """Computes the reasons for the changes of the largest tables."""
        if not self._unexplained(setting):
            return
        pinned, after = self.pinned, self._answers[setting][PLANNER]
        sizes = {table.name: table.weight_bytes for table in self.tables}
        changes = sorted(self._changes(setting), key=lambda choice: -sizes[choice.table])
        explained = scaling.with_reasons(changes[:REASONS], after, is_current)
        why = f"not computed: the {REASONS} largest changed tables are explained"
        explained += [replace(choice, why=why) for choice in changes[REASONS:]]
        if is_current():
            self._reasons[pinned, setting] = explained

    # ---- showing ----

    def _show_setting(self, setting: Setting, scaled: Scaled) -> None:
        """The parts that need no plan."""
        ranks = counted(setting.world_size, "rank")
        words = f"Prediction for {ranks}; nothing is running."
        if setting.machine != scaling.UNCHANGED:
            words = f"Simulated: {ranks} of {setting.machine}, by its published figures; nothing is running."
        self.note.value = page.note(words)
        self.code.value = page.code(self.python)
        self.message.show()
        self._show_use(setting, scaled)

    def _show_use(self, setting: Setting, scaled: Scaled) -> None:
        name = self.table.value
        rows = next(table.num_embeddings for table in scaled.tables if table.name == name)
        note = "Ids are sorted by use." if setting.sorted_ids else "Drawn as if ids were sorted by use; they are not."
        view = views.access_skew(
            {name: scaled.shares(name)},
            num_embeddings=rows,
            world_size=setting.world_size,
            note=note,
            width=controls.HALF_WIDTH,
        )
        self.use.show(view, f"{self.uid}-use")

    def _show(self, setting: Setting, scaled: Scaled) -> None:
        """The parts that are computed so far."""
        known = self._answers.get(setting, {})
        missing = len(scaling.columns()) - len(known)
        if PLANNER in known:
            self.card.value = page.card(PLANNER, known[PLANNER], None, "The planner's plan", planned=True)
            self.choices.value = page.choices_table(self._changes(setting), setting == self.pinned)
        else:
            self.card.value = page.waiting(PLANNER, "The planner's plan", self.card.value)
        if missing:
            self.message.show(f"Computing {missing} of {len(scaling.columns())} plans …")
            if len(known) > 1:
                return  # drawn when all are computed
        else:
            self.message.show()
        if known and not (missing and self.schemes.shown):
            ordered = {name: known[name] for name in scaling.columns() if name in known}
            view = views.side_by_side(PlanComparison(scaled.tables, ordered), width=controls.HALF_WIDTH)
            self.schemes.show(view, f"{self.uid}-schemes", unfinished=missing > 0)
        elif missing:
            self.schemes.age()

    def static(self) -> tuple[str, str]:
        """The schemes as a picture and as numbers."""
        found = self.comparison
        view = views.side_by_side(found)
        return self.note.value + view.img + view.table, found.text
