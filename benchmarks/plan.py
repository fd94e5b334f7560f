"""How long the planner takes for modules of 26, 100 and 500 tables on 8 ranks.

`benchmarks.planner` measures larger models and the quality of plans.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import median

import torch
from torch import nn

from benchmarks import Figure, median_ms
from recshard_lab.embedding import EmbeddingBagCollection, EmbeddingBagConfig
from recshard_lab.planner import EmbeddingShardingPlanner, Workload, estimate
from recshard_lab.sharding import ParameterConstraints, Topology

TABLES, RANKS = 26, 8
SIZES = ((26, 8), (100, 8), (500, 8))
"""Tables, ranks."""
SEEDS = 3


def name_of(tables: int, ranks: int) -> str:
    """The name of the figure of a size.

    >>> name_of(1000, 2048)
    'plan of 1,000 tables x 2,048 ranks'
    """
    return f"plan of {tables:,} tables x {ranks:,} ranks"


_ESTIMATE = f"estimate of a given plan, {TABLES} tables x {RANKS} ranks"
TARGETS = {name_of(26, 8): 50.0, name_of(100, 8): 200.0, name_of(500, 8): 500.0, _ESTIMATE: 20.0}


def criteo_like(count: int = TABLES, seed: int = 0) -> list[EmbeddingBagConfig]:
    """Tables of dim 64 whose row counts are spread evenly over the magnitudes from 1e3 to 2e7, as in ads."""
    draw = random.Random(seed)
    return [
        EmbeddingBagConfig(
            name=f"t{i}", num_embeddings=int(10 ** draw.uniform(3, 7.3)), embedding_dim=64, feature_names=[f"f{i}"]
        )
        for i in range(count)
    ]


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


def fitting(count: int, ranks: int, seed: int) -> tuple[list[EmbeddingBagConfig], Topology, Workload]:
    """The model number `seed` among those that fit into the memory of all ranks."""
    top = gpus(ranks)
    for drawn in itertools.count():
        tables, workload = ads_tables(count, drawn)
        seed -= sum(table.weight_bytes for table in tables) <= 0.8 * ranks * top.free_memory_bytes()
        if seed < 0:
            break
    return tables, top, workload


def live_module(
    tables: list[EmbeddingBagConfig], workload: Workload
) -> tuple[nn.Module, Workload, dict[str, ParameterConstraints]]:
    """A module on device ``meta`` with these tables; the workload, its pooling factors moved into constraints."""
    module = nn.Sequential(EmbeddingBagCollection(tables=tables, device=torch.device("meta")))
    constraints = {
        table.name: ParameterConstraints(pooling_factors=[workload.pooling_factor(f) for f in table.feature_names])
        for table in tables
    }
    return module, replace(workload, pooling_factors=Workload().pooling_factors), constraints


def times(sizes: Iterable[tuple[int, int]]) -> list[Figure]:
    """Milliseconds of ``planner.plan(module)`` for each size: the median over three models, one beyond 1,000 ranks.

    Every plan has a new planner. The module is on device ``meta``, and its construction is not timed. CPU is the least
    CPU time of a model's plans in ms.
    """
    found = []
    for count, ranks in sizes:
        spent: list[float] = []
        cpu: list[float] = []
        for seed in range(1 if ranks > 1000 else SEEDS):
            tables, topology, workload = fitting(count, ranks, seed)
            module, workload, constraints = live_module(tables, workload)
            rounds = []
            for _ in range(5 if count <= 100 else 1):
                begun, begun_cpu = time.perf_counter(), time.process_time()
                EmbeddingShardingPlanner(topology, workload=workload, constraints=constraints).plan(module)
                rounds.append((1e3 * (time.perf_counter() - begun), 1e3 * (time.process_time() - begun_cpu)))
            spent.append(median(wall for wall, _ in rounds))
            cpu.append(min(one for _, one in rounds))
        found.append(Figure(name_of(count, ranks), median(spent), "ms", beside={"CPU": median(cpu)}))
    return found


def figures() -> list[Figure]:
    """Plans of three sizes, and the estimate of a given plan."""
    tables, topology, workload = fitting(TABLES, RANKS, seed=0)
    plan = EmbeddingShardingPlanner(topology, workload=workload).plan_tables(tables)
    return [*times(SIZES), _estimate(lambda: estimate(plan, tables, topology, workload))]


def _estimate(action: Callable[[], object]) -> Figure:
    begun, rounds = time.process_time(), 20
    wall = median_ms(action, rounds, warm_up=0)
    return Figure(_ESTIMATE, wall, "ms", beside={"CPU": 1e3 * (time.process_time() - begun) / rounds})
