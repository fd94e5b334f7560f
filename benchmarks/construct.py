"""Seconds that DistributedModelParallel takes for 500 tables on 2 ranks, planned before or while it does."""

from __future__ import annotations

import random
import time
from statistics import median

import torch

from benchmarks import Figure
from recshard_lab.embedding import EmbeddingBagCollection, EmbeddingBagConfig
from recshard_lab.sharding import (
    ShardingPlan,
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)

TABLES, RANKS, ROUNDS = 500, 2, 5
_GIVEN, _PLANNED = (f"{TABLES} tables on {RANKS} ranks, {words}" for words in ("given a plan", "planning included"))
TARGETS = {f"{_PLANNED}, {call}": 2.0 for call in ("first call", "later calls")}  # with a given plan it takes less


def figures() -> list[Figure]:
    """The first call of clean interpreters, with what it spends on imports beside, and the median of later ones.

    Times are of the slower rank. The tables have 100 to 10,000 rows, on the meta device: their weights are drawn.
    """
    from recshard_lab.launcher import launch

    found = []
    for planning, name in ((False, _GIVEN), (True, _PLANNED)):
        with launch(RANKS, start_method="spawn") as ranks:
            runs = ranks.run(_measure, planning, ROUNDS)
        imports = max(run[0] for run in runs)
        first, *later = (max(times) for times in zip(*(run[1] for run in runs), strict=True))
        first_cpu, *later_cpu = (max(times) for times in zip(*(run[2] for run in runs), strict=True))
        found += [
            Figure(f"{name}, first call", first, "s", beside={"imports": imports, "CPU": first_cpu}),
            Figure(f"{name}, later calls", median(later), "s", beside={"CPU": median(later_cpu)}),
        ]
    return found


def tables() -> list[EmbeddingBagConfig]:
    """Of dim 64; row counts spread evenly over their magnitudes."""
    draw = random.Random(0)
    return [
        EmbeddingBagConfig(
            name=f"t{i}", num_embeddings=int(10 ** draw.uniform(2, 4)), embedding_dim=64, feature_names=[f"f{i}"]
        )
        for i in range(TABLES)
    ]


def _measure(planning: bool, rounds: int) -> tuple[float, list[float], list[float]]:
    """On a rank: seconds of the first call for importing a kernel, and of each call, by the clock and of the CPU."""
    from recshard_lab.distributed import DistributedModelParallel
    from recshard_lab.embedding import DataType, OptimizerSpec
    from recshard_lab.embedding.kernels import KernelSpec, ShardSpec, choose_kernel

    spec = KernelSpec([ShardSpec("t", 8, 4, DataType.FP32, 4)], [0], OptimizerSpec())
    imports, taken, worked = 0.0, [], []
    for _ in range(1 + rounds):
        model = EmbeddingBagCollection(tables=tables(), device="meta")
        plan = None if planning else given_plan(model)
        torch.distributed.barrier()
        begun, idle = time.perf_counter(), time.process_time()
        choose_kernel(spec)
        imports = imports or time.perf_counter() - begun
        DistributedModelParallel(model, plan=plan)
        taken.append(time.perf_counter() - begun)
        worked.append(time.process_time() - idle)
    return imports, taken, worked


def given_plan(model: EmbeddingBagCollection) -> ShardingPlan:
    """Four schemes in turn."""
    made = {
        table.name: (table_wise(rank=i // 4 % RANKS), row_wise(), column_wise(), data_parallel())[i % 4]
        for i, table in enumerate(model.embedding_bag_configs())
    }
    return ShardingPlan({"": construct_module_sharding_plan(model, made, world_size=RANKS)})
