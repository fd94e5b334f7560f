"""One collection over launched ranks, forward alone: the executor of training, without optimizers and their states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from recshard_lab.comm import ShardingEnv, agreed
from recshard_lab.distributed import ShardedCollection
from recshard_lab.distributed.sharded_collections import create_route_groups
from recshard_lab.distributed.sharders import (
    CollectionSharder,
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    first_weights,
)
from recshard_lab.distributed.state.moves import Move, move
from recshard_lab.embedding import EmbOptimType, OptimizerSpec
from recshard_lab.embedding.quantized.collections import QuantCollection
from recshard_lab.embedding.quantized.formats import pack
from recshard_lab.embedding.quantized.kernels import PackedKernel
from recshard_lab.serving.inference.packed import (
    Chunks,
    Tables,
    fill_shards,
    from_rank_0,
    packed_rows,
    packed_table,
)
from recshard_lab.serving.inference.sources import Source, live_source
from recshard_lab.sharding import EmbeddingComputeKernel, ParameterSharding, ShardingPlan

_NO_STATE = OptimizerSpec(EmbOptimType.EXACT_SGD, 0.0)


class _PooledSharder(EmbeddingBagCollectionSharder):
    def optimizers(self, module: nn.Module, params: Mapping[str, ParameterSharding]) -> dict[str, OptimizerSpec]:
        return dict.fromkeys(params, _NO_STATE)


class _SequenceSharder(EmbeddingCollectionSharder):
    def optimizers(self, module: nn.Module, params: Mapping[str, ParameterSharding]) -> dict[str, OptimizerSpec]:
        return dict.fromkeys(params, _NO_STATE)


def forward_only(sharding: ParameterSharding) -> ParameterSharding:
    """The same shards on a kernel without optimizer. In host memory they keep theirs, whose optimizer has no state."""
    if sharding.compute_kernel != EmbeddingComputeKernel.FUSED or any(s.tier != "hbm" for s in sharding.shards):
        return sharding
    return replace(sharding, compute_kernel="dense")


def over_ranks(
    collections: Mapping[str, nn.Module],
    pooled: Mapping[str, bool],
    plan: ShardingPlan,
    env: ShardingEnv,
    device: torch.device,
    sources: Mapping[str, Source] | None,
    typed: Mapping[str, Tables] | None = None,
) -> dict[str, ShardedCollection]:
    """Module path -> the sharded collection with the rows of `collections`. Collective.

    Args:
        collections: unsharded ones, with rank 0's rows, or ones that are sharded over these ranks.
        pooled: whether they pool.
        plan: with explicit shards.
        sources: read the rows on every rank instead, such as from a checkpoint.
        typed: stores packed rows of these tables.
    """

    def build() -> dict[str, ShardedCollection]:
        made = {}
        for path, shardings in plan.plan.items():
            backend = None if typed is None else PackedKernel.name
            sharder: CollectionSharder = (_PooledSharder if pooled[path] else _SequenceSharder)(backend=backend)
            params = {name: forward_only(sharding) for name, sharding in shardings.items()}
            made[path] = sharder.build(collections[path] if typed is None else typed[path], params, env, device)
        return made

    create_route_groups(plan, env)
    made = agreed(env, build)
    moves: list[Move] = []
    for path, sharded in made.items():
        old: Any = collections[path]
        if typed is not None:
            _pack(sharded, old, None if sources is None else sources[path], env)
        elif sources is not None:
            agreed(env, lambda own=sharded, source=sources[path]: _read(own, source))  # type: ignore[misc]
        elif isinstance(old, ShardedCollection):
            for name, shards in sharded.table_shards().items():
                held = old.table_shards()[name]
                weight = shards.model_parts()[0]
                moves.append(Move(held.tiles(weight), shards.tiles(weight)))
        else:
            moves += first_weights(sharded, old, env)
    agreed(env, lambda: move(moves, env, device))
    for sharded in made.values():
        sharded.requires_grad_(False)
    return made


@torch.no_grad()
def _pack(sharded: ShardedCollection, old: Any, source: Source | None, env: ShardingEnv) -> None:
    """Fills packed shards: every rank reads a checkpoint, or receives the rows of the other ranks by chunk."""
    for table in sharded.tables:
        targets = list(sharded.table_shards()[table.name].shards())
        if source is not None:
            chunks: Chunks = packed_rows(table, source)
        elif isinstance(old, ShardedCollection):
            whole = old.row_chunks(table.name)
            chunks = ((first, pack(rows.cpu(), table.data_type, table.name)) for first, rows in whole)
        else:
            own = packed_table(old, table) if isinstance(old, QuantCollection) else packed_rows(table, live_source(old))
            chunks = own if env.pg is None else from_rank_0(table, own, env, sharded.device)
        fill_shards(chunks, table.data_type, targets)


def _read(sharded: ShardedCollection, source: Source) -> None:
    for name, shards in sharded.table_shards().items():
        source.fill(name, [(shard.rect, weight) for shard, weight in shards.shards()])


def replicate_dense(module: nn.Module, collections: Mapping[str, nn.Module], env: ShardingEnv) -> None:
    """Copies rank 0's dense part to all ranks. Collective."""
    if env.pg is None:
        return
    inside = tuple(f"{path}." for path in collections)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if not name.startswith(inside):
            torch.distributed.broadcast(tensor.data, torch.distributed.get_global_rank(env.pg, 0), env.pg)
