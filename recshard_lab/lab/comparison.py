"""One model trained unsharded and under every scheme, on real ratings: what the demo measures and must find.

How one training runs lies in `experiment.py`; what is told of it in `demo.py`.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from recshard_lab.data import RatingsDataset
from recshard_lab.embedding import EmbeddingBagConfig
from recshard_lab.lab.experiment import Outcome, plan_of_scheme, run_under, run_unsharded, workload_of
from recshard_lab.launcher import launch
from recshard_lab.planner import Estimate, Workload, estimate
from recshard_lab.sharding import ShardingPlan, Topology, scheme_names
from recshard_lab.train import MOVIELENS_100K, Recipe

if TYPE_CHECKING:
    from recshard_lab.lab.exportable import Exportable

SPLITS = {"random": "random split", "time": "split by time"}
UNSHARDED = "unsharded"
SAME_AUC = 1e-3
LEAST_AUC = {"random": 0.775, "time": 0.695}  # on MovieLens 100K, see Comparison.verdicts


@dataclass(frozen=True)
class Run:
    """One way of training: the truth (no plan), or a plan with its prediction.

    Args:
        outcomes: split -> what came of it.
    """

    name: str
    plan: ShardingPlan | None = None
    predicted: Estimate | None = None
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    @property
    def aucs(self) -> list[float]:
        return [self.outcomes[split].auc for split in SPLITS]


@dataclass(frozen=True)
class Comparison:
    """Everything the demo found out; the unsharded truth comes first.

    Args:
        nodes: virtual nodes that the ranks were told to live on.
        same: scheme that was not trained -> the trained one that makes the same rectangles of these tables.
        workload: the step that was predicted.
    """

    ratings: RatingsDataset
    world_size: int
    runs: tuple[Run, ...]
    recipe: Recipe = MOVIELENS_100K
    nodes: int = 1
    same: Mapping[str, str] = field(default_factory=dict)
    workload: Workload = field(default_factory=Workload)

    def exportable(self) -> Exportable:
        """What `lab.export` writes of it."""
        from recshard_lab.lab.demo import demo_page

        return demo_page(self)

    @property
    def shape(self) -> str:
        """The ranks in words."""
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        return ranks if self.nodes == 1 else f"{ranks} on {self.nodes} virtual nodes"

    def left_out(self) -> list[str]:
        """What was not trained, and why, in words."""
        trained = dict.fromkeys(self.same.values())
        return [
            f"not trained again: {', '.join(n for n, o in self.same.items() if o == other)}, which on {self.shape} "
            f"cut as {other} does"
            for other in trained
        ]

    def spread(self, split: str) -> float:
        """Largest distance between the AUCs of any two runs."""
        aucs = [run.outcomes[split].auc for run in self.runs]
        return max(aucs) - min(aucs)

    def verdicts(self) -> list[tuple[bool, str]]:
        """What must be true of the numbers, in words: one AUC for all, and a good one on MovieLens 100K."""
        found = []
        for split, words in SPLITS.items():
            apart = self.spread(split)
            found.append((apart <= SAME_AUC, f"{words}: test AUCs differ by {apart:.1e} (allowed: {SAME_AUC:g})"))
            if self.ratings.source.startswith("MovieLens 100K"):
                least, wanted = min(run.outcomes[split].auc for run in self.runs), LEAST_AUC[split]
                found.append((least >= wanted, f"{words}: lowest test AUC {least:.4f} (wanted: {wanted:g})"))
        return found


def compare_schemes(
    ratings: RatingsDataset,
    world_size: int,
    schemes: Sequence[str] | None = None,
    recipe: Recipe = MOVIELENS_100K,
    on_progress: Callable[[str, int, int], object] = lambda what, done, total: None,
) -> Comparison:
    """Trains the same model unsharded and under each scheme, on both splits.

    Args:
        ratings: the samples.
        world_size: ranks to launch.
        schemes: registered schemes; all when left out.
        on_progress: told what runs now, and steps done of how many.

    Ranks that can be halved live on two virtual nodes, so that schemes that know nodes show what they do. Of schemes
    that cut these tables the same way, the first is trained, unless `schemes` names them.

    Raises:
        LaunchError: as many ranks cannot be launched.
        PlanError: a scheme that cannot cut one of the tables.
    """
    tables = recipe.tables(ratings)
    splits = {split: ratings.split(split, seed=recipe.seed) for split in SPLITS}
    workload = workload_of(splits["random"][0], recipe, world_size)
    nodes = nodes_of(world_size)
    plans, same = plans_to_train(schemes or scheme_names(), tables, world_size, keep_all=bool(schemes))
    flat = Topology(world_size)  # nodes are virtual: they share this machine's memory
    runs = [Run(UNSHARDED), *(Run(n, plan, estimate(plan, tables, flat, workload)) for n, plan in plans.items())]
    each = {split: recipe.epochs * train.num_batches(recipe.batch_size) for split, (train, _) in splits.items()}
    done, total = 0, len(runs) * sum(each.values())
    with launch(world_size, nodes=nodes) as ranks, _counter() as (path, count):
        for split, (train, test) in splits.items():
            for run in runs:
                what = f"{run.name}, {SPLITS[split]}"
                on_progress(what, done, total)
                if run.plan is None:
                    outcome = run_unsharded(train, test, recipe, lambda n, w=what, d=done: on_progress(w, d + n, total))  # type: ignore[misc]
                else:
                    count[0] = 0
                    with _watching(lambda w=what, d=done: on_progress(w, d + int(count[0]), total)):  # type: ignore[misc]
                        outcome = run_under(ranks, run.plan, train, test, recipe, path)
                run.outcomes[split] = outcome
                done += each[split]
        on_progress("done", done, total)
    return Comparison(ratings, world_size, tuple(runs), recipe, nodes, same, workload)


def nodes_of(world_size: int) -> int:
    """Virtual nodes for the demo's ranks: two, where each then has at least two ranks."""
    return 2 if world_size >= 4 and world_size % 2 == 0 else 1


def plans_to_train(
    schemes: Sequence[str], tables: list[EmbeddingBagConfig], world_size: int, keep_all: bool = False
) -> tuple[dict[str, ShardingPlan], dict[str, str]]:
    """A plan for each scheme, without those that cut as an earlier one does; and of these, as which one.

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
    """Looks again and again while the block runs."""
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
