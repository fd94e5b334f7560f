"""Optimality gaps (%) of the planner on random models.

``--with-torchrec`` instead runs TorchRec's planner, in a temporary environment, on the same models, and scores both
plans with both cost models.
"""

from __future__ import annotations

import itertools
import os
import random
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np

from benchmarks import Figure, plan
from benchmarks.apparatus import plan_beside
from recshard_lab.embedding import EmbeddingBagConfig
from recshard_lab.planner import EmbeddingShardingPlanner, Workload, estimate
from recshard_lab.sharding import PlanError, Topology

_BOUND, _OPTIMUM = "gap to the exact bound", "gap to the optimum where it is proved"
TARGETS = {
    f"{_BOUND}, median": 2.0,
    f"{_BOUND}, worst": 10.0,
    f"{_OPTIMUM}, median": 2.0,
    f"{_OPTIMUM}, worst": 10.0,
}
MODELS, QUICK_MODELS = 200, 24
EXACT_S = 10.0  # seconds for each exact plan


def random_model(seed: int) -> tuple[list[EmbeddingBagConfig], Topology, Workload]:
    """A model of 2 to 30 tables for 2 to 8 ranks, on GPUs or CPUs, with memory from ample to hardly enough."""
    draw = random.Random(seed)
    count, ranks = draw.choice([(2, 2), (4, 2), (8, 2), (4, 4), (8, 4), (12, 4), (20, 4), (8, 8), (16, 8), (30, 8)])
    tables, workload = plan.ads_tables(count, seed)
    fair = sum(table.weight_bytes for table in tables) / ranks
    cap = int(draw.choice([100, 2, 1.3]) * (1.05 * fair + 3e8))
    local = draw.choice([ranks, ranks, ranks // 2])
    device = draw.choice(["cuda", "cuda", "cpu"])
    optimizer = draw.choice(["exact_sgd", "exact_row_wise_adagrad"])
    workload = Workload(draw.choice([256, 1024]), workload.pooling_factors, optimizer=optimizer)
    top = Topology(ranks, device, hbm_cap=cap, ddr_cap=cap, local_world_size=local, cores_per_host=local)
    return tables, top, workload


def quality(count: int, seconds: float = EXACT_S, workers: int = 1) -> dict[str, list[float]]:
    """Gaps (%) on random models between the greedy plan and the best known bound, and between it and the exact plan.

    Args:
        count: models drawn. Models that do not fit are skipped.
        seconds: time limit of each exact plan.
        workers: processes that plan side by side.

    Raises:
        AssertionError: a plan does not tile a table, or does not fit.
    """
    if workers > 1:
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            gaps = list(pool.map(gaps_of, range(count), itertools.repeat(seconds)))
    else:
        gaps = [gaps_of(seed, seconds) for seed in range(count)]
    return {name: [own[name] for own in gaps if own] for name in ("bound", "exact", "proved", "own")}


def gaps_of(seed: int, seconds: float) -> dict[str, float]:
    """The gaps of one model; empty if it does not fit."""
    tables, top, workload = random_model(seed)
    steps, bounds = [], []
    for solver in ("greedy", "exact"):
        planner = EmbeddingShardingPlanner(top, workload=workload, solver=solver, time_limit_s=seconds)
        try:
            made = planner.plan_tables(tables, explain=False)
        except PlanError:
            return {}
        made.validate(tables, top.world_size)
        again = estimate(made, tables, top, workload)
        assert again.fits, f"seed {seed}: the {solver} plan does not fit"
        steps.append(again.step_ms)
        bounds.append(made.estimate.lower_bound or 0.0)
    return {
        "own": 100 * (steps[0] / bounds[0] - 1),
        "bound": 100 * (steps[0] / max(bounds) - 1),
        "exact": 100 * (steps[0] / steps[1] - 1),
        "proved": float(steps[1] <= max(bounds) * 1.0005),
    }


def figures(quick: bool = False, *, with_torchrec: bool = False) -> list[Figure]:
    """Gaps of random models; quick: of fewer models.

    Args:
        with_torchrec: instead, both planners side by side; quick: only 26 and 100 tables on 8 ranks.
    """
    if with_torchrec:
        sizes = plan_beside.QUICK_SIZES if quick else plan_beside.SIZES
        return plan_beside.beside_torchrec(
            sizes, plan.fitting, plan_beside.QUICK_LIMIT_S if quick else plan_beside.LIMIT_S
        )
    count = QUICK_MODELS if quick else MODELS
    found = quality(count, 1.0 if quick else EXACT_S, workers=os.cpu_count() or 1)
    proved = [gap for gap, is_best in zip(found["bound"], found["proved"], strict=True) if is_best]
    counts = {"models": len(found["bound"]), "proved": len(proved)}
    return [
        Figure(f"{_BOUND}, median", float(np.median(found["bound"])), "%", beside=counts),
        Figure(f"{_BOUND}, worst", max(found["bound"]), "%", beside=counts),
        Figure(f"{_OPTIMUM}, median", float(np.median(proved or [np.nan])), "%"),
        Figure(f"{_OPTIMUM}, worst", max(proved or [np.nan]), "%"),
        Figure("gap to the best plan found, worst", max(found["exact"]), "%"),
        Figure("gap to the planner's own bound, median", float(np.median(found["own"])), "%"),
    ]
