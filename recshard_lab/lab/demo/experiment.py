"""One DLRM on ratings, trained under a plan: what ``recshard demo`` compares, on every rank or on none.

Every run starts from the same weights and sees the same global batches, so only the plan differs.

    plan_of_scheme       tables -> a plan that cuts all of them one way
    workload_of          ratings -> the step that the planner predicts
    train_on_rank        what every rank runs; ``plan_json=None`` is the unsharded truth on one process
    run_under            the same on launched ranks, results gathered
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np
import torch

from recshard_lab.comm import trace
from recshard_lab.data import RatingsDataset
from recshard_lab.distributed import DistributedModelParallel
from recshard_lab.embedding import EmbeddingBagConfig
from recshard_lab.lab.compare.measure import Measured, sent_by_label, took_by_label
from recshard_lab.planner import Workload
from recshard_lab.sharding import ParameterSharding, ShardingPlan
from recshard_lab.train import Recipe, Step, evaluate

COLLECTION = "embedding_bag_collection"  # the collection's path inside the DLRM


@dataclass(frozen=True)
class Outcome:
    """What came of one training.

    Args:
        auc: on the test ratings.
        losses: mean loss of every step's global batch.
        measured: per rank step time, memory and traffic; None for the unsharded truth.
        step_ms: median step; of the slowest rank.
        collectives: exchanges of embeddings in one step, both directions.
    """

    auc: float
    losses: list[float]
    step_ms: float
    measured: Measured | None = None
    collectives: float = 0.0

    @property
    def moved_bytes(self) -> float:
        """Ids, rows and gradients that went from one rank to another in one step."""
        return 0.0 if self.measured is None else moved_bytes(self.measured.traffic_bytes)


def moved_bytes(traffic: np.ndarray) -> float:
    """What left its rank, of a traffic matrix ``[W, W]``.

    >>> moved_bytes(np.array([[5.0, 1.0], [2.0, 7.0]]))
    3.0
    """
    return float(traffic.sum() - np.trace(traffic))


def plan_of_scheme(scheme: str, tables: list[EmbeddingBagConfig], world_size: int, nodes: int = 1) -> ShardingPlan:
    """Every table cut by one scheme, the way it cuts when nothing else is said.

    Args:
        nodes: how many nodes the ranks live on, which some schemes look at.

    >>> print(plan_of_scheme("row_wise", [EmbeddingBagConfig(5, 4, name="t", feature_names=["f"])], 2))
    table  size   scheme    kernel  ranks  shards
    t      5 x 4  row_wise  fused   0-1    1 x [3 x 4], 1 x [2 x 4]
    """
    plan = ShardingPlan({COLLECTION: {table.name: ParameterSharding(scheme) for table in tables}})  # type: ignore[dict-item]
    return plan.resolved(tables, world_size, world_size // nodes)


def workload_of(train: RatingsDataset, recipe: Recipe, world_size: int) -> Workload:
    """The step to predict, as the ratings have it: ids a bag, and how many of a global batch's ids are distinct."""
    ids: dict[str, list[int]] = {}
    distinct: dict[str, list[int]] = {}
    samples = 0
    for batch in list(train.batches(recipe.batch_size, shuffle=True, seed=recipe.seed, drop_last=True))[:20]:
        samples += len(batch)
        for name, bags in batch.sparse_features.to_dict().items():
            ids.setdefault(name, []).append(len(bags.values()))
            distinct.setdefault(name, []).append(len(bags.values().unique()))
    model = recipe.model(train)
    in_tables = sum(p.numel() for p in model.embedding_bag_collection.parameters())
    return Workload(
        batch_size=-(-recipe.batch_size // world_size),
        pooling_factors={name: sum(counts) / samples for name, counts in ids.items()},
        unique_fraction={name: sum(distinct[name]) / max(1, sum(counts)) for name, counts in ids.items()},
        optimizer="exact_row_wise_adagrad",
        dense_parameters=sum(p.numel() for p in model.parameters()) - in_tables,
    )


def first_steps(train: RatingsDataset, recipe: Recipe, steps: int) -> tuple[RatingsDataset, RatingsDataset, Recipe]:
    """Training data, test data and recipe of a training of at most `steps` steps, to measure a step."""
    few = train.select(torch.arange(min(len(train), steps * recipe.batch_size)))
    return few, few, replace(recipe, epochs=1)


def train_on_rank(
    train: RatingsDataset,
    test: RatingsDataset,
    recipe: Recipe,
    plan_json: str | None = None,
    progress: str | Callable[[int], object] | None = None,
) -> dict[str, Any]:
    """Builds, trains, evaluates. Collective when there is a plan; alone, without any sharding, when there is none.

    Args:
        progress: a file of one int64 where rank 0 writes the number of steps done, or a function to call with it.
    """
    model: Any = recipe.model(train)
    if plan_json is not None:
        model = DistributedModelParallel(model, plan=ShardingPlan.from_json(plan_json))
    tell = _teller(progress)
    ticks = [perf_counter()]
    held: dict[str, int] = {}

    def on_step(step: Step) -> None:
        ticks.append(perf_counter())
        tell(step.number)
        if step.number == 2 and plan_json is not None:  # after a whole step, on a full batch
            held.update(model.memory_bytes())

    with trace() as sent:
        result = recipe.train(model, train, on_step)
    steps = len(result.losses)
    found = {
        "losses": result.losses,
        "step_ms": 1e3 * float(np.median(np.diff(ticks))),
        "auc": evaluate(model, test).auc,
    }
    if plan_json is not None:
        found |= {
            "memory": held,
            "sent": sent_by_label(sent, model.env.world_size, steps),
            "took": took_by_label(sent),
            "collectives": sent.count("all_to_all") / steps,
            "backends": model.backends(),
        }
    return found


def run_under(
    ranks: Any,
    plan: ShardingPlan,
    train: RatingsDataset,
    test: RatingsDataset,
    recipe: Recipe,
    progress: str | None = None,
) -> Outcome:
    """Trains on launched ranks (`recshard_lab.launch`) under a plan for as many."""
    found = ranks.run(train_on_rank, train, test, recipe, plan.to_json(), progress)
    measured = Measured.of(found, len(found[0]["losses"]), found[0]["backends"], ranks.times_note)
    return Outcome(found[0]["auc"], found[0]["losses"], measured.step_ms, measured, found[0]["collectives"])


def run_unsharded(
    train: RatingsDataset, test: RatingsDataset, recipe: Recipe, progress: Callable[[int], object] | None = None
) -> Outcome:
    """The truth: the same model in this process, no plan, no rank, no sharded code; on one thread, as a rank."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = train_on_rank(train, test, recipe, None, progress)
    finally:
        torch.set_num_threads(threads)
    return Outcome(found["auc"], found["losses"], found["step_ms"])


def _teller(progress: str | Callable[[int], object] | None) -> Callable[[int], object]:
    """Where the number of steps goes."""
    if callable(progress):
        return progress
    first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    if progress is None or not first:
        return lambda number: None
    counter = np.memmap(progress, dtype=np.int64, mode="r+", shape=(1,))
    return lambda number: counter.__setitem__(0, number)
