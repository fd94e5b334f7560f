"""Stages of sharded modules, called by hand: contexts, input exchange, lookup, output exchange."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.sharding_plan import (
    apply_to_all,
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.compat.parity.case import case

CPU = torch.device("cpu")
BAG, SEQ = "torchrec.distributed.embeddingbag", "torchrec.distributed.embedding"
SHARDED_BAG, SHARDED_SEQ = f"{BAG}.ShardedEmbeddingBagCollection", f"{SEQ}.ShardedEmbeddingCollection"


def bags(names: str = "abcd", **options: Any) -> EmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=8, embedding_dim=8, feature_names=[f"f_{name}"]) for name in names
    ]
    return EmbeddingBagCollection(tables=tables, **options)


def sequences(names: str = "abcd", **options: Any) -> EmbeddingCollection:
    tables = [
        EmbeddingConfig(name=name, num_embeddings=8, embedding_dim=8, feature_names=[f"f_{name}"]) for name in names
    ]
    return EmbeddingCollection(tables=tables, **options)


def batch(rank: int = 0, weighted: bool = False) -> KeyedJaggedTensor:
    """Two samples of each feature."""
    return KeyedJaggedTensor(
        keys=[f"f_{name}" for name in "abcd"],
        values=torch.tensor([0, 3, 1, 2, 7, 7, 4, 5] if rank == 0 else [6, 3, 0, 2, 1, 5, 4, 5]),
        weights=torch.arange(8) / 4 if weighted else None,
        lengths=torch.tensor([1, 1, 2, 0, 1, 1, 0, 2]),
    )


GENERATORS = {"a": row_wise(), "b": table_wise(rank=1), "c": data_parallel(), "d": column_wise(ranks=[0, 1])}


def fill(module: nn.Module) -> None:
    """Row r of each table has r / 10 in each column."""
    with torch.no_grad():
        for value in module.state_dict().values():
            if hasattr(value, "local_shards"):
                for own in value.local_shards():
                    row, rows = own.metadata.shard_offsets[0], own.metadata.shard_sizes[0]
                    own.tensor.copy_((torch.arange(row, row + rows) / 10).unsqueeze(1).expand_as(own.tensor))
            else:
                value.copy_((torch.arange(value.shape[0]) / 10).unsqueeze(1).expand_as(value))


def rows_of(module: nn.Module, rank: int) -> Any:
    """The sum of each row; None on other ranks than 0."""
    found = {}
    for name, value in sorted(module.state_dict().items()):
        if hasattr(value, "local_shards"):
            full = torch.zeros(value.size()) if rank == 0 else None
            value.gather(0, full)
            value = full
        found[name] = None if value is None or rank else value.sum(1)
    return found


def sharded(module: Any, sharder: Any, generators: Any = None, optimizer: Any = None, **options: Any) -> Any:
    """The module, sharded over all ranks, with its rows filled."""
    optimizer = torch.optim.SGD if optimizer is None else optimizer
    apply_optimizer_in_backward(optimizer, module.parameters(), {"lr": 0.1, **options})
    world = dist.get_world_size()
    plan = construct_module_sharding_plan(
        module, generators or GENERATORS, sharder, local_size=world, world_size=world, device_type="cpu"
    )
    own = sharder.shard(module, plan, ShardingEnv.from_process_group(dist.group.WORLD), CPU)
    fill(own)
    return own


def by_stages(module: Any, features: KeyedJaggedTensor) -> Any:
    """A forward, stage by stage."""
    ctx = module.create_context()
    ids = module.input_dist(ctx, features).wait().wait()
    return module.output_dist(ctx, module.compute(ctx, ids))


@case(SHARDED_BAG, ranks=2)
def a_loop_over_the_stages(rank: int) -> Any:
    module = sharded(bags(), EmbeddingBagCollectionSharder())
    outputs = []
    for _ in range(3):
        output = by_stages(module, batch(rank))
        output.values().sum().backward()
        outputs.append(output.values())
    return {"outputs": outputs, "rows": rows_of(module, rank)}


@case(SHARDED_BAG, ranks=2)
def stages_give_what_forward_gives(rank: int) -> Any:
    module = sharded(bags(), EmbeddingBagCollectionSharder())
    with torch.no_grad():
        return [by_stages(module, batch(rank)).values(), module(batch(rank)).values()]


class OnlyRows(EmbeddingBagCollectionSharder):
    """A user's sharder: it restricts the planner."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return ["row_wise"]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return ["fused"]


@case(f"{BAG}.EmbeddingBagCollectionSharder", ranks=2)
def a_sharder_of_the_user(rank: int) -> Any:
    module = sharded(bags(), OnlyRows(), apply_to_all(bags(), row_wise()))
    return {"output": module(batch(rank)).values(), "type": isinstance(module, ShardedEmbeddingBagCollection)}
