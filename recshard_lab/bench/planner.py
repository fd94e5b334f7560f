"""How long the planner takes from 26 tables on 8 ranks to 1,000 on 2,048, and how far from the best its plans are.

With TorchRec, which is installed in an environment thrown away: its planner on the same models, both plans scored by
both cost models.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from statistics import median

import numpy as np

from recshard_lab.bench import Figure
from recshard_lab.bench.apparatus import plan_beside
from recshard_lab.embedding import EmbeddingBagConfig
from recshard_lab.planner import EmbeddingShardingPlanner, Workload, estimate
from recshard_lab.sharding import PlanError, Topology

SIZES = ((26, 8, 20.0), (100, 8, 100.0), (500, 8, 500.0), (1_000, 64, 2_000.0), (1_000, 2_048, 30_000.0))
"""Tables, ranks, and the milliseconds that a plan may take."""
SEEDS = 3
MODELS, QUICK_MODELS = 200, 24
EXACT_S = 10.0  # seconds for each exact plan


def ads_tables(count: int, seed: int) -> tuple[list[EmbeddingBagConfig], Workload]:
    """Rows log-uniform in 1e3 to 2e7, dims 32 to 256, 1 to 50 ids a bag."""
    draw = random.Random(seed)
    tables = [
        EmbeddingBagConfig(
            name=f"t{i}",
            num_embeddings=int(10 ** draw.uniform(3, 7.3)),
            embedding_dim=draw.choice([32, 64, 128, 256]),
            feature_names=[f"f{i}"],
        )
        for i in range(count)
    ]
    return tables, Workload(pooling_factors={f"f{i}": draw.uniform(1, 50) for i in range(count)})


def gpus(ranks: int) -> Topology:
    """GPUs of 80 GB, eight a host."""
    return Topology(ranks, "cuda", hbm_cap=80 * 10**9, local_world_size=min(8, ranks))


def times(quick: bool) -> list[Figure]:
    """A plan of each size for several seeds; models that do not fit into the memory of all ranks are passed over."""
    found = []
    for count, ranks, limit in SIZES[:3] if quick else SIZES:
        spent: list[float] = []
        cpu: list[float] = []
        over: list[float] = []
        for seed in range(1 if ranks > 1000 else SEEDS):
            tables, _, workload = fitting(count, ranks, seed)
            rounds = []
            for _ in range(5 if count <= 100 else 1):
                begun, begun_cpu = time.perf_counter(), time.process_time()
                planner = EmbeddingShardingPlanner(gpus(ranks), workload=workload)
                planner.plan_tables(tables)
                rounds.append((1e3 * (time.perf_counter() - begun), 1e3 * (time.process_time() - begun_cpu)))
            assert planner.last_estimate is not None
            spent.append(median(wall for wall, _ in rounds))
            cpu.append(min(one for _, one in rounds))
            over.append(100 * (planner.last_estimate.gap or 0.0))
        beside = {"CPU ms": median(cpu), "gap %": median(over)}
        name = f"plan of {count:,} tables x {ranks:,} ranks"
        found.append(Figure(name, median(spent), "ms", target=limit, beside=beside))
    return found


def random_model(seed: int) -> tuple[list[EmbeddingBagConfig], Topology, Workload]:
    """A model of 2 to 30 tables for 2 to 8 ranks, on GPUs or CPUs, with memory from ample to hardly enough."""
    draw = random.Random(seed)
    count, ranks = draw.choice([(2, 2), (4, 2), (8, 2), (4, 4), (8, 4), (12, 4), (20, 4), (8, 8), (16, 8), (30, 8)])
    tables, workload = ads_tables(count, seed)
    fair = sum(table.weight_bytes for table in tables) / ranks
    cap = int(draw.choice([100, 2, 1.3]) * (1.05 * fair + 3e8))
    local = draw.choice([ranks, ranks, ranks // 2])
    device = draw.choice(["cuda", "cuda", "cpu"])
    optimizer = draw.choice(["exact_sgd", "exact_row_wise_adagrad"])
    workload = Workload(draw.choice([256, 1024]), workload.pooling_factors, optimizer=optimizer)
    top = Topology(ranks, device, hbm_cap=cap, ddr_cap=cap, local_world_size=local, cores_per_host=local)
    return tables, top, workload


def quality(count: int, seconds: float = EXACT_S, workers: int = 1) -> dict[str, list[float]]:
    """Of random models, per cent between the greedy plan and the best known bound, and between it and the exact plan.

    Args:
        count: models drawn; those that do not fit are not counted.
        seconds: time limit of each exact plan.
        workers: processes that plan side by side.

    Raises:
        AssertionError: a plan that is no tiling or does not fit.
    """
    if workers > 1:
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            told = list(pool.map(gaps_of, range(count), itertools.repeat(seconds)))
    else:
        told = [gaps_of(seed, seconds) for seed in range(count)]
    return {name: [each[name] for each in told if each] for name in ("bound", "exact", "proved", "own")}


def gaps_of(seed: int, seconds: float) -> dict[str, float]:
    """What `quality` says of one model; nothing where it does not fit."""
    tables, top, workload = random_model(seed)
    steps, bounds = [], []
    for solver in ("greedy", "exact"):
        planner = EmbeddingShardingPlanner(top, workload=workload, solver=solver, time_limit_s=seconds)
        try:
            plan = planner.plan_tables(tables, explain=False)
        except PlanError:
            return {}
        plan.validate(tables, top.world_size)
        again = estimate(plan, tables, top, workload)
        assert again.fits, f"seed {seed}: the {solver} plan does not fit"
        assert planner.last_estimate is not None
        steps.append(again.step_ms)
        bounds.append(planner.last_estimate.lower_bound or 0.0)
    return {
        "own": 100 * (steps[0] / bounds[0] - 1),
        "bound": 100 * (steps[0] / max(bounds) - 1),
        "exact": 100 * (steps[0] / steps[1] - 1),
        "proved": float(steps[1] <= max(bounds) * 1.0005),
    }


def fitting(count: int, ranks: int, seed: int) -> tuple[list[EmbeddingBagConfig], Topology, Workload]:
    """The model number `seed` among those that fit into the memory of all ranks."""
    top = gpus(ranks)
    for drawn in itertools.count():
        tables, workload = ads_tables(count, drawn)
        seed -= sum(table.weight_bytes for table in tables) <= 0.8 * ranks * top.free_memory_bytes()
        if seed < 0:
            break
    return tables, top, workload


def figures(quick: bool = False, *, with_torchrec: bool = False) -> list[Figure]:
    """Times of all sizes, then gaps of random models; quick: the three smallest sizes, and fewer models.

    Args:
        with_torchrec: instead, both planners side by side; quick: only 26 and 100 tables on 8 ranks.
    """
    if with_torchrec:
        sizes = plan_beside.QUICK_SIZES if quick else plan_beside.SIZES
        return plan_beside.beside_torchrec(sizes, fitting, plan_beside.QUICK_LIMIT_S if quick else plan_beside.LIMIT_S)
    count = QUICK_MODELS if quick else MODELS
    found = quality(count, 1.0 if quick else EXACT_S, workers=os.cpu_count() or 1)
    proved = [gap for gap, is_best in zip(found["bound"], found["proved"], strict=True) if is_best]
    told = {"models": len(found["bound"]), "proved": len(proved)}
    return [
        *times(quick),
        Figure("gap to the exact bound, median", float(np.median(found["bound"])), "%", target=2.0, beside=told),
        Figure("gap to the exact bound, worst", max(found["bound"]), "%", target=10.0, beside=told),
        Figure("gap to the optimum where it is proved, median", float(np.median(proved or [np.nan])), "%", target=2.0),
        Figure("gap to the optimum where it is proved, worst", max(proved or [np.nan]), "%", target=10.0),
        Figure("gap to the best plan found, worst", max(found["exact"]), "%"),
        Figure("gap to the planner's own bound, median", float(np.median(found["own"])), "%"),
    ]
