"""Copies of models train apart from the original; stages of a collection refuse arguments of another type."""

from typing import Any

import pytest
import torch
from torch import nn

from recshard_lab import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        tables = [EmbeddingBagConfig(name=n, num_embeddings=8, embedding_dim=4, feature_names=[n]) for n in "ab"]
        self.bags, self.over = EmbeddingBagCollection(tables), nn.Linear(8, 1)

    def forward(self, features: KeyedJaggedTensor) -> Any:
        return self.over(self.bags(features).values())


def batches() -> list[KeyedJaggedTensor]:
    return [
        KeyedJaggedTensor(["a", "b"], torch.tensor([n, 1, 2 + n, 7 - n]), lengths=torch.tensor([1, 1, 2, 0]))
        for n in range(5)
    ]


def test_a_copy_of_a_model_trains_alone() -> None:
    dmp = DistributedModelParallel(Model())
    twin = dmp.copy("cpu")
    first = twin(batches()[0])
    first.square().sum().backward()
    assert torch.equal(dmp(batches()[0]), first), "the original is not stepped by the copy"
    assert not torch.equal(twin(batches()[0]), first)
    twin.fused_optimizer.param_groups[0]["lr"] = 0.0
    assert dmp.fused_optimizer.param_groups[0]["lr"] != 0.0


def test_a_stage_refuses_arguments_of_another_type() -> None:
    collection = DistributedModelParallel(Model()).module.bags
    with pytest.raises(ValueError, match=r"ctx is None, expected a context\. Fix: pass ctx=collection\.create_context"):
        collection.input_dist(None, batches()[0])
    with pytest.raises(ValueError, match=r"features is 'batch', expected a KeyedJaggedTensor\. Fix: "):
        collection.input_dist(collection.create_context(), "batch")
