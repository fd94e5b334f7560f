"""Every scheme runs on one rank, and gives there what the unsharded module gives."""

import pytest
import torch

import recshard_lab as rl
from recshard_lab.distributed import EmbeddingBagCollectionSharder
from recshard_lab.embedding import EmbeddingBagCollection
from recshard_lab.sharding import ParameterConstraints, ShardingPlan, Topology, scheme_names
from recshard_lab.sparse import KeyedJaggedTensor

TABLE = rl.EmbeddingBagConfig(name="movies", num_embeddings=100, embedding_dim=16, feature_names=["seen"])


def collection() -> EmbeddingBagCollection:
    torch.manual_seed(0)
    return EmbeddingBagCollection(tables=[TABLE])


@pytest.mark.parametrize("scheme", scheme_names())
def test_a_scheme_requested_by_name_trains_on_one_rank_as_the_unsharded_module_does(scheme: str) -> None:
    wish = {"movies": ParameterConstraints(sharding_types=[scheme])}
    plain = collection()
    plan = rl.EmbeddingShardingPlanner(Topology(1), constraints=wish).plan(plain)
    (sharding,) = plan.tables().values()
    assert sharding.sharding_type == scheme
    sharder = EmbeddingBagCollectionSharder(fused_params={"optimizer": "exact_sgd", "learning_rate": 0.5})
    model = rl.DistributedModelParallel(collection(), plan=ShardingPlan(plan.plan), sharders=[sharder])
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    ids = KeyedJaggedTensor(["seen"], torch.tensor([1, 2, 99, 1]), lengths=torch.tensor([2, 0, 2]))
    for _ in range(2):
        expected, found = plain(ids).values(), model(ids).values()
        torch.testing.assert_close(found, expected)
        optimizer.zero_grad()
        expected.square().sum().backward()
        optimizer.step()
        found.square().sum().backward()


@pytest.mark.parametrize("scheme", ["column_wise", "table_column_wise"])
def test_columns_stay_whole_where_a_constraint_allows_a_single_rank(scheme: str) -> None:
    wish = {"movies": ParameterConstraints(sharding_types=[scheme], ranks=[3])}
    top = Topology(4, local_world_size=2)
    sharding = rl.EmbeddingShardingPlanner(top, constraints=wish).plan_tables([TABLE]).tables()["movies"]
    assert [(s.rank, s.rows, s.cols) for s in sharding.shards] == [(3, (0, 100), (0, 16))]
