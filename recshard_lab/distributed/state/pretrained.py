"""Pretrained tables into a model, sharded or not: each rank reads the rectangles it holds, in blocks of rows."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.comm import ShardingEnv, agreed, all_gather_object
from recshard_lab.distributed.model_parallel import DistributedModelParallel
from recshard_lab.distributed.sharded_collections import ShardedCollection
from recshard_lab.distributed.state.checkpoint import read_into
from recshard_lab.distributed.state.moves import Move, move
from recshard_lab.distributed.state.pretrained_sources import CheckpointSource, Pretrained, Source, source_of
from recshard_lab.distributed.table_shards import TableShards
from recshard_lab.embedding import EmbeddingBagCollection, EmbeddingCollection, FusedCollection
from recshard_lab.sharding import Shard

_BLOCK_BYTES = 8 * 2**20


@names_wrong_arguments
def load_pretrained(model: nn.Module, tables: Mapping[str, Pretrained | None], *, cast: bool = False) -> None:
    """Fills tables with given rows; the rest of the model, and all optimizer states, stay as they are.

    All ranks of a sharded model must call it with the same tables. A file is given by a path that every rank reaches;
    each rank reads the rows and columns of its own rectangles only. A tensor or array is given on every rank, or on
    one of them with None on the others, which are sent their parts.

    Args:
        model: a `DistributedModelParallel` or any module with embedding collections.
        tables: table -> ``[num_embeddings, embedding_dim]``: a tensor, a numpy array (memory-mapped ones too), the path
            of a ``.npy``, ``.safetensors`` (``recshard-lab[safetensors]``), ``.pt`` or ``.pth`` file or of a checkpoint
            folder; ``(path, name)`` where the file has several tensors and none or many are named after the table.
            Where two collections have a table of that name, its name in the state dict.
        cast: also take number formats that hold more than the table's: float64 into a float32 table.

    Raises:
        ValueError: a table that is not there, a source that is missing, damaged or of another shape or number format:
            by name; nothing has changed.
        Exception: an error on one rank is raised on all ranks. If it happened while rows were read (a disk error, no
            memory), the tables named are overwritten in part.

    >>> import numpy as np
    >>> from recshard_lab import EmbeddingBagCollection, EmbeddingBagConfig
    >>> bags = EmbeddingBagCollection([EmbeddingBagConfig(2, 4, name="movies", feature_names=["seen"])])
    >>> load_pretrained(bags, {"movies": np.eye(2, 4, dtype=np.float32)})
    >>> bags.embedding_bags["movies"].weight[1].tolist()
    [0.0, 1.0, 0.0, 0.0]
    """
    sharded = model if isinstance(model, DistributedModelParallel) else None
    env = sharded.env if sharded is not None else ShardingEnv.from_local(1, 0)
    world = sharded.dense_env if sharded is not None else env  # all replicas, where there are several
    loads = agreed(world, lambda: _checked(model, tables, env, cast))
    given = all_gather_object([(load.key, load.described) for load in loads], world)
    agreed(world, lambda: _same_everywhere(given, sendable=world.world_size == env.world_size))

    def read() -> list[Move]:
        """Reads what this rank can read by itself; the moves of tables that one rank alone has."""
        moves: list[Move] = []
        for number, load in enumerate(loads):
            owners = [rank for rank, each in enumerate(given) if each[number][1] is not None]
            if len(owners) == 1 and env.world_size > 1:
                moves.append(load.from_rank(owners[0], env))
            elif not isinstance(load.source, CheckpointSource):
                load.from_rows()
        return moves

    with torch.no_grad():
        moves = agreed(world, read)
        for load in loads:
            if isinstance(load.source, CheckpointSource):
                load.from_checkpoint(model, env)
        if moves and sharded is not None:
            move(moves, env, sharded.device)


@dataclass
class _Load:
    """One table and where its rows come from."""

    key: str  # in the model's state dict
    dtype: torch.dtype
    size: tuple[int, int]
    pieces: list[tuple[Shard, Tensor]]  # on this rank
    shards: TableShards | None  # None where every rank has the whole table
    source: Source | None  # None where another rank has it

    @property
    def described(self) -> tuple[bool, str] | None:
        """What ranks tell each other: whether it can be sent, and what it is."""
        return None if self.source is None else (not isinstance(self.source, CheckpointSource), self.source.label)

    def from_rows(self) -> None:
        assert self.source is not None
        for shard, weight in self.pieces:
            block = max(1, _BLOCK_BYTES // max(1, shard.num_cols * self.source.dtype.itemsize))
            for start in range(*shard.rows, block):
                end = min(start + block, shard.rows[1])
                rows = self.source.read(slice(start, end), slice(*shard.cols))
                weight[start - shard.rows[0] : end - shard.rows[0]] = rows.to(weight.dtype)

    def from_rank(self, owner: int, env: ShardingEnv) -> Move:
        full = ((0, self.size[0]), (0, self.size[1]))
        held = {}
        if self.source is not None:
            held[0] = self.source.read(slice(*full[0]), slice(*full[1])).to(self.dtype)
        if self.shards is not None:
            targets, wanted = list(self.shards.sharding.shards), dict(self.shards.local_weights)
        else:
            targets = [Shard(rank, *full) for rank in range(env.world_size)]
            wanted = {env.rank: self.pieces[0][1]}
        return Move(self.dtype, [Shard(owner, *full)], targets, held, wanted)

    def from_checkpoint(self, model: nn.Module, env: ShardingEnv) -> None:
        assert isinstance(self.source, CheckpointSource)
        value = model.state_dict()[self.key]
        read_into({self.source.key: value}, self.source.folder, self.source.metadata, env)
        model.load_state_dict({self.key: value}, strict=False)  # pieces of one process are read by way of a whole


def _checked(model: nn.Module, tables: Mapping[str, Pretrained | None], env: ShardingEnv, cast: bool) -> list[_Load]:
    """Every table's pieces beside its opened source, in the model's order."""
    known = _tables_of(model)
    chosen: dict[str, tuple[str, Pretrained | None]] = {}
    for name, given in tables.items():
        keys = [key for key in known if key == name or key.split(".")[-2] == name]
        if len(keys) != 1:
            have = f"{len(keys)} tables are" if keys else "no table is"
            raise ValueError(f"{have} named {name!r}: the model has {', '.join(known)}")
        chosen[keys[0]] = (name, given)
    loads = []
    for key, (name, given) in sorted(chosen.items()):
        load = known[key]
        load.source = None if given is None else source_of(given, key.split(".")[-2], env.rank, env.world_size)
        if load.source is not None:
            _check_fit(load, load.source, name, cast)
        elif env.world_size == 1:
            raise ValueError(f"table {name!r} is given None, and there is no other rank that could have it")
        loads.append(load)
    return loads


def _check_fit(load: _Load, source: Source, name: str, cast: bool) -> None:
    if source.size != load.size:
        shape = " x ".join(f"{n:,}" for n in source.size)
        raise ValueError(
            f"{source.label} is {shape}, table {name!r} is {load.size[0]:,} x {load.size[1]:,}: nothing was changed"
        )
    if not source.dtype.is_floating_point:
        raise ValueError(f"{source.label} has {source.dtype} numbers, expected floating point: nothing was changed")
    if not cast and torch.promote_types(source.dtype, load.dtype) != load.dtype:
        raise ValueError(
            f"{source.label} is {source.dtype}, table {name!r} is {load.dtype}, which cannot hold all of it: "
            f"cast=True rounds. Nothing was changed"
        )


def _same_everywhere(given: list[list[tuple[str, tuple[bool, str] | None]]], sendable: bool) -> None:
    """Every rank names the same tables, and every table has its rows on all ranks or, in memory, on one.

    Replicas each take theirs from a source of their own: nothing is sent between them.
    """
    for rank, each in enumerate(given):
        if [key for key, _ in each] != [key for key, _ in given[0]]:
            raise ValueError(f"rank {rank} was given other tables than rank 0: name the same ones on every rank")
    for number, (key, _) in enumerate(given[0]):
        found = [told for each in given if (told := each[number][1]) is not None]
        can_be_sent = sendable and all(in_memory for in_memory, _ in found)
        if len(found) != len(given) and (len(found) != 1 or not can_be_sent):
            raise ValueError(
                f"{key} is given on {len(found)} of {len(given)} ranks: give it on all of them, or a tensor or array "
                f"on one and None on the others (checkpoints, and all sources of replicas, on all)"
            )


def _tables_of(model: nn.Module) -> dict[str, _Load]:
    """Name in the state dict -> table, of all embedding collections."""
    found: dict[str, _Load] = {}
    bare = model._bare if isinstance(model, DistributedModelParallel) else model
    for path, module in bare.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(module, ShardedCollection):
            for name, shards in module.table_shards().items():
                key = f"{prefix}{module.tables_name}.{name}.weight"
                found[key] = _Load(key, shards.parts()[0].dtype, shards.size, list(shards.shards()), shards, None)
        elif isinstance(module, EmbeddingBagCollection | EmbeddingCollection | FusedCollection):
            tables = "embedding_bags" if isinstance(module, EmbeddingBagCollection) else "embeddings"
            tables = module.tables_name if isinstance(module, FusedCollection) else tables
            for name, table in getattr(module, tables).items():
                rows, cols = table.weight.shape
                piece = (Shard(0, (0, rows), (0, cols)), table.weight.detach())
                key = f"{prefix}{tables}.{name}.weight"
                found[key] = _Load(key, table.weight.dtype, (rows, cols), [piece], None, None)
    return found
