"""Trains cases on launched ranks and measures the milliseconds of a step.

All plans of one model take turns, a few steps each, so a busy second affects all of them alike. A small step that is
always the same, the *reference step*, runs beside them. A slow reference step shows that other programs used the
machine during a measurement.

On a GPU the host waits for the device before and after each turn, so a step includes both the host's and the device's
time. Phases are not separated there: that would take a wait after each, which changes the step.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from recshard_lab.calibration.cases import Case, Model, draw_cases
from recshard_lab.calibration.clock import Clock, faster_half
from recshard_lab.embedding.configs import EmbeddingBagConfig
from recshard_lab.planner import Workload

WARM_UP = 2  # untimed steps, in which kernels are compiled and buffers grow
BATCHES = 8  # trained on in turn, so successive steps share rows about as in training
MOST_STEPS = 8  # of a turn
BUSY = 1.3  # a reference step this many times as long as usual marks a busy moment


@dataclass(frozen=True, eq=False)
class Timed:
    """The measured time of a case.

    Attributes:
        step_ms: mean of the faster half of `turns_ms`.
        turns_ms: ``[turns]`` step of the slowest rank in each turn.
        phases_ms: ``[W, 6]`` medians of each rank, waits for other ranks included: start to arrival of ids, to sending
            of rows, to their arrival, to sending of gradients, to their arrival, to the end. Zeros on a GPU.
        reference_ms: the reference step in the same turns.
    """

    step_ms: float
    turns_ms: np.ndarray
    phases_ms: np.ndarray
    reference_ms: float


def time_cases(
    ranks: Any, cases: Sequence[Case], *, turns: int = 7, turn_ms: float = 15.0, seed: int = 0
) -> list[Timed]:
    """Times plans of one model on launched ranks.

    Args:
        ranks: a launched session.
        cases: of one model.
        turns: of each case.
        turn_ms: length of a turn, which has 2 to `MOST_STEPS` steps.
        seed: of weights and ids.
    """
    by_rank = ranks.run(time_on_rank, [*cases, reference(ranks.world_size)], turns, turn_ms, seed)
    slowest = [np.array([rank[number]["ms"] for rank in by_rank]).max(axis=0) for number in range(len(cases) + 1)]
    beside = faster_half(slowest.pop())
    return [
        Timed(faster_half(each), each, np.array([rank[number]["phases"] for rank in by_rank]), beside)
        for number, each in enumerate(slowest)
    ]


def reference(world_size: int) -> Case:
    """The reference step: four tables of 5,000 x 32, row-wise, batch 256, 4 ids a bag."""
    tables = tuple(
        EmbeddingBagConfig(name=f"r{i}", num_embeddings=5000, embedding_dim=32, feature_names=[f"f{i}"])
        for i in range(4)
    )
    return draw_cases(Model("reference", tables, Workload(256, 4.0)), ["row_wise"], world_size)[0]


def usual_ms(timed: Sequence[Timed]) -> float:
    """The reference step on a quiet machine: the first quartile of `reference_ms`."""
    return float(np.percentile([each.reference_ms for each in timed], 25))


def time_on_rank(cases: Sequence[Case], turns: int, turn_ms: float, seed: int) -> list[dict[str, Any]]:
    """Runs on each rank: for each case the ms of one step in each turn, phases, and kernels. Collective."""
    import torch
    import torch.distributed as dist

    from recshard_lab.comm import ShardingEnv, all_reduce, compute_device, trace

    clock = Clock(compute_device(ShardingEnv.default()))
    on_gpu = clock.device.type != "cpu"
    rng = np.random.default_rng([seed, dist.get_rank()])
    drawn = {case.model.name: _batches(case.model, rng, clock.device) for case in cases}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # of the first weights
        built = [_built(case) for case in cases]
    counts: list[int] = []
    done: list[int] = []
    found: list[dict[str, Any]] = []

    def steps(number: int, count: int) -> tuple[float, list[list[float]]]:
        """Milliseconds of one of ``count`` steps, and the phases of each."""
        module, (batches, grad) = built[number], drawn[cases[number].model.name]
        clock.synchronize()
        at, phases = [perf_counter()], []
        for _ in range(count):
            batch = batches[done[number] % BATCHES]
            done[number] += 1
            with nullcontext() if on_gpu else trace() as sent:
                module(batch).values().backward(grad)
            at.append(perf_counter())
            phases.append([0.0] * 6 if sent is None else _phases(at[-2], sent.events, at[-1]))
        clock.synchronize()
        at[-1] = perf_counter() if on_gpu else at[-1]
        return 1000 * (at[-1] - at[0]) / count, phases

    for number in range(len(built)):
        done.append(0)
        steps(number, WARM_UP)
        taken = all_reduce(torch.tensor(steps(number, 1)[0]), ShardingEnv.default(), "calibration", maximum=True)
        counts.append(min(max(int(turn_ms / float(taken)), 2), MOST_STEPS))
        found.append({"ms": [], "phases": []})
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


def _batches(model: Model, rng: np.random.Generator, device: Any) -> tuple[list[Any], Any]:
    import torch

    from recshard_lab.calibration.batches import random_batch

    width = sum(table.embedding_dim for table in model.tables)
    batches = [random_batch(model.tables, model.workload, rng).to(device) for _ in range(BATCHES)]
    return batches, torch.full((model.workload.batch_size, width), 1e-3, device=device)


def _built(case: Case) -> Any:
    import torch

    from recshard_lab.distributed import DistributedModelParallel, EmbeddingBagCollectionSharder
    from recshard_lab.embedding import EmbeddingBagCollection, EmbOptimType

    optimizer = EmbOptimType(case.model.workload.optimizer)
    sharder = EmbeddingBagCollectionSharder(fused_params={"optimizer": optimizer, "learning_rate": 0.01})
    collection = EmbeddingBagCollection(list(case.model.tables), device=torch.device("meta"))
    return DistributedModelParallel(collection, plan=case.plan, sharders=[sharder])


def _phases(begun: float, events: Sequence[Any], ended: float) -> list[float]:
    """Milliseconds between the messages of a step, in their order."""
    at = [begun]
    for label in ("input_dist/ids", "output_dist/rows", "output_dist_backward/rows"):
        own = [event for event in events if event.label.startswith(label)]
        if label != "input_dist/ids":
            at.append(own[0].start_s if own else at[-1])
        at.append(max(event.start_s + event.ms / 1e3 for event in own) if own else at[-1])
    return [1000 * (end - start) for start, end in zip(at, [*at[1:], ended], strict=True)]
