"""SchemeSwitcher: changes the sharding plan of a model that is training on the ranks.

::

    menus, split lines  -> the requested plan -> predicted at once, beside predictions and measurements of the current
    Apply                                        plan
    Apply  -> every rank reshards in place, checks that weights and outputs are the same, training continues

All work on the ranks happens in one lane of the widget's worker, one piece at a time. So the kernel stays free, and a
resharding never overlaps a training step.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from itertools import accumulate
from time import perf_counter
from typing import Any

import ipywidgets as ipw
import numpy as np

from recshard_lab.lab import views
from recshard_lab.lab.compare.question import Answer, Question
from recshard_lab.lab.draw.theme import SCHEMES, bytes_text, counted, look_of, ms_text, number
from recshard_lab.lab.draw.view import View
from recshard_lab.lab.exporting.exportable import Candidate, Exportable
from recshard_lab.lab.exporting.plan_report import comparison_page
from recshard_lab.lab.exporting.report import Section
from recshard_lab.lab.live.live_model import LiveModel, Proof
from recshard_lab.lab.live.ranks_gone import LOOK_S
from recshard_lab.lab.views.registry import reason
from recshard_lab.lab.widgets import controls, page
from recshard_lab.lab.widgets.base import LabWidget
from recshard_lab.lab.widgets.chart_box import ChartBox
from recshard_lab.lab.widgets.components import SplitLines
from recshard_lab.launcher import LaunchError, current
from recshard_lab.planner import EmbeddingShardingPlanner, Estimate, Workload, estimate
from recshard_lab.sharding import ParameterConstraints, ParameterSharding, PlanError, ShardingPlan, Topology, row_wise
from recshard_lab.sharding.plan.types import HBM

KEEP, PLANNED = "keep", "planner"
BURST = 5  # training steps between two looks at the controls
PAUSE_S = 0.05  # between two bursts, in which cells of the notebook find the ranks free
BESIDE = "The measured step also runs the model's dense layers."
SIDES = ("live", "asked")
RANKS = "ranks"  # the lane of all work on the ranks


class SchemeSwitcher(LabWidget):
    """Switches the schemes of a model on the launched ranks.

    Args:
        ranks: the launched session.
        model: name of the model on the ranks, a `DistributedModelParallel`.
        step: name of a function on the ranks that runs one training step and returns its loss. Without it, the model
            is resharded but not trained.
        optimizers: name of a list of torch optimizers on the ranks, if tables use the dense kernel.
        workload: the predicted step; its optimizer and batch size should be those of `step`.
        topology: the machine of the prediction; by default this one.

    Raises:
        RankError: the ranks have no model of this name.
        ValueError: the model has no embedding collection, or the topology has another number of ranks.
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
        self.workload.check_names(self.tables)
        self.topology = topology or Topology(ranks.world_size, local_world_size=ranks.local_world_size)
        if self.topology.world_size != ranks.world_size:
            raise ValueError(f"the topology has {self.topology.world_size} ranks, launched are {ranks.world_size}")
        self.last_response_ms = 0.0
        self._splits: dict[str, list[int]] = {}
        self._training, self._trainings = False, 0
        self._gone = ""  # why the model is gone from the ranks; empty while it is there
        self._tried: tuple[Any, ...] = ()  # ranks and variables in which the model was last looked for
        self._lock = threading.RLock()  # the reader's moves and results of the ranks are shown one after the other
        self._resting = threading.Event()  # no burst of training is on the ranks
        self._resting.set()
        super().__init__("switcher", "schemes", plans=[page.HEADS[side] for side in SIDES])
        self._build()
        self.respond()
        self.worker.every(LOOK_S, self._look_when_idle, "looks")

    # ---- for use from Python ----

    def set(self, schemes: dict[str, str] | None = None, ends: dict[str, Sequence[int]] | None = None) -> None:
        """Moves controls: ``switcher.set({"movies": "row_wise"}, ends={"movies": [100, 500]})``.

        Args:
            schemes: table -> "keep", "planner" or a scheme.
            ends: table -> rows of its split lines, W - 1 of them.

        Raises:
            ValueError: an unknown table or scheme, or split lines that do not ascend.
        """
        for name in {**(schemes or {}), **(ends or {})}:
            if name not in self.menus:
                raise ValueError(f"unknown table {name!r}; tables: {', '.join(self.menus)}")
        with self.quietly():
            for name, scheme in (schemes or {}).items():
                known = [value for _, value in self.menus[name].options]
                if scheme not in known:
                    raise ValueError(f"unknown scheme {scheme!r}; schemes: {', '.join(known)}")
                self.menus[name].value = scheme
            for name, lines in (ends or {}).items():
                self.menus[name].value = "row_wise"
                rows = next(table.num_embeddings for table in self.tables if table.name == name)
                self.lines.show(name, rows, list(lines), list(range(self.topology.world_size)))
                self.split.value = name
                self._splits[name] = list(lines)
        self.respond()

    def apply(self) -> Proof:
        """Reshards the model to the requested plan and waits; the button does this in the background.

        Raises:
            PlanError: the controls give no valid plan. RankError: a rank refused it; the model is as before.
        """
        return self.worker.call(self._apply, RANKS)

    def train(self, steps: int = BURST) -> list[float]:
        """Trains `steps` steps, waits and returns their losses on rank 0.

        Raises:
            ValueError: the switcher was made without a `step`.
        """
        return self.worker.call(lambda: self._train(steps), RANKS)

    def close(self) -> None:
        """Ends the background work; the model stays as it is."""
        self._training = False
        super().close()

    @property
    def python(self) -> str:
        """The requested plan, and applying it, in Python."""
        return python_of_change(self.live, self.plan or self.live.plan)

    def exportable(self) -> Exportable:
        """The plan on the ranks beside the requested plan, and the losses, for `export`."""
        with self._lock:
            shown = self._shown()
            losses, switched = list(self.live.losses), list(self.live.switched)
        candidates = [
            Candidate(page.HEADS[side], plan, self.tables, self.topology, self.workload, found, measured, problem)
            for side, (plan, found, measured, problem) in shown.items()
        ]
        loss = [Section("Loss while training", [_loss_curve(losses, switched)])] if losses else []
        title = f"{counted(len(self.tables), 'table')} on {counted(self.topology.world_size, 'rank')}, while they train"
        return comparison_page(candidates, title, more=loss, python=self.python, name="schemes")

    # ---- answering ----

    def respond(self) -> None:
        """Predicts the plan that the controls request. Its time is ``last_response_ms``."""
        with self._lock:
            begun = perf_counter()
            self.problem, self.plan = "", None
            try:
                schemes = {name: menu.value for name, menu in self.menus.items()}
                self.plan = requested_plan(self.live, schemes, self._splits, self.topology, self.workload)
                self.predicted = self._predict(self.plan)
            except Exception as error:
                self.problem = reason(error)
            self._show()
            self.last_response_ms = 1000 * (perf_counter() - begun)

    def _predict(self, plan: ShardingPlan) -> Estimate:
        return estimate(plan, self.tables, self.topology, self.workload)

    def _turn_to(self, name: str) -> None:
        """Split lines of another table: as requested before, else as now on the ranks, else even ones."""
        table = next(table for table in self.tables if table.name == name)
        ranks = self.topology.world_size
        ends = self._splits.get(name) or _even_ends(table.num_embeddings, ranks)
        here = self.live.plan.plan[self.live.path_of[name]][name]
        shards = sorted(here.shards, key=lambda shard: shard.rows)
        if name not in self._splits and here.sharding_type == "row_wise" and len(shards) == ranks:
            ends = list(accumulate(shard.num_rows for shard in shards))[:-1]
        with self.quietly():
            self.lines.show(name, table.num_embeddings, ends, list(range(ranks)))
            self.lines.hint = self._hint()

    def _drag(self, ends: Sequence[int]) -> None:
        name = self.lines.table
        self._splits[name] = list(ends)
        with self.quietly():
            self.menus[name].value = "row_wise"
        self.respond()

    # ---- working on the ranks, in the worker's lane ----

    def _look_when_idle(self) -> None:
        if not self.worker.busy(RANKS):
            self.worker.queue(self._look, RANKS)

    def _look(self) -> None:
        """Greys the figures when the model's ranks end, and follows the model when it is made again."""
        gone = self.live.gone
        if gone != self._gone:
            self._gone = gone
            self._training = self.trains.value = False
            self._show()
            self.message.fail(gone) if gone else self.message.show()
        if gone:
            self._follow()

    def _follow(self) -> None:
        """Continues with a model of the same name and tables on the ranks that run now."""
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
            return  # a cell is running on the ranks; the next look tries again
        except Exception as error:
            self.message.fail(error)
        self._tried = state

    def _click_apply(self, _: Any = None) -> None:
        def task() -> None:
            self.button.disabled = True
            try:
                self._apply()
            except Exception as error:
                self._fail("Nothing was applied.", error)
            self._show()

        self.message.show("Applying …")
        self.worker.queue(task, RANKS)

    def _fail(self, what: str, error: Exception) -> None:
        """Shows why work on the ranks failed; if the ranks have ended, only that."""
        self._look()
        if not self._gone:
            self.message.fail(f"{what} {reason(error)}")

    def _click_train(self, change: Any) -> None:
        self._training = bool(change["new"])
        self.trains.description, self.trains.icon = ("Pause", "pause") if self._training else ("Train", "play")
        if self._training:
            self._trainings += 1
            number = self._trainings
            self.worker.queue(lambda: self._burst(number), RANKS)
        else:
            self._resting.wait(2.0)  # so that the reader's next cell finds the ranks free

    def _burst(self, number: int) -> None:
        """Trains a few steps and queues the next burst of the same press of Train."""
        if not self._training or number != self._trainings:
            return
        failed = None
        self._resting.clear()
        try:
            self.live.train(BURST)
        except Exception as error:
            failed = error
        finally:
            self._resting.set()
        if failed is not None:
            self._training = self.trains.value = False
            self._fail("Training stopped.", failed)
        self._show()
        if self._training:
            self.worker.queue(lambda: self._burst(number), RANKS, PAUSE_S)

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
        """After a resharding, the controls request the plan that is on the ranks."""
        with self.quietly():
            for menu in self.menus.values():
                menu.value = KEEP
            self._splits.clear()
        self.message.show()
        self.respond()

    # ---- building and showing ----

    def _build(self) -> None:
        options = [(KEEP, KEEP), ("planner's choice", PLANNED), *controls.scheme_options()[1:]]
        self.menus = {}
        for table in self.tables:
            menu = controls.menu(table.name, page.facts(table))
            menu.options, menu.value = options, KEEP
            self.on(menu, lambda _: self.respond())
            self.menus[table.name] = menu
        first = max(self.tables, key=lambda table: table.weight_bytes)
        ranks = self.topology.world_size
        names = [(table.name, table.name) for table in self.tables]
        self.split = controls.pick("Split lines of", "the table whose row shards are below", names, "220px")
        self.split.value = first.name
        self.lines = SplitLines(
            first.name, first.num_embeddings, _even_ends(first.num_embeddings, ranks), list(range(ranks))
        )
        self.on(self.split, self._turn_to)
        self.on(self.lines, self._drag, "ends")
        known = ("plan", "tables", "topology", "estimate", "measured", "width")
        self.picture = controls.choice([(views.view_label(name), name) for name in views.views_of(*known)])
        self.on(self.picture, lambda _: self._show())
        hint = "moves the tables on the ranks to the requested plan; training continues"
        self.button = controls.button("Apply", hint, "check", "primary", width="148px")
        self.button.on_click(self._click_apply)
        self.trains = ipw.ToggleButton(
            description="Train", tooltip="trains until you press Pause, also while tables move", icon="play"
        )
        self.trains.observe(self._click_train, names="value")
        self.steps, self.badge, self.curve = ipw.HTML(), ipw.HTML(), ChartBox()
        self.cards = {side: controls.wide_html() for side in SIDES}
        self.pictures = {side: ChartBox() for side in SIDES}
        buttons = controls.row([self.button, self.trains, self.steps])
        running = ipw.VBox([buttons, self.message, self.badge], layout=ipw.Layout(flex="1 1 320px", min_width="0"))
        self.lay_out(
            [
                ipw.HTML("<b>Scheme of each table</b>"),
                controls.grid(list(self.menus.values())),
                controls.row([ipw.VBox([self.split, self.lines]), running]),
                controls.pair([self.cards[side] for side in SIDES]),
                self.picture,
                controls.pair([self.pictures[side] for side in SIDES]),
                self.curve,
            ]
        )

    def _show(self) -> None:
        """Sends everything that is shown."""
        with self._lock:
            if self.comm is not None:  # closed while a burst was on the ranks
                self._show_all()

    def _show_all(self) -> None:
        name = self.picture.value
        shade = page.gone if self._gone else str
        size, batch = self.topology.world_size, self.workload.batch_size
        question = Question({}, size, batch, self.topology.memory_cap_bytes)
        for side, (plan, found, measured, problem) in self._shown().items():
            answer = Answer(question, self.topology, self.workload, plan, found, problem)
            beside = "" if self.workload.dense_parameters else BESIDE
            self.cards[side].value = page.card(side, answer, measured, stale=bool(self._gone), extra=beside)
            if plan is None:
                self.pictures[side].say()
            else:
                view = self._view(name, plan, found, measured)
                self.pictures[side].show(view, f"{self.uid}-{side}", gone=bool(self._gone))
        self.badge.value = shade(_badge(self.live.proof))
        self.button.disabled = self.plan is None or self.plan == self.live.plan or bool(self._gone)
        self.trains.disabled = self.live.step is None or bool(self._gone)
        losses = self.live.losses
        self.steps.value = page.note(f"step {len(losses):,}") if losses else ""
        if losses:
            view = _loss_curve(losses, self.live.switched)
            self.curve.show(view, f"{self.uid}-loss", gone=bool(self._gone))
        else:
            self.curve.say()
        self.lines.hint = self._hint()
        self.code.value = page.code(self.python)

    def _hint(self) -> str:
        """What to do with split lines of a table that is not row-wise in the requested plan; else empty."""
        name = self.split.value
        plan = self.plan if self.plan is not None else self.live.plan
        is_split = plan.plan[self.live.path_of[name]][name].sharding_type == "row_wise"
        return "" if is_split else f"Drag a line to split {name} by rows."

    def _shown(self) -> dict[str, tuple[ShardingPlan | None, Estimate | None, Any, str]]:
        """Each side's plan, prediction, measurement and problem."""
        return {
            "live": (self.live.plan, self._predict(self.live.plan), self.live.measured, ""),
            "asked": (self.plan, self.predicted if self.plan is not None else None, None, self.problem),
        }

    def _view(self, name: str, plan: ShardingPlan, found: Any, measured: Any) -> View:
        known = {"plan": plan, "tables": self.tables, "topology": self.topology, "estimate": found}
        return views.draw(name, **known, measured=measured, width=controls.HALF_WIDTH)

    def static(self) -> tuple[str, str]:
        """The placement on the ranks."""
        view = views.placement(self.live.plan, self.tables, self.topology)
        schemes = {t.name: look_of(self.live.plan.tables()[t.name].sharding_type, SCHEMES).label for t in self.tables}
        return view.img, f"On the ranks: {', '.join(f'{name}: {scheme}' for name, scheme in schemes.items())}"


def requested_plan(
    live: LiveModel,
    schemes: Mapping[str, str],
    splits: Mapping[str, Sequence[int]],
    topology: Topology,
    workload: Workload,
) -> ShardingPlan:
    """The plan that the controls request.

    Args:
        live: the model, with its current plan.
        schemes: table -> KEEP, PLANNED or a scheme.
        splits: table -> its split lines, used if its scheme is "row_wise".
        topology, workload: what the planner plans for, if a table is PLANNED.

    Raises:
        PlanError: the planner finds no plan that fits.
    """
    shardings: dict[str, ParameterSharding] = {}
    for table in live.tables:
        scheme = schemes[table.name]
        if scheme == KEEP:
            shardings[table.name] = live.plan.plan[live.path_of[table.name]][table.name]
        elif scheme == "row_wise" and table.name in splits:
            sizes = np.diff([0, *splits[table.name], table.num_embeddings]).tolist()
            shardings[table.name] = row_wise(sizes=sizes)(table, topology)
        elif scheme != PLANNED:
            sharding = ParameterSharding(scheme)
            shardings[table.name] = sharding.resolved(table, topology.world_size, topology.local_world_size)
    if PLANNED in schemes.values():
        shardings |= _planned(live, shardings, topology, workload)
    plan = ShardingPlan({path: {} for path in live.plan.plan})  # type: ignore[misc]
    for table in live.tables:
        plan.plan[live.path_of[table.name]][table.name] = shardings[table.name]
    return plan


def _planned(
    live: LiveModel, fixed: Mapping[str, ParameterSharding], topology: Topology, workload: Workload
) -> dict[str, ParameterSharding]:
    """The planner's choice for the tables that are not fixed."""
    constraints = {}
    for name, sharding in fixed.items():
        kernels = [str(sharding.compute_kernel)]
        if sharding.replicated:
            constraints[name] = ParameterConstraints(["data_parallel"], kernels)
        else:
            constraints[name] = ParameterConstraints(
                shards=sharding.shards, compute_kernels=kernels, cache_params=sharding.cache_params
            )
    planner = EmbeddingShardingPlanner(topology, constraints=constraints, workload=workload)
    found = planner.plan_tables(live.tables, explain=False).tables()
    return {name: sharding for name, sharding in found.items() if name not in fixed}


def python_of_change(live: LiveModel, plan: ShardingPlan) -> str:
    """The change from the current plan to `plan`, and applying it, in Python that uses the variable ``ranks``."""
    lines = [
        "import recshard_lab as rs",
        "",
        "plan = rs.ShardingPlan({",
    ]
    for path, tables in plan.plan.items():
        changed = [name for name in tables if tables[name] != live.plan.plan[path][name]]
        lines.append(f'    "{path}": {{')
        for name in changed:
            sharding = tables[name]
            lines.append(f'        "{name}": rs.ParameterSharding(')
            lines.append(f'            "{sharding.sharding_type}", "{sharding.compute_kernel}", shards=[')
            lines += [
                f"                rs.Shard({s.rank}, {s.rows}, {s.cols}{'' if s.tier == HBM else f', {s.tier!r}'}),"
                for s in sharding.shards
            ]
            route = "" if sharding.route == "direct" else f', route="{sharding.route}"'
            lines.append(f"            ]{route}),")
        if len(changed) < len(tables):
            lines.append(f"        # other tables keep their placement: {len(tables) - len(changed)}")
        lines.append("    },")
    named = (("step", live.step), ("optimizers", live.optimizers))
    names = "".join(f', {key}="{name}"' for key, name in named if name)
    return "\n".join([*lines, "})", f'live = rs.lab.LiveModel(ranks, "{live.model}"{names})', "live.reshard(plan)"])


def _even_ends(rows: int, ranks: int) -> list[int]:
    """Ends of even row shards, without the last."""
    return [rows * rank // ranks for rank in range(1, ranks)]


def _badge(proof: Proof | None) -> str:
    """The cost of the last resharding, and whether the model is the same."""
    if proof is None:
        return page.note("Choose a scheme or drag a line, then press Apply. The ranks move their tables in place.")
    apart = proof.outputs_apart
    outputs = "outputs equal bit for bit" if apart == 0 else f"outputs differ by {number(apart, 2)} of the largest"
    weights = "weights equal bit for bit" if proof.weights_equal else "WEIGHTS DIFFER"
    cost = f"{bytes_text(proof.bytes_moved)} moved in {ms_text(proof.ms)}"
    head = "the same model" if proof.same else "not the same model"
    return page.badge(proof.same, head, f": {weights}, {outputs}. {cost}.", apart)


def _loss_curve(losses: Sequence[float], switched: Sequence[int]) -> View:
    marks = [step for step in dict.fromkeys(switched) if 0 < step < len(losses)]
    steps = ", ".join(f"{step:,}" for step in marks[-8:])
    note = f"Dashed: the plan changed after step {steps}." if steps else ""
    return views.curves({"loss of rank 0": list(losses)}, marks=marks, note=note, width=2 * controls.HALF_WIDTH)
