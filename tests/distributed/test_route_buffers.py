"""Memory of the exchanges, by route, is what the cost model counts: forward alone, and with backward."""

from typing import Any

import pytest
import torch

from recshard_lab import DistributedModelParallel, EmbeddingBagCollection, EmbeddingBagConfig, ShardingPlan, Topology
from recshard_lab.planner import Workload, estimate
from recshard_lab.sharding import ROUTES, EmbeddingModuleShardingPlan, ParameterSharding
from tests.distributed.jobs import batch_of

TABLES = [
    EmbeddingBagConfig(name=f"t{n}", num_embeddings=64, embedding_dim=dim, feature_names=[f"f{n}"])
    for n, dim in enumerate((8, 16))
]
SAMPLES = 16


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
