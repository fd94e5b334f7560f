"""Fused collections without sharding: their optimizer, its learning rate and states, the place of their tables."""

from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
)
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.compat.parity.case import case

FUSED = "torchrec.modules.fused_embedding_modules.FusedEmbeddingBagCollection"
CPU = torch.device("cpu")


def configs() -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=4, feature_names=[f"f_{name}"])
        for name, rows in (("a", 4), ("b", 3))
    ]


def fused(optimizer: Any = torch.optim.Adagrad, **options: Any) -> FusedEmbeddingBagCollection:
    module = FusedEmbeddingBagCollection(configs(), optimizer, {"lr": 0.5}, **options)
    with torch.no_grad():
        for value in module.state_dict().values():
            value.copy_(torch.arange(float(value.numel())).view(value.shape) / 8)
    return module


def batch() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f_a", "f_b"], torch.tensor([0, 1, 2, 1]), lengths=torch.tensor([1, 1, 1, 1]))


@case(FUSED)
def states_follow_backward() -> Any:
    module = fused()
    module(batch()).values().sum().backward()
    return [module.fused_optimizer().state_dict(), module.state_dict()]


@case(FUSED)
def states_are_loaded() -> Any:
    one, other = fused(), fused()
    one(batch()).values().sum().backward()
    other.fused_optimizer().load_state_dict(one.fused_optimizer().state_dict())
    other.load_state_dict(one.state_dict())
    for module in (one, other):
        module(batch()).values().sum().backward()
    return [one.state_dict(), other.state_dict()]


@case(FUSED, "torchrec.optim.keyed.CombinedOptimizer")
def fused_and_dense_together() -> Any:
    module, over = fused(), nn.Linear(8, 1, bias=False)
    with torch.no_grad():
        over.weight.fill_(0.5)
    dense = KeyedOptimizerWrapper(dict(over.named_parameters()), lambda own: torch.optim.SGD(own, lr=0.1))
    both = CombinedOptimizer([("tables", module.fused_optimizer()), ("over", dense)])
    both.zero_grad()
    over(module(batch()).values()).sum().backward()
    both.step()
    return {"params": sorted(both.params), "weight": over.weight, **module.state_dict()}
