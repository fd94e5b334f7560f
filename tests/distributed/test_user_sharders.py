"""Sharders of the user: `DistributedModelParallel` calls their `shard` and uses the module that it returns."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from recshard_lab import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingShardingPlanner,
    KeyedJaggedTensor,
    ParameterSharding,
    ShardingPlan,
    Topology,
    save_checkpoint,
    table_wise,
)
from recshard_lab.distributed import EmbeddingBagCollectionSharder, ModuleSharder
from recshard_lab.models import FeatureProcessedEmbeddingBagCollection, PositionWeightedModuleCollection
from recshard_lab.sharding import construct_module_sharding_plan

CONFIG = EmbeddingBagConfig(name="t", num_embeddings=8, embedding_dim=4, feature_names=["f"])
BATCH = KeyedJaggedTensor(["f"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(6, 4)), nn.Parameter(torch.zeros(4))


class ShardedRows(nn.Module):
    def __init__(self, module: Rows) -> None:
        super().__init__()
        self.weight, self.bias = module.weight, module.bias

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        yield f"{prefix}.weight"


class RowsSharder(ModuleSharder[Rows]):
    module_type = Rows

    def shard(self, module: Rows, params: Any, env: Any = None, device: Any = None, module_fqn: Any = None) -> Any:
        assert module_fqn == "rows"
        return ShardedRows(module)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return ["fused"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.bags = Rows(), EmbeddingBagCollection([CONFIG])


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


class WrappingSharder(EmbeddingBagCollectionSharder):
    def shard(self, module: Any, params: Any, env: Any = None, device: Any = None, module_fqn: Any = None) -> Any:
        return Wrapper(super().shard(module, params, env, device, module_fqn))


def plan_of(model: Model, **more: Any) -> ShardingPlan:
    bags = construct_module_sharding_plan(model.bags, {"t": table_wise(0)}, world_size=1)
    return ShardingPlan({"bags": bags, **more})


def test_parameters_that_the_returned_module_names_are_not_dense(tmp_path: Path) -> None:
    model = Model()
    plan = plan_of(model, rows={"weight": ParameterSharding("row_wise", ranks=[0])})
    dmp = DistributedModelParallel(model, plan=plan, sharders=[RowsSharder(), EmbeddingBagCollectionSharder()])
    assert isinstance(model.rows, ShardedRows)
    assert dmp.sharded_parameter_names() == {"rows.weight", "bags.embedding_bags.t.weight"}
    assert dmp.plan.plan["rows"] == plan.plan["rows"]
    with pytest.raises(ValueError, match=r"full_state_dict cannot gather module 'rows', .* Fix:"):
        dmp.full_state_dict()
    with pytest.raises(ValueError, match=r"a checkpoint cannot gather module 'rows', .* Fix:"):
        save_checkpoint(tmp_path, dmp)
    dmp.reshard(dmp_plan := ShardingPlan({"bags": dmp.plan.plan["bags"]}))
    assert set(dmp_plan.plan) < set(dmp.plan.plan)


def test_a_collection_inside_the_returned_module_is_trained_and_saved() -> None:
    model = Model()
    whole = model.bags.embedding_bags["t"].weight.detach().clone()
    fused = {"optimizer": "sgd", "learning_rate": 1.0}
    dmp = DistributedModelParallel(model, plan=plan_of(model), sharders=[WrappingSharder(fused)])
    assert torch.equal(dmp.state_dict()["bags.inner.embedding_bags.t.weight"], whole)
    assert list(dmp.fused_optimizer.params) == ["bags.inner.embedding_bags.t.weight"]
    dmp.module.bags.inner(BATCH).values().sum().backward()
    assert torch.equal(dmp.full_state_dict()["bags.inner.embedding_bags.t.weight"][1:3], whole[1:3] - 1)


def test_the_planner_plans_what_a_sharder_names() -> None:
    sharders = [RowsSharder(), EmbeddingBagCollectionSharder()]
    plan = EmbeddingShardingPlanner(Topology(2)).plan(Model(), sharders)
    assert {path: list(entries) for path, entries in plan.plan.items()} == {"rows": ["weight"], "bags": ["t"]}
    assert plan.plan["rows"]["weight"].compute_kernel == "fused"


class Renamed(EmbeddingBagCollection):
    pass


class Doubled(EmbeddingBagCollection):
    def forward(self, features: Any) -> Any:
        return super().forward(features).values() * 2


def test_a_subclass_is_sharded_as_its_base_unless_it_looks_up_in_another_way() -> None:
    dmp = DistributedModelParallel(nn.ModuleDict({"bags": Renamed([CONFIG])}))
    assert list(dmp.collections) == ["bags"]
    with pytest.raises(ValueError, match=r"Doubled 'bags' has a forward that .* Fix: pass a sharder of Doubled"):
        DistributedModelParallel(nn.ModuleDict({"bags": Doubled([CONFIG])}))


def test_a_collection_after_feature_processors_is_planned_and_sharded() -> None:
    bags = EmbeddingBagCollection([CONFIG], is_weighted=True)
    model = FeatureProcessedEmbeddingBagCollection(bags, PositionWeightedModuleCollection({"f": 2}))
    assert list(DistributedModelParallel(model).collections) == ["_embedding_bag_collection"]
