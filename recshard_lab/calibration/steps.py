"""Trains cases on launched ranks and brings back how long a step takes: all plans of a model in turn.

Plans of one model take turns, a few steps each, so that a busy second hits all of them alike.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from recshard_lab.calibration.cases import Case

WARM_UP = 3  # steps before the clock runs: kernels are built, buffers grow
BATCHES = 3


@dataclass(frozen=True)
class Timed:
    """What a case took.

    Attributes:
        step_ms: of the slowest rank; the median of the rounds.
        spread: of the rounds, the third quartile over the first.
        phases_ms: ``[W, 6]`` of each rank: from the step's begin to the ids' arrival, to the rows' departure, their
            arrival, the gradients' departure, their arrival, the end. Waiting for others is part of it.
    """

    step_ms: float
    spread: float
    rounds_ms: np.ndarray
    phases_ms: np.ndarray


def time_cases(
    ranks: Any, cases: Sequence[Case], *, rounds: int = 7, round_ms: float = 15.0, seed: int = 0
) -> list[Timed]:
    """Times plans of one model on launched ranks.

    Args:
        ranks: a launched session.
        cases: of one model.
        rounds: how often each case has its turn.
        round_ms: how long a turn is, at least two steps.
        seed: of weights and ids.
    """
    told = ranks.run(time_on_rank, list(cases), rounds, round_ms, seed)
    found = []
    for number in range(len(cases)):
        own = [rank[number] for rank in told]
        each = np.array([one["ms"] for one in own]).max(axis=0)
        low, high = np.percentile(each, [25, 75])
        found.append(Timed(float(np.median(each)), float(high / low), each, np.array([one["phases"] for one in own])))
    return found


def time_on_rank(cases: Sequence[Case], rounds: int, round_ms: float, seed: int) -> list[dict[str, Any]]:
    """What one rank runs: for each case, the ms of one step in each round, and the phases. Collective."""
    import torch
    import torch.distributed as dist

    from recshard_lab.calibration.batches import random_batch
    from recshard_lab.comm import trace

    torch.manual_seed(seed)
    rng = np.random.default_rng([seed, dist.get_rank()])
    model = cases[0].model
    batches = [random_batch(model.tables, model.workload, rng) for _ in range(BATCHES)]
    width = sum(table.embedding_dim for table in model.tables)
    grad = torch.full((model.workload.batch_size, width), 1e-3)
    modules = [_built(case) for case in cases]
    found: list[dict[str, Any]] = []
    counts = []

    def steps(module: Any, count: int) -> float:
        begun = perf_counter()
        for number in range(count):
            module(batches[number % BATCHES]).values().backward(grad)
        return 1000 * (perf_counter() - begun)

    for module in modules:
        steps(module, WARM_UP)
        taken = torch.tensor(steps(module, 2) / 2)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        counts.append(min(max(int(round_ms / float(taken)), 2), 8))
        found.append({"ms": [], "phases": None})
    for _ in range(rounds):
        for module, count, own in zip(modules, counts, found, strict=True):
            dist.barrier()
            own["ms"].append(steps(module, count) / count)
    for module, count, own in zip(modules, counts, found, strict=True):
        phases = []
        dist.barrier()
        for number in range(max(count, 3)):
            with trace() as sent:
                begun = perf_counter()
                module(batches[number % BATCHES]).values().backward(grad)
                ended = perf_counter()
            phases.append(_phases(begun, sent.events, ended))
        own["phases"] = [median(each) for each in zip(*phases, strict=True)]
    del modules
    gc.collect()
    return found


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
        own = [event for event in events if event.label == label]
        if label != "input_dist/ids":
            at.append(own[0].start_s if own else at[-1])
        at.append(max(event.start_s + event.ms / 1e3 for event in own) if own else at[-1])
    return [1000 * (end - start) for start, end in zip(at, [*at[1:], ended], strict=True)]
