"""Fused collections under DistributedModelParallel: sharded with the optimizer they bring, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from recshard_lab import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from recshard_lab.distributed import FusedEmbeddingBagCollectionSharder
from recshard_lab.embedding import fuse_embedding_optimizer
from recshard_lab.optim import RowWiseAdagrad
from recshard_lab.sharding import ShardingPlan, construct_module_sharding_plan, row_wise
from tests.distributed.jobs import attempted

LR = {"lr": 0.3, "eps": 1e-3}


class Model(nn.Module):
    """Sum of a pooled and a sequence lookup."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags = EmbeddingBagCollection([EmbeddingBagConfig(12, 4, "one", feature_names=["f"])])
        self.rows = EmbeddingCollection([EmbeddingConfig(9, 4, "two", feature_names=["g"])])

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.bags(features).values().square().sum() + self.rows(features)["g"].values().square().sum()


def batch(step: int, rank: int) -> KeyedJaggedTensor:
    torch.manual_seed(10 * step + rank)
    return KeyedJaggedTensor(["f", "g"], torch.randint(0, 9, (8,)), lengths=torch.tensor([2, 2, 1, 3]))


def trained(rank: int) -> dict[str, Any]:
    """Four steps on two ranks beside the plain model with a torch optimizer on the mean of both batches' losses."""
    truth = Model()
    dense = RowWiseAdagrad(truth.parameters(), **LR)
    model = DistributedModelParallel(fuse_embedding_optimizer(Model(), RowWiseAdagrad, LR, torch.device("cpu")))
    kinds = [type(module).__name__ for module in (model.module.bags, model.module.rows)]
    names = sorted(model.state_dict()) == sorted(truth.state_dict())
    for step in range(4):
        model(batch(step, rank)).backward()
        ((truth(batch(step, 0)) + truth(batch(step, 1))) / 2).backward()
        dense.step()
        dense.zero_grad()
    error = (model(batch(9, rank)) - truth(batch(9, rank))).abs() / truth(batch(9, rank)).abs()
    return {"kinds": kinds, "names": names, "error": float(error.detach())}


def left_whole() -> str:
    fused = fuse_embedding_optimizer(Model(), torch.optim.SGD, {"lr": 0.1})
    plan = ShardingPlan({"bags": construct_module_sharding_plan(Model().bags, {"one": row_wise()}, world_size=2)})
    return attempted(lambda: DistributedModelParallel(fused, plan=plan))


@pytest.mark.gate
def test_fused_collections_are_sharded_with_the_optimizer_they_bring(two: Any) -> None:
    for result in two.run(lambda: trained(torch.distributed.get_rank())):
        assert result["kinds"] == ["ShardedEmbeddingBagCollection", "ShardedEmbeddingCollection"]
        assert result["names"]
        assert result["error"] < 1e-5


def test_a_fused_collection_that_the_plan_leaves_whole_is_refused(two: Any) -> None:
    for said in two.run(left_whole):
        assert "FusedEmbeddingCollection 'rows' is not in the plan" in said


def test_a_fused_collection_that_has_learned_is_not_sharded_without_its_state() -> None:
    fused = fuse_embedding_optimizer(Model(), RowWiseAdagrad, LR)
    fused(batch(0, 0)).backward()
    empty = KeyedJaggedTensor(["f"], torch.empty(0, dtype=torch.int64), lengths=torch.zeros(2, dtype=torch.int64))
    assert not fused.bags(empty).values().any()
    assert "table 'one' was trained" in attempted(lambda: DistributedModelParallel(fused))


def test_a_second_optimizer_and_a_dense_kernel_are_refused() -> None:
    assert "has an optimizer" in attempted(lambda: FusedEmbeddingBagCollectionSharder({"learning_rate": 0.1}))
    fused = fuse_embedding_optimizer(Model(), RowWiseAdagrad, LR)
    plan = construct_module_sharding_plan(Model().bags, {"one": row_wise(compute_kernel="dense")}, world_size=1)
    plans = ShardingPlan({"bags": plan})
    assert "runs in backward. Fix: use 'fused'" in attempted(lambda: DistributedModelParallel(fused, plan=plans))
