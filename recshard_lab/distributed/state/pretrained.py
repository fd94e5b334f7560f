"""Loads pretrained tables into a model, sharded or not. Each rank reads its shards in blocks of rows."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.comm import ShardingEnv, agreed, all_gather_object
from recshard_lab.distributed.model_parallel import DistributedModelParallel
from recshard_lab.distributed.state.dumps import tables_in
from recshard_lab.distributed.state.moves import Move, move
from recshard_lab.distributed.state.table import ShardedTable
from recshard_lab.saved.sources import CheckpointSource, Pretrained, Source, source_of

_BLOCK_BYTES = 8 * 2**20


@names_wrong_arguments
def load_pretrained(model: nn.Module, tables: Mapping[str, Pretrained | None], *, cast: bool = False) -> None:
    """Fills tables with pretrained rows. The rest of the model and all optimizer states are unchanged.

    Collective over a sharded model's ranks, with the same tables on each. Pass files as paths that every rank can read;
    each rank reads only its shards. Pass a tensor or array on every rank, or on one rank with None on the others, which
    then receive their shards.

    Args:
        model: a `DistributedModelParallel` or any module with embedding collections.
        tables: table -> ``[num_embeddings, embedding_dim]``: a tensor, a numpy array (also memory-mapped), or the path
            of a ``.npy``, ``.safetensors`` (``recshard-lab[safetensors]``), ``.pt`` or ``.pth`` file or a checkpoint
            folder. Use ``(path, name)`` if the file has several tensors and not exactly one is named after the table.
            If two collections have a table of this name, use its name in the state dict.
        cast: whether to accept dtypes that the table's dtype cannot represent exactly, such as float64 for a float32
            table.

    Raises:
        ValueError: an unknown table, or a source that is missing, damaged or of another shape or dtype, by name.
            Nothing was changed.
        Exception: an error on one rank is raised on all ranks. If it occurs while rows are read (disk error, out of
            memory), the named tables are partly overwritten.

    >>> import numpy as np
    >>> from recshard_lab import EmbeddingBagCollection, EmbeddingBagConfig
    >>> bags = EmbeddingBagCollection([EmbeddingBagConfig(2, 4, name="movies", feature_names=["seen"])])
    >>> load_pretrained(bags, {"movies": np.eye(2, 4, dtype=np.float32)})
    >>> bags.embedding_bags["movies"].weight[1].tolist()
    [0.0, 1.0, 0.0, 0.0]
    """
    sharded = model if isinstance(model, DistributedModelParallel) else None
    env = sharded.env if sharded is not None else ShardingEnv.from_local(1, 0)
    world = sharded.dense_env if sharded is not None else env  # all replicas, if there are several
    loads = agreed(world, lambda: _checked(model, tables, env, cast))
    by_rank = all_gather_object([(load.key, load.described) for load in loads], world)
    agreed(world, lambda: _same_everywhere(by_rank, sendable=world.world_size == env.world_size))

    def read() -> list[Move]:
        """Reads this rank's local sources. Returns the moves of tables that only one rank has."""
        moves: list[Move] = []
        for number, load in enumerate(loads):
            owners = [rank for rank, entries in enumerate(by_rank) if entries[number][1] is not None]
            if len(owners) == 1 and env.world_size > 1:
                moves.append(load.from_rank(owners[0]))
            else:
                load.from_rows()
        return moves

    with torch.no_grad():
        moves = agreed(world, read)
        if moves and sharded is not None:
            move(moves, env, sharded.device)


@dataclass
class _Load:
    """One table and its source."""

    key: str
    table: ShardedTable
    source: Source | None  # None if another rank has it

    @property
    def described(self) -> tuple[bool, str] | None:
        """(whether the source can be sent, its label), which the ranks exchange."""
        return None if self.source is None else (not isinstance(self.source, CheckpointSource), self.source.label)

    def from_rows(self) -> None:
        assert self.source is not None
        for shard, weight in self.table.shards():
            block = max(1, _BLOCK_BYTES // max(1, shard.num_cols * self.source.dtype.itemsize))
            for start in range(*shard.rows, block):
                end = min(start + block, shard.rows[1])
                rows = self.source.read(slice(start, end), slice(*shard.cols))
                weight[start - shard.rows[0] : end - shard.rows[0]] = rows.to(weight.dtype)

    def from_rank(self, owner: int) -> Move:
        (rows, cols), weight = self.table.size, self.table.model_parts()[0]
        whole = None if self.source is None else self.source.read(slice(rows), slice(cols)).to(weight.dtype)
        return self.table.scatter_move(weight, whole, owner)


def _checked(model: nn.Module, values: Mapping[str, Pretrained | None], env: ShardingEnv, cast: bool) -> list[_Load]:
    """Every table with its opened source, in the model's order."""
    bare = getattr(model, "_bare", model)
    tables = (table for path, module in bare.named_modules() for table in tables_in(path, module, env))
    known = dict(tables)
    chosen: dict[str, tuple[str, Pretrained | None]] = {}
    for name, value in values.items():
        keys = [key for key in known if key == name or key.split(".")[-2] == name]
        if len(keys) != 1:
            matches = f"{len(keys)} tables are" if keys else "no table is"
            raise ValueError(f"{matches} named {name!r}: the model has {', '.join(known)}")
        chosen[keys[0]] = (name, value)
    loads = []
    for key, (name, value) in sorted(chosen.items()):
        source = None if value is None else source_of(value, key.split(".")[-2], env.rank, env.world_size)
        if source is not None:
            _check_fit(known[key], source, name, cast)
        elif env.world_size == 1:
            raise ValueError(f"table {name!r} is None, but this is the only rank. Fix: pass its rows")
        loads.append(_Load(key, known[key], source))
    return loads


def _check_fit(load: ShardedTable, source: Source, name: str, cast: bool) -> None:
    if source.size != load.size:
        shape = " x ".join(f"{n:,}" for n in source.size)
        raise ValueError(
            f"{source.label} is {shape}, table {name!r} is {load.size[0]:,} x {load.size[1]:,}. Nothing was changed"
        )
    if not source.dtype.is_floating_point:
        raise ValueError(f"{source.label} has {source.dtype} numbers, expected floating point. Nothing was changed")
    dtype = load.model_parts()[0].dtype
    if not cast and torch.promote_types(source.dtype, dtype) != dtype:
        raise ValueError(
            f"{source.label} is {source.dtype}, table {name!r} is {dtype}, which cannot represent it exactly. "
            f"Nothing was changed. Fix: cast=True, which rounds"
        )


def _same_everywhere(by_rank: list[list[tuple[str, tuple[bool, str] | None]]], sendable: bool) -> None:
    """Checks that all ranks name the same tables, and that each table has a source on all ranks or, in memory, on one.

    Nothing is sent between replicas, so each replica needs its source.
    """
    for rank, entries in enumerate(by_rank):
        if [key for key, _ in entries] != [key for key, _ in by_rank[0]]:
            raise ValueError(f"rank {rank} has other tables than rank 0. Fix: pass the same tables on every rank")
    for number, (key, _) in enumerate(by_rank[0]):
        sources = [source for entries in by_rank if (source := entries[number][1]) is not None]
        can_be_sent = sendable and all(in_memory for in_memory, _ in sources)
        if len(sources) != len(by_rank) and (len(sources) != 1 or not can_be_sent):
            raise ValueError(
                f"{key} has a source on {len(sources)} of {len(by_rank)} ranks. Fix: pass it on all ranks, or a tensor "
                f"or array on one rank and None on the others (checkpoints and sources of replicas: on all ranks)"
            )
