"""SchemeSwitcher: another plan for a model that is training on the ranks, applied while it lives.

::

    menus, split lines  -> the plan asked for -> predicted at once, beside what is predicted and measured of the one
    Apply                                        that the ranks hold
    Apply  -> every rank reshards in place, proves that weights and outputs are the same, training goes on

All work on the ranks happens in one thread of the widget's own, one piece at a time, so that the kernel stays free and
a resharding never meets a training step.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from itertools import accumulate
from time import perf_counter
from typing import Any

import ipywidgets as ipw

from recshard_lab.lab import views
from recshard_lab.lab.compare.question import Answer, Question
from recshard_lab.lab.draw.theme import SCHEMES, look_of
from recshard_lab.lab.draw.view import View
from recshard_lab.lab.exporting.exportable import Candidate, Exportable
from recshard_lab.lab.exporting.plan_report import comparison_page
from recshard_lab.lab.exporting.report import Section
from recshard_lab.lab.live.live_model import LiveModel, Proof
from recshard_lab.lab.live.ranks_gone import LOOK_S
from recshard_lab.lab.views.registry import reason
from recshard_lab.lab.widgets import controls, page
from recshard_lab.lab.widgets.base import LabWidget
from recshard_lab.lab.widgets.export_control import ExportControl, Exports
from recshard_lab.lab.widgets.split_lines import SplitLines
from recshard_lab.lab.widgets.wishes import AS_IT_IS, PLANNED, plan_of_wishes, python_of_wishes
from recshard_lab.launcher import LaunchError, current
from recshard_lab.planner import Estimate, Workload, estimate
from recshard_lab.sharding import PlanError, ShardingPlan, Topology

BURST = 5  # steps between two looks at the controls
BESIDE = "The measured step also runs the model's dense layers."
SIDES = ("live", "asked")


class SchemeSwitcher(Exports, LabWidget):
    """Switches the schemes of a model on the launched ranks.

    Args:
        ranks: the launched session.
        model: how the model is called on the ranks: a `DistributedModelParallel`.
        step: how one training step is called there, a function without arguments that returns its loss; left out, the
            model is resharded and not trained.
        optimizers: how a list of torch optimizers is called there, where tables lie on the dense kernel.
        workload: the step that is predicted; its optimizer and batch size should be those of `step`.
        topology: the machine that is predicted for; this one when left out.

    Raises:
        RankError: there is no such model on the ranks.
        ValueError: the model holds no embedding collection, or a topology of another number of ranks.
    """

    def __init__(
        self,
        ranks: Any,
        model: str = "model",
        step: str | None = None,
        *,
        optimizers: str | None = None,
        workload: Workload | None = None,
        topology: Topology | None = None,
    ) -> None:
        self.live = LiveModel(ranks, model, step, optimizers)
        self.tables, self.workload = self.live.tables, workload or Workload()
        self.topology = topology or Topology(ranks.world_size, local_world_size=ranks.local_world_size)
        if self.topology.world_size != ranks.world_size:
            raise ValueError(f"the topology has {self.topology.world_size} ranks, launched are {ranks.world_size}")
        self.last_response_ms = 0.0
        self._splits: dict[str, list[int]] = {}
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._quiet = self._training = False
        self._gone = ""  # why the model is gone from the ranks; empty while it is there
        self._tried: tuple[Any, ...] = ()  # ranks and variables that were looked at for the model to come back
        self._lock = threading.RLock()  # the reader's moves and the ranks' news are shown one after the other
        self._resting = threading.Event()  # no burst of training is on the ranks
        self._resting.set()
        self._build()
        super().__init__(self._rows(), layout=ipw.Layout(width="100%", max_width="1180px"))
        self.add_class("recshard-plan-compare")
        self.add_class("recshard-switcher")
        self._uid = self.model_id[:8]  # closed, it has none, and the thread may still be drawing
        self.respond()
        self._thread = threading.Thread(target=self._serve, name="recshard-scheme-switcher", daemon=True)
        self._thread.start()

    # ---- what a reader asks from Python ----

    def set(self, schemes: dict[str, str] | None = None, ends: dict[str, Sequence[int]] | None = None) -> None:
        """Moves controls: ``switcher.set({"movies": "row_wise"}, ends={"movies": [100, 500]})``.

        Raises:
            ValueError: no such table or scheme, or split lines that do not ascend.
        """
        for name in {**(schemes or {}), **(ends or {})}:
            if name not in self.menus:
                raise ValueError(f"there is no table {name!r}; tables: {', '.join(self.menus)}")
        self._quiet = True
        try:
            for name, scheme in (schemes or {}).items():
                known = [value for _, value in self.menus[name].options]
                if scheme not in known:
                    raise ValueError(f"there is no scheme {scheme!r}; schemes: {', '.join(known)}")
                self.menus[name].value = scheme
            for name, lines in (ends or {}).items():
                self.menus[name].value = "row_wise"
                rows = next(table.num_embeddings for table in self.tables if table.name == name)
                self.lines.show(name, rows, list(lines), list(range(self.topology.world_size)))
                self.cut.value = name
                self._splits[name] = list(lines)
        finally:
            self._quiet = False
        self.respond()

    def apply(self) -> Proof:
        """Reshards the model to the plan asked for and waits; the button does the same in the background.

        Raises:
            PlanError: there is no such plan. RankError: a rank refused; the model lies as it did.
        """
        return self._wait(self._apply)

    def train(self, steps: int = BURST) -> list[float]:
        """Trains so many steps and waits; their losses, of rank 0.

        Raises:
            ValueError: the switcher was made without a `step`.
        """
        return self._wait(lambda: self._train(steps))

    def close(self) -> None:
        """Ends the widget's thread; the model stays as it is."""
        if hasattr(self, "_work"):
            self._training = False
            self._work.put(None)
        super().close()

    @property
    def python(self) -> str:
        """The plan asked for, and applying it, in Python."""
        return python_of_wishes(self.live, self.plan or self.live.plan)

    def exportable(self) -> Exportable:
        """The plan on the ranks beside the plan asked for, and the losses, for `export`."""
        with self._lock:
            shown = self._shown()
            losses, switched = list(self.live.losses), list(self.live.switched)
        candidates = [
            Candidate(page.HEADS[side], plan, self.tables, self.topology, self.workload, found, measured, problem)
            for side, (plan, found, measured, problem) in shown.items()
        ]
        loss = [Section("Loss while training", [_loss_curve(losses, switched)])] if losses else []
        title = f"{len(self.tables):,} tables on {self.topology.world_size} ranks, while they train"
        return comparison_page(candidates, title, more=loss, python=self.python, name="schemes")

    # ---- answering ----

    def respond(self) -> None:
        """Predicts the plan that the controls ask for. Timed in ``last_response_ms``."""
        with self._lock:
            self._respond()

    def _respond(self) -> None:
        begun = perf_counter()
        self.problem, self.plan = "", None
        try:
            wishes = {name: menu.value for name, menu in self.menus.items()}
            self.plan = plan_of_wishes(self.live, wishes, self._splits, self.topology, self.workload)
            self.predicted = self._predict(self.plan)
        except Exception as error:
            self.problem = reason(error)
        self._show()
        self.last_response_ms = 1000 * (perf_counter() - begun)

    def _predict(self, plan: ShardingPlan) -> Estimate:
        return estimate(plan, self.tables, self.topology, self.workload)

    def _changed(self, _: Any = None) -> None:
        if not self._quiet:
            self.respond()

    def _turned(self, _: Any) -> None:
        """Another table to cut: its lines as they were asked for, or as it lies, or even ones."""
        name = self.cut.value
        if self._quiet or not name:
            return
        table = next(table for table in self.tables if table.name == name)
        ranks = self.topology.world_size
        ends = self._splits.get(name) or [table.num_embeddings * r // ranks for r in range(1, ranks)]
        here = self.live.plan.plan[self.live.path_of[name]][name]
        stripes = sorted(here.shards, key=lambda shard: shard.rows)
        if name not in self._splits and here.sharding_type == "row_wise" and len(stripes) == ranks:
            ends = list(accumulate(shard.num_rows for shard in stripes))[:-1]
        self._quiet = True
        self.lines.show(name, table.num_embeddings, ends, list(range(ranks)))
        self.lines.hint = self._hint()
        self._quiet = False

    def _dragged(self, change: Any) -> None:
        if self._quiet:
            return
        name = self.lines.table
        self._splits[name] = list(change["new"])
        self._quiet = True
        self.menus[name].value = "row_wise"
        self._quiet = False
        self.respond()

    # ---- working on the ranks, in the widget's thread ----

    def _serve(self) -> None:
        while True:
            try:
                task = self._work.get(timeout=0.05 if self._training else LOOK_S)
            except queue.Empty:
                task = self._burst if self._training else self._look
            if task is None:
                return
            task()

    def _look(self) -> None:
        """Greys the figures when the model's ranks end, and follows the model when it is made again."""
        gone = self.live.gone
        if gone != self._gone:
            self._gone = gone
            self._training = self.trains.value = False
            self._show()
            self.status.value = page.alert(gone) if gone else ""
        if gone:
            self._follow()

    def _follow(self) -> None:
        """Takes up a model of the same name and tables on the ranks that run now."""
        live = self.live
        ranks = live.ranks if live.ranks.pids else current()
        if ranks is None or ranks.world_size != self.topology.world_size or not ranks.usable:
            return
        names = ranks.variables
        state = (*ranks.pids, *names)
        if state == self._tried or not {live.model, live.step or live.model} <= set(names):
            return
        try:
            found = LiveModel(ranks, live.model, live.step, live.optimizers)
            if found.tables != self.tables:
                raise ValueError(f"'{live.model}' has other tables now. Fix: run this widget's cell again")
            self.live, self._gone = found, ""
            self._settle()
        except LaunchError:
            return  # a cell is running on the ranks: the next look follows
        except Exception as error:
            self.status.value = page.alert(reason(error))
        self._tried = state

    def _wait(self, work: Callable[[], Any]) -> Any:
        """Has the thread do it, between two bursts of training, and hands back what came of it."""
        done: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue()

        def task() -> None:
            try:
                done.put((work(), None))
            except BaseException as error:
                done.put((None, error))

        self._work.put(task)
        value, error = done.get()
        if error is not None:
            raise error
        return value

    def _clicked_apply(self, _: Any = None) -> None:
        def task() -> None:
            self.button.disabled = True
            try:
                self._apply()
            except Exception as error:
                self._failed("Nothing was applied.", error)
            self._show()

        self.status.value = page.note("Applying …")
        self._work.put(task)

    def _failed(self, what: str, error: Exception) -> None:
        """Shows why something on the ranks failed; ranks that have ended are reason enough."""
        self._look()
        if not self._gone:
            self.status.value = page.alert(f"{what} {reason(error)}")

    def _clicked_train(self, change: Any) -> None:
        self._training = bool(change["new"])
        self.trains.description, self.trains.icon = ("Pause", "pause") if self._training else ("Train", "play")
        self._work.put(lambda: None)  # wakes the thread
        if not self._training:
            self._resting.wait(2.0)  # so that the reader's next cell finds the ranks free

    def _burst(self) -> None:
        failed = None
        self._resting.clear()
        try:
            if self._training:
                self.live.train(BURST)
        except Exception as error:
            failed = error
        finally:
            self._resting.set()
        if failed is not None:
            self._training = self.trains.value = False
            self._failed("Training stopped.", failed)
        self._show()

    def _apply(self) -> Proof:
        if self.plan is None:
            raise PlanError(self.problem)
        proof = self.live.reshard(self.plan)
        self._settle()
        return proof

    def _train(self, steps: int) -> list[float]:
        losses = self.live.train(steps)
        self._show()
        return losses

    def _settle(self) -> None:
        """After a resharding what was asked for is what there is."""
        self._quiet = True
        for menu in self.menus.values():
            menu.value = AS_IT_IS
        self._splits.clear()
        self._quiet = False
        self.status.value = ""
        self.respond()

    # ---- building and showing ----

    def _build(self) -> None:
        options = [(AS_IT_IS, AS_IT_IS), ("planner's choice", PLANNED), *controls.scheme_options()[1:]]
        self.menus = {}
        for table in self.tables:
            menu = controls.menu(table.name, page.facts(table))
            menu.options, menu.value = options, AS_IT_IS
            menu.observe(self._changed, names="value")
            self.menus[table.name] = menu
        first = max(self.tables, key=lambda table: table.weight_bytes)
        ranks = self.topology.world_size
        self.cut = ipw.Dropdown(
            options=[table.name for table in self.tables],
            value=first.name,
            description="Split lines of",
            style={"description_width": "initial"},
            layout=ipw.Layout(width="220px"),
        )
        ends = [first.num_embeddings * rank // ranks for rank in range(1, ranks)]
        self.lines = SplitLines(first.name, first.num_embeddings, ends, list(range(ranks)))
        self.cut.observe(self._turned, names="value")
        self.lines.observe(self._dragged, names="ends")
        known = ("plan", "tables", "topology", "estimate", "measured", "width")
        self.picture = controls.choice([(views.view_label(name), name) for name in views.views_of(*known)])
        self.picture.observe(lambda _: self._show(), names="value")
        hint = "moves the tables on the ranks to the plan asked for; training goes on"
        self.button = ipw.Button(description="Apply", tooltip=hint, icon="check", button_style="primary")
        self.button.on_click(self._clicked_apply)
        self.trains = ipw.ToggleButton(
            description="Train", tooltip="trains until you press Pause, also while tables move", icon="play"
        )
        self.steps = ipw.HTML()
        self.trains.observe(self._clicked_train, names="value")
        self.exports = ExportControl(self, "schemes", plans=[page.HEADS[side] for side in SIDES])
        self.cards = {side: controls.wide_html() for side in SIDES}
        self.pictures = {side: controls.wide_html() for side in SIDES}
        self.badge, self.status, self.curve, self.code = (
            ipw.HTML(),
            ipw.HTML(),
            controls.wide_html(),
            controls.wide_html(),
        )

    def _rows(self) -> list[ipw.Widget]:
        buttons = controls.row([self.button, self.trains, self.steps])
        running = ipw.VBox([buttons, self.status, self.badge], layout=ipw.Layout(flex="1 1 320px", min_width="0"))
        return [
            ipw.HTML(page.STYLE),
            ipw.HTML("<b>Scheme of each table</b>"),
            controls.grid(list(self.menus.values())),
            controls.row([ipw.VBox([self.cut, self.lines]), running]),
            controls.pair([self.cards[side] for side in SIDES]),
            self.picture,
            controls.pair([self.pictures[side] for side in SIDES]),
            self.curve,
            controls.foot(self.exports, self.code),
        ]

    def _show(self) -> None:
        """Sends everything that is looked at."""
        with self._lock:
            if self.comm is not None:  # closed while a burst was on the ranks
                self._show_all()

    def _show_all(self) -> None:
        name = self.picture.value
        shade = page.gone if self._gone else str
        size, batch = self.topology.world_size, self.workload.batch_size
        asked = Question({}, size, batch, self.topology.memory_cap_bytes)
        for side, (plan, found, measured, problem) in self._shown().items():
            answer = Answer(asked, self.topology, self.workload, plan, found, problem)
            beside = "" if self.workload.dense_parameters else BESIDE
            self.cards[side].value = page.card(side, answer, measured, stale=bool(self._gone), more=beside)
            view = self._view(name, plan, found, measured) if plan is not None else None
            self.pictures[side].value = "" if view is None else shade(page.picture(view.inline(f"{self._uid}-{side}")))
        self.badge.value = shade(page.badge(self.live.proof))
        self.button.disabled = self.plan is None or self.plan == self.live.plan or bool(self._gone)
        self.trains.disabled = self.live.step is None or bool(self._gone)
        losses = self.live.losses
        self.steps.value = page.note(f"step {len(losses):,}") if losses else ""
        self.curve.value = ""
        if losses:
            view = _loss_curve(losses, self.live.switched)
            self.curve.value = shade(page.picture(view.inline(f"{self._uid}-loss")))
        self.lines.hint = self._hint()
        self.code.value = page.code(self.python)

    def _hint(self) -> str:
        """What to do with the split lines of a table that is not asked to be cut by rows; else nothing."""
        name = self.cut.value
        asked = self.plan if self.plan is not None else self.live.plan
        cut = asked.plan[self.live.path_of[name]][name].sharding_type == "row_wise"
        return "" if cut else f"Drag a line to split {name} by rows."

    def _shown(self) -> dict[str, tuple[ShardingPlan | None, Estimate | None, Any, str]]:
        """Each side's plan, prediction, measurement and problem."""
        return {
            "live": (self.live.plan, self._predict(self.live.plan), self.live.measured, ""),
            "asked": (self.plan, self.predicted if self.plan is not None else None, None, self.problem),
        }

    def _view(self, name: str, plan: ShardingPlan, found: Any, measured: Any) -> View:
        known = {"plan": plan, "tables": self.tables, "topology": self.topology, "estimate": found}
        return views.draw(name, **known, measured=measured, width=controls.HALF_WIDTH)

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        """The widget, and for pages without a kernel where the tables lie."""
        bundle = super()._repr_mimebundle_(**kwargs) or {}
        view = views.placement(self.live.plan, self.tables, self.topology)
        schemes = {t.name: look_of(self.live.plan.tables()[t.name].sharding_type, SCHEMES).label for t in self.tables}
        plain = ", ".join(f"{name}: {scheme}" for name, scheme in schemes.items())
        return {**bundle, "text/html": view.img, "text/plain": f"On the ranks: {plain}"}


def _loss_curve(losses: Sequence[float], switched: Sequence[int]) -> View:
    marks = [step for step in dict.fromkeys(switched) if 0 < step < len(losses)]
    told = ", ".join(f"{step:,}" for step in marks[-8:])
    note = f"Dashed: the plan changed after step {told}." if told else ""
    return views.curves({"loss of rank 0": list(losses)}, marks=marks, note=note, width=2 * controls.HALF_WIDTH)
