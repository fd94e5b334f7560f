"""Operators that one step of MLPerf's DLRM-DCNv2 launches, counted, beside those that the cost model charges.

An operator launches at least one kernel on a GPU. Operators that only view or allocate tensors are left out. The dense
part is counted on the real modules, the tables' part on a device that records operators, under the plan for 128 H100s.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

from benchmarks import Figure
from recshard_lab import mlperf
from recshard_lab.embedding import EmbeddingBagConfig
from recshard_lab.planner.model.cost import PHASES
from recshard_lab.planner.sweep.mlperf_dense import dlrm_dcn_launches
from recshard_lab.planner.sweep.mlperf_example import PUBLISHED_AT, mlperf_dlrm_dcnv2_tables, mlperf_step
from recshard_lab.sharding import ShardingPlan

COUNT_S = 600.0
ROWS_BETWEEN = 4


def dense_launches(batch: int = 4) -> dict[str, int]:
    """Launches of the dense part: forward with the loss, backward, a fused-foreach Adagrad."""
    import torch

    from benchmarks.apparatus.operators import OperatorCount
    from recshard_lab.models.crossnet import LowRankCrossNet
    from recshard_lab.models.dlrm import DenseArch, OverArch

    width = (len(mlperf.ROWS) + 1) * mlperf.EMBEDDING_DIM
    bottom = DenseArch(mlperf.DENSE_FEATURES, mlperf.DENSE_ARCH_LAYERS)
    cross, top = (
        LowRankCrossNet(width, mlperf.DCN_LAYERS, mlperf.DCN_LOW_RANK),
        OverArch(width, mlperf.OVER_ARCH_LAYERS),
    )
    weights = [p for part in (bottom, cross, top) for p in part.parameters()]
    optimizer = torch.optim.Adagrad(weights, lr=mlperf.LEARNING_RATE, foreach=True)
    numbers, clicked = torch.rand(batch, mlperf.DENSE_FEATURES), torch.ones(batch)
    pooled = torch.rand(batch, width - mlperf.EMBEDDING_DIM, requires_grad=True)
    found: dict[str, OperatorCount] = {}
    for _ in range(2):  # the second time, state is there
        found = {name: OperatorCount() for name in ("forward", "backward", "optimizer")}
        optimizer.zero_grad()
        with found["forward"]:
            logits = top(cross(torch.cat([bottom(numbers), pooled], dim=1)))
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits.squeeze(-1), clicked)
        with found["backward"]:
            loss.backward()
        with found["optimizer"]:
            optimizer.step()
    return {name: count.total() for name, count in found.items()}


def table_launches() -> dict[str, int]:
    """Operators of rank 0 for the tables in each phase of a step, under the plan for 128 H100s.

    Counted on the ledger device in a separate process, with a few rows between any two cuts of a table.

    Raises:
        RuntimeError: the step failed on the device; the message carries its traceback.
    """
    command = [sys.executable, "-m", "benchmarks.mlperf_launches"]
    quiet = os.environ | {"PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=quiet, capture_output=True, text=True, timeout=COUNT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"the step of MLPerf's plan could not be counted: {done.stderr.strip()}")
    return dict(zip(PHASES, json.loads(done.stdout), strict=True))


def charged_launches() -> dict[str, float]:
    """Operators that the cost model charges for that plan in each phase, those of the dense part included."""
    others = dict.fromkeys(("host_ms", "sync_ms", "kernel_ms", "straggler_sigma"), 0.0)
    one = 1 / mlperf_step(PUBLISHED_AT).topology.launch_ms
    host = mlperf_step(PUBLISHED_AT, factors={"launch_ms": one, **others}).parts.host
    return dict(zip(PHASES, host.tolist(), strict=True))


def small(tables: list[EmbeddingBagConfig], plan: ShardingPlan) -> tuple[list[EmbeddingBagConfig], ShardingPlan]:
    """The tables and their plan with `ROWS_BETWEEN` rows from each cut to the next."""
    found, shardings = [], {}
    for table, sharding in plan.pairs(tables):
        full = sharding.resolved(table, PUBLISHED_AT, 8)
        cuts = sorted({row for shard in full.shards for row in shard.rows})
        at = {row: min(row, place * ROWS_BETWEEN) for place, row in enumerate(cuts)}
        shards = tuple(replace(shard, rows=(at[shard.rows[0]], at[shard.rows[1]])) for shard in full.shards)
        few = EmbeddingBagConfig(
            name=table.name,
            num_embeddings=at[cuts[-1]],
            embedding_dim=table.embedding_dim,
            feature_names=list(table.feature_names),
        )
        found.append(few)
        shardings[table.name] = replace(full, shards=shards)
    return found, ShardingPlan({"": shardings})  # type: ignore[dict-item]


def count_here() -> list[int]:
    """Operators by phase of the second of two steps, in this process, which becomes rank 0 of 128."""
    import numpy as np
    import torch

    from benchmarks import launches, ledger
    from benchmarks.ledger.mirror import mirrored_world
    from recshard_lab.distributed import DistributedModelParallel, EmbeddingBagCollectionSharder
    from recshard_lab.embedding import EmbeddingBagCollection, EmbOptimType
    from recshard_lab.lab.compare.measure import random_batch

    ledger.register()
    torch.set_num_threads(1)
    step = mlperf_step(PUBLISHED_AT)
    tables, plan = small(mlperf_dlrm_dcnv2_tables(), step.plan)
    load = replace(step.workload, batch_size=8)
    fused = {"optimizer": EmbOptimType(load.optimizer), "learning_rate": mlperf.LEARNING_RATE}
    with mirrored_world(PUBLISHED_AT, 8):
        model = DistributedModelParallel(
            EmbeddingBagCollection(tables, device=torch.device("meta")),
            device=torch.device(ledger.DEVICE),
            plan=plan,
            sharders=[EmbeddingBagCollectionSharder(fused)],
        )
        batch = random_batch(tables, load, np.random.default_rng(0)).to(torch.device(ledger.DEVICE))
        gradient = torch.ones(load.batch_size, len(tables) * mlperf.EMBEDDING_DIM, device=ledger.DEVICE)
        for _ in range(2):
            with ledger.record() as forward:
                rows = model(batch).values()
            with ledger.record() as backward:
                rows.backward(gradient)
    return [len(names) for names in launches.by_phase(forward.events, backward.events)]


def figures() -> list[Figure]:
    """Counted operators beside those that `recshard plan sweep --example mlperf-dlrm-dcnv2` charges."""
    stated, counted, charged = dlrm_dcn_launches(), table_launches(), charged_launches()
    dense = [
        Figure(f"dense part, {part}", count, "launches", beside={"by formula": stated[part]})
        for part, count in dense_launches().items()
    ]
    tables = [
        Figure(f"tables, {phase}", count, "launches", beside={"charged": charged[phase]})
        for phase, count in counted.items()
        if phase != "dense"
    ]
    return [*dense, *tables]


if __name__ == "__main__":
    print(json.dumps(count_here()))
