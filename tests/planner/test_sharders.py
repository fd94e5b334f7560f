"""The planner keeps to what a sharder allows."""

import pytest

from recshard_lab import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingShardingPlanner,
    ParameterConstraints,
    PlanError,
    Topology,
)
from recshard_lab.distributed import EmbeddingBagCollectionSharder
from recshard_lab.sharding import ShardingType

TABLES = [
    EmbeddingBagConfig(name=name, num_embeddings=64, embedding_dim=8, feature_names=[name]) for name in ("one", "two")
]


class RowsOnly(EmbeddingBagCollectionSharder):
    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [ShardingType.ROW_WISE.value]


class DenseOnly(EmbeddingBagCollectionSharder):
    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return ["dense"]


def planner(**constraints: ParameterConstraints) -> EmbeddingShardingPlanner:
    return EmbeddingShardingPlanner(Topology(2), constraints=constraints)


def test_a_sharder_narrows_the_schemes_and_kernels_of_its_tables() -> None:
    module = EmbeddingBagCollection(TABLES, device="meta")
    assert {s.sharding_type for s in planner().plan(module, [RowsOnly()]).tables().values()} == {"row_wise"}
    assert {s.compute_kernel for s in planner().plan(module, [DenseOnly()]).tables().values()} == {"dense"}
    with pytest.raises(PlanError, match=r"'two' is constrained .*'column_wise'.* RowsOnly allows \['row_wise'\]"):
        planner(two=ParameterConstraints(sharding_types=["column_wise"])).plan(module, [RowsOnly()])


def test_a_sharder_that_overrides_nothing_changes_no_plan() -> None:
    module = EmbeddingBagCollection(TABLES, device="meta")
    assert planner().plan(module, [EmbeddingBagCollectionSharder()]) == planner().plan(module)
