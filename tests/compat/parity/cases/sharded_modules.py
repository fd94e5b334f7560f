"""Stages of sharded modules, called by hand: contexts, input exchange, lookup, output exchange."""

from typing import Any

import torch
import torch.distributed as dist
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
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.compat.parity.case import case
from tests.compat.parity.sharded_tables import CPU, batch, configs, fill, row_sums

BAG, SEQ = "torchrec.distributed.embeddingbag", "torchrec.distributed.embedding"
SHARDED_BAG, SHARDED_SEQ = f"{BAG}.ShardedEmbeddingBagCollection", f"{SEQ}.ShardedEmbeddingCollection"


def bags() -> EmbeddingBagCollection:
    return EmbeddingBagCollection(tables=configs())


GENERATORS = {"a": row_wise(), "b": table_wise(rank=1), "c": data_parallel(), "d": column_wise(ranks=[0, 1])}


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
    return {"outputs": outputs, "rows": row_sums(module, rank)}


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
    module = sharded(
        bags(),
        OnlyRows(),
        apply_to_all(bags(), row_wise()),
    )
    return {"output": module(batch(rank)).values(), "type": isinstance(module, ShardedEmbeddingBagCollection)}
