"""Trains one model unsharded and under several sharding plans, and compares the results.

`experiment.py` runs one training. `page.py` is the report.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from recshard_lab.data import RatingsDataset
from recshard_lab.embedding import EmbeddingBagConfig
from recshard_lab.lab.demo.experiment import (
    COLLECTION,
    Outcome,
    first_steps,
    plan_of_scheme,
    run_under,
    run_unsharded,
    workload_of,
)
from recshard_lab.lab.draw.theme import counted
from recshard_lab.launcher import launch
from recshard_lab.planner import EmbeddingShardingPlanner, Estimate, Workload, estimate
from recshard_lab.sharding import ShardingPlan, Topology, scheme_names
from recshard_lab.train import MOVIELENS_100K, Recipe

if TYPE_CHECKING:
    from recshard_lab.lab.exporting.exportable import Exportable

SPLITS = {"random": "random split", "time": "split by time"}
UNSHARDED = "unsharded"
PLANNER = "planner"
SHORT_SCHEMES = ("table_wise", "row_wise", "column_wise")
SHORT_SPLITS = ("random",)
SHORT_RECIPE = replace(MOVIELENS_100K, epochs=2)
SAME_AUC = 1e-3
LEAST_AUC = {"random": 0.775, "time": 0.695}  # on MovieLens 100K, see Comparison.verdicts
MEASURED_STEPS = 20
"""Steps per plan that are measured first, to predict the time of its training."""
PACE_PRIOR_S, JOB_PRIOR_S = 5.0, 1.0
"""Seconds of all work, and of the running job, in which estimate and measured pace have equal weight."""


Look = Callable[[int], object]
"""Receives the number of steps done."""


@dataclass(frozen=True)
class Run:
    """One way of training: unsharded (no plan), or under a plan with its prediction.

    Args:
        outcomes: split -> result.
    """

    name: str
    plan: ShardingPlan | None = None
    predicted: Estimate | None = None
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    @property
    def aucs(self) -> list[float]:
        """Test AUC of every split."""
        return [outcome.auc for outcome in self.outcomes.values()]

    @property
    def first(self) -> Outcome:
        """The result of the first split, whose times, memory and traffic are reported."""
        return next(iter(self.outcomes.values()))


@dataclass(frozen=True)
class Progress:
    """How far a comparison is.

    Args:
        action: what runs now.
        share: of the training time on ranks, in [0, 1]; None before a step of each plan is measured.
        left_s: predicted seconds of training left; None as `share`.
    """

    action: str
    share: float | None = None
    left_s: float | None = None


@dataclass(frozen=True)
class Comparison:
    """The results of a comparison. The unsharded run comes first.

    Args:
        nodes: virtual nodes of the ranks.
        same: plan that was not trained -> the trained plan with the same shards of these tables.
        workload: the step that was predicted.
        planned: number of tables by the scheme that the planner chose.
    """

    ratings: RatingsDataset
    world_size: int
    runs: tuple[Run, ...]
    recipe: Recipe = MOVIELENS_100K
    nodes: int = 1
    same: Mapping[str, str] = field(default_factory=dict)
    workload: Workload = field(default_factory=Workload)
    planned: Mapping[str, int] = field(default_factory=dict)

    def exportable(self) -> Exportable:
        """The page that `lab.export` writes."""
        from recshard_lab.lab.demo.page import demo_page

        return demo_page(self)

    @property
    def shape(self) -> str:
        """The ranks in words."""
        ranks = counted(self.world_size, "rank")
        return ranks if self.nodes == 1 else f"{ranks} on {self.nodes} virtual nodes"

    @property
    def times_note(self) -> str:
        """`Measured.times_note` of the runs on ranks."""
        outcomes = (outcome for run in self.runs for outcome in run.outcomes.values())
        return next((one.measured.times_note for one in outcomes if one.measured is not None), "")

    @property
    def splits(self) -> list[str]:
        """The splits that were trained on."""
        return list(self.runs[0].outcomes)

    def notes(self) -> list[str]:
        """The planner's choice, and what was not trained, with the reason."""
        notes = []
        if self.planned:
            tables = (f"{scheme} for {counted(count, 'table')}" for scheme, count in self.planned.items())
            notes.append(f"The planner chose {', '.join(tables)}.")
        for trained in dict.fromkeys(self.same.values()):
            equal = ", ".join(name for name, other in self.same.items() if other == trained)
            notes.append(f"Not trained again: {equal}. On {self.shape}, the shards are those of {trained}.")
        known = {run.name for run in self.runs} | set(self.same)
        missing = [name for name in scheme_names() if name not in known]
        missing += [SPLITS[split] for split in SPLITS if split not in self.splits]
        if missing:
            notes.append(f"Not trained in this short run: {', '.join(missing)}. Run recshard demo --full.")
        if self.recipe.epochs < MOVIELENS_100K.epochs:
            notes.append(
                f"Trained for {self.recipe.epochs} epochs. recshard demo --full trains for {MOVIELENS_100K.epochs}, "
                f"reaches higher AUCs, and checks them against a minimum."
            )
        return notes

    def spread(self, split: str) -> float:
        """Largest difference between the AUCs of two runs."""
        aucs = [run.outcomes[split].auc for run in self.runs]
        return max(aucs) - min(aucs)

    def verdicts(self) -> list[tuple[bool, str]]:
        """Whether each requirement holds: equal AUCs, and a lowest AUC after the whole recipe on MovieLens 100K."""
        verdicts = []
        for split in self.splits:
            label, spread = SPLITS[split], self.spread(split)
            verdicts.append((spread <= SAME_AUC, f"{label}: test AUCs differ by {spread:.1e} (allowed: {SAME_AUC:g})"))
            if self.recipe == MOVIELENS_100K and self.ratings.source.startswith("MovieLens 100K"):
                lowest, required = min(run.outcomes[split].auc for run in self.runs), LEAST_AUC[split]
                verdicts.append((lowest >= required, f"{label}: lowest test AUC {lowest:.4f} (required: {required:g})"))
        return verdicts


def compare_schemes(
    ratings: RatingsDataset,
    world_size: int,
    schemes: Sequence[str] | None = None,
    recipe: Recipe = MOVIELENS_100K,
    splits: Sequence[str] = tuple(SPLITS),
    on_progress: Callable[[Progress], object] = lambda progress: None,
    on_outcome: Callable[[Run, str], object] = lambda run, split: None,
) -> Comparison:
    """Trains the same model unsharded, under each scheme and under the planner's plan, on each split.

    Args:
        ratings: the samples.
        world_size: number of ranks to launch.
        schemes: registered schemes; None takes all.
        splits: names of `SPLITS`.
        on_progress: called several times per second, from this thread or another.
        on_outcome: called after each training with its run and split.

    If the ranks can be halved, they run on two virtual nodes, so that the schemes for several nodes differ from others.
    Plans with the same shards are trained once, except schemes that `schemes` names.

    Raises:
        LaunchError: the ranks cannot be launched.
        PlanError: a scheme cannot shard one of the tables.
    """
    tables = recipe.tables(ratings)
    data = {split: ratings.split(split, seed=recipe.seed) for split in splits}
    workload = workload_of(data[splits[0]][0], recipe, world_size)
    nodes = nodes_of(world_size)
    plans, same = plans_to_train(schemes or scheme_names(), tables, world_size, keep_all=bool(schemes))
    flat = Topology(world_size)  # nodes are virtual: they share this machine's memory
    planned = EmbeddingShardingPlanner(flat, workload=workload).plan_tables(tables, COLLECTION)
    other = next((name for name, known in plans.items() if _same_rectangles(known, planned)), None)
    if other is None:
        plans[PLANNER] = planned
    else:
        same[PLANNER] = other
    chosen = Counter(str(sharding.sharding_type) for sharding in planned.tables().values())
    runs = [Run(UNSHARDED), *(Run(n, plan, estimate(plan, tables, flat, workload)) for n, plan in plans.items())]
    first, *jobs = [(run, split) for split in splits for run in runs]
    steps = {split: recipe.epochs * data[split][0].num_batches(recipe.batch_size) for split in splits}

    def finish(run: Run, split: str, outcome: Outcome) -> None:
        run.outcomes[split] = outcome
        on_outcome(run, split)

    on_progress(Progress(_action(*first)))  # needs no ranks: the first result is there while they are prepared
    finish(*first, run_unsharded(*data[splits[0]], recipe))
    with launch(world_size, nodes=nodes) as ranks, _counter() as (path, count):

        def train(run: Run, train: RatingsDataset, test: RatingsDataset, recipe: Recipe, look: Look) -> Outcome:
            count[0] = 0
            if run.plan is None:
                return run_unsharded(train, test, recipe, look)
            with _watching(lambda: look(int(count[0]))):
                return run_under(ranks, run.plan, train, test, recipe, path)

        on_progress(Progress(f"measuring {MEASURED_STEPS} steps of each plan"))
        few = first_steps(data[splits[0]][0], recipe, MEASURED_STEPS)
        step_s = {run.name: train(run, *few, lambda step: None).step_ms / 1e3 for run in runs}
        clock = TimeLeft([steps[split] * step_s[run.name] for run, split in jobs])
        for job, (run, split) in enumerate(jobs):

            def look(step: int, job: int = job, run: Run = run, split: str = split) -> None:
                share = step / steps[split]
                on_progress(Progress(_action(run, split), clock.share(job, share), clock.at(job, share)))

            look(0)
            finish(run, split, train(run, *data[split], recipe, look))
        on_progress(Progress("trained", 1.0, 0.0))
    return Comparison(ratings, world_size, tuple(runs), recipe, nodes, same, workload, chosen)


def _action(run: Run, split: str) -> str:
    return f"{run.name}, {SPLITS[split]}"


def nodes_of(world_size: int) -> int:
    """Number of virtual nodes: two if each then has at least two ranks, otherwise one."""
    return 2 if world_size >= 4 and world_size % 2 == 0 else 1


def plans_to_train(
    schemes: Sequence[str], tables: list[EmbeddingBagConfig], world_size: int, keep_all: bool = False
) -> tuple[dict[str, ShardingPlan], dict[str, str]]:
    """The plan of each scheme, and for schemes with the same shards as an earlier one, the earlier scheme.

    >>> table = EmbeddingBagConfig(8, 4, name="t", feature_names=["f"])
    >>> plans_to_train(["row_wise", "grid_shard"], [table], 2)[1]
    {'grid_shard': 'row_wise'}
    """
    plans: dict[str, ShardingPlan] = {}
    same: dict[str, str] = {}
    for scheme in schemes:
        plan = plan_of_scheme(scheme, tables, world_size, nodes_of(world_size))
        other = next((name for name, known in plans.items() if _same_rectangles(known, plan)), None)
        if other is None or keep_all:
            plans[scheme] = plan
        else:
            same[scheme] = other
    return plans, same


def _same_rectangles(plan: ShardingPlan, other: ShardingPlan) -> bool:
    mine, its = plan.tables(), other.tables()
    return all(
        sorted(mine[name].shards) == sorted(its[name].shards) and mine[name].replicated == its[name].replicated
        for name in mine
    )


@contextmanager
def _counter() -> Iterator[tuple[str, np.memmap]]:
    """A file of one int64 in which rank 0 counts its steps."""
    handle, path = tempfile.mkstemp(prefix="recshard-steps-")
    try:
        os.write(handle, bytes(8))
        os.close(handle)
        yield path, np.memmap(path, dtype=np.int64, mode="r+", shape=(1,))
    finally:
        os.unlink(path)


@contextmanager
def _watching(look: Callable[[], object], every_s: float = 0.2) -> Iterator[None]:
    """Calls `look` every `every_s` seconds while the block runs."""
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(every_s):
            look()

    thread = threading.Thread(target=watch, name="recshard-demo-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class TimeLeft:
    """Predicts the seconds left of jobs that run one after another.

    Pace is measured over estimated time: 2 means that the work takes twice its estimate. The running job has its own
    pace, because its estimate may be wrong. Later jobs take the pace of everything so far, because other programs may
    use the machine.

    Args:
        estimates: seconds of each job, from a short measurement.
        clock: seconds now.

    >>> now = [0.0]
    >>> left = TimeLeft([10.0, 10.0], clock=lambda: now[0])
    >>> left.at(0, 0.0)
    20.0
    >>> now[0] = 20.0  # the first job took twice its estimate
    >>> 15 < left.at(1, 0.0) < 20
    True
    """

    def __init__(self, estimates: Sequence[float], clock: Callable[[], float] = perf_counter) -> None:
        self.estimates, self.clock = list(estimates), clock
        self._began = self._job_began = clock()

    def share(self, job: int, share: float) -> float:
        """The share of all work that is done, in [0, 1], when `share` of job number `job` is done."""
        return (sum(self.estimates[:job]) + share * self.estimates[job]) / sum(self.estimates)

    def at(self, job: int, share: float) -> float:
        """Seconds left when `share`, in [0, 1], of job number `job` is done."""
        now = self.clock()
        if share == 0.0:
            self._job_began = now  # time before the first step does not count as time of its steps
        estimate = self.estimates[job]
        done = share * estimate
        pace = (now - self._began + PACE_PRIOR_S) / (sum(self.estimates[:job]) + done + PACE_PRIOR_S)
        own_pace = (now - self._job_began + JOB_PRIOR_S * pace) / (done + JOB_PRIOR_S)
        return own_pace * (estimate - done) + pace * sum(self.estimates[job + 1 :])
