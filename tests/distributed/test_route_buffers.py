"""Memory of the exchanges, by route, is what the cost model counts: forward alone, and with backward."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import recshard_lab
from recshard_lab import DistributedModelParallel, EmbeddingBagCollection, EmbeddingBagConfig, ShardingPlan, Topology
from recshard_lab.planner import Workload, estimate
from recshard_lab.sharding import ROUTES, EmbeddingModuleShardingPlan, ParameterSharding
from tests.distributed.jobs import batch_of

TABLES = [
    EmbeddingBagConfig(name=f"t{n}", num_embeddings=64, embedding_dim=dim, feature_names=[f"f{n}"])
    for n, dim in enumerate((8, 16))
]
SAMPLES = 16


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    with recshard_lab.launch(4, nodes=2) as launched:
        yield launched


def held(plan: str) -> tuple[int, int]:
    """On a rank: bytes of output buffers after a forward without gradients, and after a whole step."""
    collection = EmbeddingBagCollection(tables=TABLES, device=torch.device("meta"))
    dmp = DistributedModelParallel(collection, plan=ShardingPlan.from_json(plan))
    batch = batch_of({f"f{n}": [[b, 63 - b] for b in range(SAMPLES)] for n in range(len(TABLES))})
    with torch.no_grad():
        dmp(batch).values()
    forward = dmp.memory_bytes()["output_buffers"]
    dmp(batch).values().sum().backward()
    return forward, dmp.memory_bytes()["output_buffers"]


@pytest.mark.gate
@pytest.mark.parametrize("scheme", ["row_wise", "table_row_wise"])
@pytest.mark.parametrize("route", ROUTES)
def test_output_buffers_are_those_of_the_cost_model(nodes: Any, route: str, scheme: str) -> None:
    entries = {t.name: ParameterSharding(scheme, route=route) for t in TABLES}
    plan = ShardingPlan({"": EmbeddingModuleShardingPlan(entries)}).resolved(TABLES, 4, 2)
    top = Topology(4, local_world_size=2)
    predicted = estimate(plan, TABLES, top, Workload(SAMPLES, 2.0))
    expected = predicted.memory_bytes[:, predicted.memory_categories.index("output_buffers")].tolist()
    for rank, (forward, step) in enumerate(nodes.run(held, plan.to_json())):
        assert step == pytest.approx(expected[rank], rel=1e-6)
        assert forward == pytest.approx(expected[rank], rel=1e-6)


def held_with_another_batch_under_way(plan: str) -> tuple[int, int]:
    """On a rank: bytes of output buffers of a batch alone, and with a smaller one that is sent before it arrives."""
    collection = EmbeddingBagCollection(tables=TABLES, device=torch.device("meta"))
    dmp = DistributedModelParallel(collection, plan=ShardingPlan.from_json(plan))
    large, small = (
        batch_of({f"f{n}": [[b, 63 - b] for b in range(samples)] for n in range(len(TABLES))})
        for samples in (SAMPLES, 2)
    )
    with torch.no_grad():
        dmp(large).values()
        alone = dmp.memory_bytes()["output_buffers"]
        first, second = dmp(large), dmp(small)
        first.values()
        beside = dmp.memory_bytes()["output_buffers"]
        second.values()
    return alone, beside


@pytest.mark.parametrize("route", ROUTES)
def test_output_buffers_are_those_of_the_batch_that_arrives(nodes: Any, route: str) -> None:
    entries = {t.name: ParameterSharding("row_wise", route=route) for t in TABLES}
    plan = ShardingPlan({"": EmbeddingModuleShardingPlan(entries)}).resolved(TABLES, 4, 2)
    for alone, beside in nodes.run(held_with_another_batch_under_way, plan.to_json()):
        assert beside == alone > 0
