"""Small tables and their plan and weights, for the cases of sharded models."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

CPU = torch.device("cpu")


def configs(names: str = "abcd", rows: int = 8, dim: int = 8, **fields: Any) -> list[EmbeddingBagConfig]:
    """A table for each letter, with one feature: of table "a" it is "f_a"."""
    return [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[f"f_{name}"], **fields)
        for name in names
    ]


def batch(rank: int = 0, weighted: bool = False) -> KeyedJaggedTensor:
    """Two samples of the features of tables "a" to "d"."""
    return KeyedJaggedTensor(
        keys=[f"f_{name}" for name in "abcd"],
        values=torch.tensor([0, 3, 1, 2, 7, 7, 4, 5] if rank == 0 else [6, 3, 0, 2, 1, 5, 4, 5]),
        weights=torch.arange(8) / 4 if weighted else None,
        lengths=torch.tensor([1, 1, 2, 0, 1, 1, 0, 2]),
    )


def plan_of(bags: Any, generators: dict[str, Any], world_size: int = 2) -> ShardingPlan:
    """The plan of a model whose only collection is its attribute `bags`."""
    sharder = EmbeddingBagCollectionSharder()
    return ShardingPlan(
        {"bags": construct_module_sharding_plan(bags, generators, sharder, world_size, world_size, "cpu")}
    )


def shards(module: nn.Module) -> Iterator[tuple[int, int, torch.Tensor]]:
    """First row, first column and weights of each shard of a table on this rank."""
    for name, value in module.state_dict().items():
        if hasattr(value, "local_shards"):
            for shard in value.local_shards():
                yield (*shard.metadata.shard_offsets, shard.tensor)
        elif "embedding" in name:
            yield 0, 0, value


def fill(module: nn.Module, per_row: float = 0.1) -> None:
    """Gives tables the same weights under any plan: row r has r times `per_row` in each column."""
    with torch.no_grad():
        for row, _, weight in shards(module):
            weight.copy_((per_row * torch.arange(row, row + len(weight))).unsqueeze(1).expand_as(weight))


def row_sums(module: nn.Module, rank: int) -> dict[str, Any]:
    """The sum of each row; None on other ranks than 0."""
    found = {}
    for name, value in sorted(module.state_dict().items()):
        if hasattr(value, "local_shards"):
            full = torch.zeros(value.size()) if rank == 0 else None
            value.gather(0, full)
            value = full
        found[name] = None if value is None or rank else value.sum(-1)
    return found
