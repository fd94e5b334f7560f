"""Trains cases on launched ranks and brings back how long a step takes.

All plans of one model take turns, a few steps each, so that a busy second hits all of them alike. With them runs a
small step that is always the same, the *reference*: where it is slower than at other times, the machine was busy with
something else, and what was measured beside it is not what the machine can do.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from recshard_lab.calibration.cases import Case, Model, draw_cases
from recshard_lab.embedding.configs import EmbeddingBagConfig
from recshard_lab.planner import Workload

WARM_UP = 2  # steps before the clock runs: kernels are built, buffers grow
BATCHES = 8  # that are trained on in turn: as many rows are used from one step to the next as in training, or nearly
MOST_STEPS = 8  # of a turn
BUSY = 1.3  # times its usual duration: the reference step of a busy moment


@dataclass(frozen=True, eq=False)
class Timed:
    """What a case took.

    Attributes:
        step_ms: of the slowest rank: the mean of the faster half of the turns.
        turns_ms: ``[turns]``, a step of the slowest rank in each.
        phases_ms: ``[W, 6]`` of each rank, medians: from the step's begin to the ids' arrival, to the rows' departure,
            their arrival, the gradients' departure, their arrival, the end. Waiting for others is part of it.
        reference_ms: what the reference step took beside it.
        kernels: that served its tables.
    """

    step_ms: float
    turns_ms: np.ndarray
    phases_ms: np.ndarray
    reference_ms: float
    kernels: tuple[str, ...]


def time_cases(
    ranks: Any, cases: Sequence[Case], *, turns: int = 7, turn_ms: float = 15.0, seed: int = 0
) -> list[Timed]:
    """Times plans of one model on launched ranks.

    Args:
        ranks: a launched session.
        cases: of one model.
        turns: of each case.
        turn_ms: how long a turn is, but at least two steps.
        seed: of weights and ids.
    """
    told = ranks.run(time_on_rank, [*cases, reference(ranks.world_size)], turns, turn_ms, seed)
    slowest = [np.array([rank[number]["ms"] for rank in told]).max(axis=0) for number in range(len(cases) + 1)]
    beside = faster_half(slowest.pop())
    return [
        Timed(
            faster_half(each),
            each,
            np.array([rank[number]["phases"] for rank in told]),
            beside,
            tuple(told[0][number]["kernels"]),
        )
        for number, each in enumerate(slowest)
    ]


def reference(world_size: int) -> Case:
    """A small step, always the same."""
    tables = tuple(
        EmbeddingBagConfig(name=f"r{i}", num_embeddings=5000, embedding_dim=32, feature_names=[f"f{i}"])
        for i in range(4)
    )
    return draw_cases(Model("reference", tables, Workload(256, 4.0)), ["row_wise"], world_size)[0]


def faster_half(turns_ms: np.ndarray) -> float:
    """The mean of the faster half.

    >>> faster_half(np.array([3.0, 1.0, 9.0]))
    2.0
    """
    return float(np.sort(turns_ms)[: len(turns_ms) // 2 + 1].mean())


def usual_ms(timed: Sequence[Timed]) -> float:
    """What the reference step takes when the machine is not busy: the first quartile."""
    return float(np.percentile([each.reference_ms for each in timed], 25))


def time_on_rank(cases: Sequence[Case], turns: int, turn_ms: float, seed: int) -> list[dict[str, Any]]:
    """What one rank runs: for each case the ms of one step in each turn, phases, and kernels. Collective."""
    import torch
    import torch.distributed as dist

    from recshard_lab.comm import trace

    torch.manual_seed(seed)
    rng = np.random.default_rng([seed, dist.get_rank()])
    drawn = {case.model.name: _batches(case.model, rng) for case in cases}
    built = [_built(case) for case in cases]
    counts: list[int] = []
    done: list[int] = []
    found: list[dict[str, Any]] = []

    def steps(number: int, count: int) -> tuple[float, list[list[float]]]:
        """Milliseconds of one of so many steps, and the phases of each."""
        module, (batches, grad) = built[number], drawn[cases[number].model.name]
        at, phases = [perf_counter()], []
        for _ in range(count):
            batch = batches[done[number] % BATCHES]
            done[number] += 1
            with trace() as sent:
                module(batch).values().backward(grad)
            at.append(perf_counter())
            phases.append(_phases(at[-2], sent.events, at[-1]))
        return 1000 * (at[-1] - at[0]) / count, phases

    for number, module in enumerate(built):
        done.append(0)
        steps(number, WARM_UP)
        taken = torch.tensor(steps(number, 1)[0])
        if dist.get_world_size() > 1:
            dist.all_reduce(taken, dist.ReduceOp.MAX)
        counts.append(min(max(int(turn_ms / float(taken)), 2), MOST_STEPS))
        found.append({"ms": [], "phases": [], "kernels": sorted(set(module.backends().values()))})
    for _ in range(turns):
        for number, count in enumerate(counts):
            dist.barrier()
            ms, phases = steps(number, count)
            found[number]["ms"].append(ms)
            found[number]["phases"] += phases
    for own in found:
        own["phases"] = [median(each) for each in zip(*own["phases"], strict=True)]
    built.clear()
    gc.collect()
    return found


def _batches(model: Model, rng: np.random.Generator) -> tuple[list[Any], Any]:
    import torch

    from recshard_lab.calibration.batches import random_batch

    width = sum(table.embedding_dim for table in model.tables)
    batches = [random_batch(model.tables, model.workload, rng) for _ in range(BATCHES)]
    return batches, torch.full((model.workload.batch_size, width), 1e-3)


def _built(case: Case) -> Any:
    import torch

    from recshard_lab.distributed import DistributedModelParallel, EmbeddingBagCollectionSharder
    from recshard_lab.embedding import EmbeddingBagCollection, EmbOptimType

    optimizer = EmbOptimType(case.model.workload.optimizer)
    sharder = EmbeddingBagCollectionSharder(fused_params={"optimizer": optimizer, "learning_rate": 0.01})
    collection = EmbeddingBagCollection(list(case.model.tables), device=torch.device("meta"))
    return DistributedModelParallel(collection, plan=case.plan, sharders=[sharder])


def _phases(begun: float, events: Sequence[Any], ended: float) -> list[float]:
    """Milliseconds between what was sent and received, in the order of a step."""
    at = [begun]
    for label in ("input_dist/ids", "output_dist/rows", "output_dist_backward/rows"):
        own = [event for event in events if event.label.startswith(label)]
        if label != "input_dist/ids":
            at.append(own[0].start_s if own else at[-1])
        at.append(max(event.start_s + event.ms / 1e3 for event in own) if own else at[-1])
    return [1000 * (end - start) for start, end in zip(at, [*at[1:], ended], strict=True)]
