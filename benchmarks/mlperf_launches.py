"""Kernels that one step of MLPerf's DLRM-DCNv2 dispatches: counted for the dense part and for the sharded tables.

Every operator that torch dispatches counts, but for those that only look at or make tensors (views, empty): on a GPU
each is at least one launch by the host. The tables' part is counted on two CPU ranks with tables of few rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import Figure
from recshard_lab import mlperf
from recshard_lab.embedding import EmbeddingBagConfig
from recshard_lab.planner import Workload
from recshard_lab.planner.sweep.mlperf_dense import dlrm_dcn_launches
from recshard_lab.planner.sweep.mlperf_example import SPARSE_LAUNCHES
from recshard_lab.sharding import ShardingPlan, Topology, scheme_named

MOST_ROWS = 2000


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


def sparse_launches() -> dict[str, int]:
    """Launches of the tables on rank 0 of two, by part of a step."""
    from recshard_lab.launcher import launch

    pooling = dict(zip(mlperf.FEATURES, map(float, mlperf.MULTI_HOT_SIZES), strict=True))
    load = Workload(16, pooling, optimizer=mlperf.OPTIMIZER)
    tables, top, plan = [], Topology(2), {}
    for number, (feature, rows) in enumerate(zip(mlperf.FEATURES, mlperf.ROWS, strict=True)):
        few = min(rows, MOST_ROWS)
        table = EmbeddingBagConfig(
            name=f"t_{feature}", num_embeddings=few, embedding_dim=mlperf.EMBEDDING_DIM, feature_names=[feature]
        )
        scheme = "row_wise" if rows > 10**6 else "table_wise" if rows >= 100 else "data_parallel"
        ranks = [number % 2] if scheme == "table_wise" else None
        tables.append(table)
        plan[table.name] = scheme_named(scheme).default(table, top, ranks)
    with launch(2) as launched:
        found = launched.run(launches_on_rank, ShardingPlan({"": plan}).to_json(), tables, load)  # type: ignore[dict-item]
    return dict(found[0])


def launches_on_rank(plan_json: str, tables: Sequence[EmbeddingBagConfig], load: Workload) -> Mapping[str, int]:
    """What one rank counts. Collective."""
    import numpy as np
    import torch

    from benchmarks.apparatus.operators import OperatorCount
    from recshard_lab.distributed import DistributedModelParallel, EmbeddingBagCollectionSharder
    from recshard_lab.embedding import EmbeddingBagCollection, EmbOptimType
    from recshard_lab.lab.measure import random_batch

    fused = {"optimizer": EmbOptimType(load.optimizer), "learning_rate": mlperf.LEARNING_RATE}
    model = DistributedModelParallel(
        EmbeddingBagCollection(list(tables), device=torch.device("meta")),
        plan=ShardingPlan.from_json(plan_json),
        sharders=[EmbeddingBagCollectionSharder(fused_params=fused)],
    )
    collection: Any = next(iter(model.collections.values()))
    batch = random_batch(tables, load, np.random.default_rng(0))
    found: dict[str, OperatorCount] = {}
    for _ in range(2):
        found = {name: OperatorCount() for name in ("input_dist", "forward", "backward")}
        with found["input_dist"]:
            lookup_input = collection.input_dist(batch).wait()
        with found["forward"]:
            rows = collection.compute_and_output_dist(lookup_input).values()
        gradient = torch.ones_like(rows)
        with found["backward"]:
            rows.backward(gradient)
    return {name: count.total() for name, count in found.items()}


def figures() -> list[Figure]:
    """Counted, beside what the worked example (`recshard whatif --example mlperf-dlrm-dcnv2`) takes them for."""
    dense, stated = dense_launches(), dlrm_dcn_launches()
    rows = [
        Figure(f"dense part, {part}", count, "launches", beside={"by formula": stated[part]})
        for part, count in dense.items()
    ]
    rows += [
        Figure(f"tables, {part}", count, "launches", beside={"as stated": SPARSE_LAUNCHES[part]})
        for part, count in sparse_launches().items()
    ]
    return rows
