"""This library's planner and TorchRec's on the same seeded models, each plan scored by both cost models.

TorchRec's estimator uses the busiest rank's sum as the step, ours the sum over phases of the slowest rank. Our planner
plans twice, once with each cost model, so that each estimator scores a plan that was made for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np

from benchmarks import Figure, note
from benchmarks.apparatus.environments import TorchRecEnv
from benchmarks.apparatus.plan_sides import NoPlan, asked, plan_of, put_to_torchrec
from recshard_lab.embedding import EmbeddingBagConfig
from recshard_lab.planner import EmbeddingShardingPlanner, Workload, estimate
from recshard_lab.sharding import ShardingPlan, Topology

__all__ = ["QUICK_SIZES", "SIZES", "beside_torchrec", "compared"]

QUICK_SIZES = ((26, 8, 3), (100, 8, 2))
"""Tables, ranks, seeds."""
SIZES = ((26, 8, 3), (100, 8, 3), (26, 64, 3), (100, 64, 1), (500, 8, 1))
LIMIT_S, QUICK_LIMIT_S = 600.0, 120.0
ALLOWED = 1.0  # times TorchRec's step, by either cost model
ROUNDS = 5
COST_MODELS = {"torchrec": "TorchRec's estimator", "recshard": "our cost model"}

Draw = Callable[[int, int, int], tuple[list[EmbeddingBagConfig], Topology, Workload]]


def beside_torchrec(sizes: Sequence[tuple[int, int, int]], draw: Draw, limit_s: float) -> list[Figure]:
    """Two figures for each model, one by each cost model.

    Args:
        sizes: tables, ranks and how many seeds.
        draw: makes the problem of so many tables, ranks, and a seed.
        limit_s: seconds that TorchRec's planner may take for one model, imports included.

    Raises:
        PeersMissing: TorchRec cannot be installed beside the torch that is here.
    """
    note("creating a temporary environment for TorchRec, which takes about a minute ...")
    found = []
    with TorchRecEnv() as theirs:
        for count, ranks, seeds in sizes:
            for seed in range(seeds):
                name = f"{count} tables x {ranks} ranks, seed {seed}"
                note(f"{name} ...")
                found += compared(theirs.python, name, *draw(count, ranks, seed), limit_s)
    return found


def compared(
    python: str,
    name: str,
    tables: Sequence[EmbeddingBagConfig],
    topology: Topology,
    workload: Workload,
    limit_s: float,
) -> list[Figure]:
    """The two figures of one model: predicted steps, ours / TorchRec's, with the times that planning took.

    Raises:
        RuntimeError: our formulas and TorchRec give different costs for its plan.
    """
    ours, spent = {}, {}
    for cost_model in COST_MODELS:
        ours[cost_model], spent[cost_model] = _ours(tables, topology, workload, cost_model)
    try:
        answer = put_to_torchrec(python, asked("plan", tables, topology, workload), limit_s)
        _check_kernels(answer["tables"])
    except NoPlan as none:
        why = f"{name}: TorchRec: {none}"
        return [
            Figure(f"{name}, by {judge}", float("nan"), "x", beside={"planned ms": spent[cost_model]}, note=why)
            for cost_model, judge in COST_MODELS.items()
        ]
    theirs = plan_of(answer["tables"])

    def ms(plan: ShardingPlan, cost_model: str) -> float:
        return estimate(plan, tables, topology, workload, cost_model=cost_model).step_ms

    _check_numbers(answer["tables"], estimate(theirs, tables, topology, workload, cost_model="torchrec").ms)
    figures = []
    for cost_model, judge in COST_MODELS.items():
        other = next(another for another in COST_MODELS if another != cost_model)
        step, their_step = ms(ours[cost_model], cost_model), ms(theirs, cost_model)
        beside = {
            "planned ms": spent[cost_model],
            "TorchRec planned ms": 1e3 * answer["seconds"],
            "step ms": step,
            "TorchRec step ms": their_step,
            "x by the other": ms(ours[cost_model], other) / ms(theirs, other),
        }
        figures.append(Figure(f"{name}, by {judge}", step / their_step, "x", target=ALLOWED, beside=beside))
    return figures


def _ours(
    tables: Sequence[EmbeddingBagConfig], topology: Topology, workload: Workload, cost_model: str
) -> tuple[ShardingPlan, float]:
    """Our plan, and the median of the milliseconds that it took."""
    rounds = []
    for _ in range(ROUNDS if len(tables) <= 100 else 1):
        begun = time.perf_counter()
        planner = EmbeddingShardingPlanner(topology, workload=workload, cost_model=cost_model)
        plan = planner.plan_tables(tables)
        rounds.append(1e3 * (time.perf_counter() - begun))
    return plan, median(rounds)


def _check_kernels(answer: Sequence[dict[str, Any]]) -> None:
    """Raises if the formulas here cannot price a kernel."""
    for one in answer:
        if one["kernel"] not in ("fused", "dense"):
            raise NoPlan(f"it puts table {one['table']!r} under kernel {one['kernel']!r}, which is not compared")


def _check_numbers(answer: Sequence[dict[str, Any]], ms: np.ndarray) -> None:
    """Raises unless a plan's milliseconds ``[W, P]`` equal TorchRec's. Shards without rows are left out."""
    theirs = np.zeros(len(ms))
    for one in answer:
        for shard in one["shards"]:
            theirs[shard["rank"]] += shard["total_ms"] if np.prod(shard["size"]) else 0.0
    if not np.allclose(ms.sum(axis=1), theirs, rtol=1e-9):
        raise RuntimeError(f"by our formulas ranks take {ms.sum(axis=1).tolist()} ms, TorchRec says {theirs.tolist()}")
