"""Rows of dynamic tables that are in tiers below the fast one, as matrices over all ranks.

A shard has whole partitions. In the order of partitions and ids, the rows of a shard are therefore a range of all rows,
and its tensors a tiling of matrices that `moves.move` moves and checkpoints save::

    rows [M, D], sorted by partition and id          ranks before      ranks after
    partition 0, ids 5, 9                            0                 0
    partition 1, ids -3, 10**15, 10**15 + 1          0                 1
    partition 2, id 7                                1                 1

Rows are copied to an unnamed file, so that tiers larger than the memory can move.

Shape letters: M rows of the table, m of a shard, D columns, d of a shard.
"""

import mmap
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from recshard_lab.comm import ShardingEnv, gathered
from recshard_lab.distributed.sharded_collections import ShardedCollection
from recshard_lab.distributed.state.forms import sharded_tensor
from recshard_lab.distributed.state.moves import Move
from recshard_lab.distributed.state.parts import Part, primary_rows
from recshard_lab.distributed.table_shards import TableShards
from recshard_lab.embedding.dynamic.index_rounds import partitions_of
from recshard_lab.embedding.dynamic.kernel import DynamicKernel
from recshard_lab.embedding.dynamic.stores import Chain, Rows
from recshard_lab.embedding.dynamic.table import DynamicTable
from recshard_lab.sharding import Shard

Key: TypeAlias = tuple[str, int]
"""A table's name, and the position of a shard in its list."""

_INDEX = Part("index", "row", torch.int64, 6)
"""Columns: id, score, `Rows.touched`, slot in the tier, buckets of the tier, number of the tier."""
_BATCH = 1 << 16


class TierRows:
    """The rows of the tiers of a collection's tables.

    The constructor reads this rank's tiers, then `exchange` is collective. To move them to other shards, call `moves`,
    `clear` and `fill`, with all ranks in between; `drop` and `undo` revert them.

    Args:
        collection: the collection.
        folder: of the files. Default: the system's folder for temporary files.
        reads: whether to read the tiers. Without, the tables have no rows here until `expect`.

    Attributes:
        counts: table -> rows of each partition.
    """

    def __init__(self, collection: ShardedCollection, folder: str | Path | None = None, *, reads: bool = True) -> None:
        self.folder = folder
        self.parts = {
            name: [_INDEX, *(part for part in shards.parts() if part.name == "weight"), *_by_row(shards)]
            for name, shards in collection.table_shards().items()
            if getattr(shards.config, "tiers", ())
        }
        self.configs = {table.name: table for table in collection.tables if table.name in self.parts}
        self.shards = {name: list(collection.shardings[name].shards) for name in self.parts}
        self.tables = {key: table for key, table in tables_of(collection).items() if key[0] in self.parts}
        self.chains = {key: _chain(table) for key, table in self.tables.items()}
        self.local: dict[Key, dict[str, Tensor]] = {}
        self.counts = {name: [0] * self.configs[name].partitions for name in self.parts}  # type: ignore[attr-defined]
        self._new: dict[Key, Chain] = {}
        self._targets: dict[Key, dict[str, Tensor]] = {}
        self._cleared = False
        if reads:
            self.local = {key: self._read(key, table) for key, table in self.tables.items()}
        self.tables = {}  # the rows of the fast tier may be freed

    # ---- reading ----

    @torch.no_grad()
    def _read(self, key: Key, table: DynamicTable) -> dict[str, Tensor]:
        with table.lock:
            chain = _chain(table)
            table._lose(chain.store_waiting())
            every = [rows.ids for _, rows in chain.levels(_BATCH, table._in_fast)]
            ids = torch.cat([torch.empty(0, dtype=torch.int64), *every])
            known, order = ids.sort()
            partition = partitions_of(known, table.index.partitions)
            at = torch.empty_like(order)
            at[partition.argsort(stable=True)] = torch.arange(len(ids))  # of each known id
            tensors = self._allocate(key, len(ids), table.columns)
            for level, rows in chain.levels(_BATCH, table._in_fast):
                to = at[torch.searchsorted(known, rows.ids)]
                places = chain.stores[level].places(rows.ids)
                numbers = torch.full_like(rows.ids, level)
                tensors["index"][to] = torch.stack([*rows[:3], *places.unbind(1), numbers], dim=1)
                tensors["weight"][to] = rows.weight
                for part in self.parts[key[0]][2:]:
                    tensors[part.name][to] = rows.states[part.name].view(len(to), -1)
        return tensors

    def _allocate(self, key: Key, many: int, columns: tuple[int, int]) -> dict[str, Tensor]:
        """Matrices for the rows of a shard, in a file."""
        shard = Shard(0, (0, many), columns)
        sizes = {part.name: (part, *_axes(part, shard)) for part in self.parts[key[0]]}
        total = sum(rows * cols * part.dtype.itemsize for part, rows, cols in sizes.values())
        if not total:
            return {name: torch.empty(rows, cols, dtype=part.dtype) for name, (part, rows, cols) in sizes.items()}
        with tempfile.TemporaryFile(dir=self.folder, prefix="recshard-tiers-") as file:
            file.truncate(total)
            mapped = mmap.mmap(file.fileno(), total)
        found, used = {}, 0
        for name, (part, rows, cols) in sorted(sizes.items(), key=lambda entry: -entry[1][0].dtype.itemsize):
            flat = torch.frombuffer(mapped, dtype=part.dtype, count=rows * cols, offset=used)
            found[name], used = flat.view(rows, cols), used + flat.nbytes
        return found

    def exchange(self, env: ShardingEnv) -> None:
        """Counts the rows of all ranks. Collective."""
        if not self.parts:
            return

        def counted() -> list[tuple[str, int, list[int]]]:
            found = []
            for (name, position), tensors in self.local.items():
                first, end = self._partitions(name, self.shards[name][position])
                own = partitions_of(tensors["index"][:, 0], len(self.counts[name])) - first
                found.append((name, first, torch.bincount(own, minlength=end - first).tolist()))
            return found

        for own in gathered(env, counted):
            for name, first, counts in own:  # those of column shards are equal
                self.counts[name][first : first + len(counts)] = counts

    def _partitions(self, name: str, shard: Shard) -> tuple[int, int]:
        unit = self.configs[name].row_unit
        return shard.rows[0] // unit, shard.rows[1] // unit

    def _ranges(self, name: str, shards: Sequence[Shard]) -> dict[int, Shard]:
        """Position of a shard -> its part of ``[M, D]``. Shards without rows are left out."""
        first = [*accumulate(self.counts[name], initial=0)]
        found = {}
        for position, shard in enumerate(shards):
            start, end = self._partitions(name, shard)
            if first[start] < first[end]:
                found[position] = Shard(shard.rank, (first[start], first[end]), shard.cols, shard.tier)
        return found

    # ---- moving ----

    def moves(self, collection: ShardedCollection) -> list[Move]:
        """Everything, from the shards before to those of the collection now. Allocates the latter."""
        moves = []
        self._targets = {}
        for name in self.parts:
            before, after = self.shards[name], list(collection.shardings[name].shards)
            sources, targets = self._ranges(name, before), self._ranges(name, after)
            for key, table in tables_of(collection).items():
                if key[0] == name:
                    shard = targets.get(key[1])
                    self._targets[key] = self._allocate(key, 0 if shard is None else shard.num_rows, table.columns)
            for part in self.parts[name]:
                old, new = (
                    {number: held[name, at][part.name] for number, at in enumerate(ranges) if (name, at) in held}
                    for ranges, held in ((sources, self.local), (targets, self._targets))
                )
                tilings = (part.shards(list(ranges.values())) for ranges in (sources, targets))
                moves.append(Move(part.dtype, next(tilings), next(tilings), old, new))
        return moves

    def clear(self) -> None:
        """Removes the rows of the shards before from their tiers. All ranks do so before any rank calls `fill`."""
        self._cleared = True
        for chain in self.chains.values():
            chain.clear()

    def fill(self, collection: ShardedCollection) -> None:
        """Stores what the moves have brought."""
        for key, table in tables_of(collection).items():
            if key in self._targets:
                self._new[key] = _chain(table)
                self._store(key, table, self._targets[key])

    def drop(self) -> None:
        """Reverts `fill`. All ranks do so before any rank calls `undo`."""
        for chain in self._new.values():
            chain.clear()

    def undo(self, collection: ShardedCollection) -> None:
        """Reverts `clear`, for the shards before, which the collection has again."""
        for key, table in tables_of(collection).items():
            if key in self.chains and (self._cleared or table.tiers is not self.chains[key]):
                self.chains[key].close()
                _chain(table).clear()
                self._store(key, table, self.local[key])

    @torch.no_grad()
    def _store(self, key: Key, table: DynamicTable, tensors: Mapping[str, Tensor]) -> None:
        """Fills the empty tiers of a shard."""
        index = tensors["index"]
        shapes = {name: shape for name, shape, _ in _chain(table).stores[0].format.states}

        def read(at: Tensor) -> Rows:
            states = {name: tensors[name][at].view(len(at), *shape) for name, shape in shapes.items()}
            ids, scores, touched = index[at, :3].t().clone(memory_format=torch.contiguous_format)
            return Rows(ids, scores, touched, tensors["weight"][at], states)

        with table.lock:
            places = index[:, 3:5].clone()
            _chain(table).refill(index[:, :3], places, index[:, 5].clone(), read, table._lose)

    # ---- checkpoints ----

    def entries(self, env: ShardingEnv) -> dict[str, dict[str, Any]]:
        """Table -> ``partitions``, the rows of each, and name -> matrix over all ranks. After `exchange`."""
        found: dict[str, dict[str, Any]] = {}
        for name, parts in self.parts.items():
            found[name] = {"partitions": torch.tensor(self.counts[name])}
            total = sum(self.counts[name])
            ranges = self._ranges(name, self.shards[name])
            for part in parts if total else ():
                size = part.size(total, self.configs[name].embedding_dim)
                shards = part.shards(list(ranges.values()))
                held = [(number, (name, at)) for number, at in enumerate(ranges) if (name, at) in self.local]
                tensors = {number: self.local[key][part.name] for number, key in held}
                if env.pg is None:
                    found[name][part.name] = self._whole(part, shards, tensors, size)
                    continue
                primaries, own = [], {}
                for number, (position, shard) in enumerate(primary_rows(shards, part.extent)):
                    primaries.append(shard)
                    if position in tensors:
                        own[number] = tensors[position]
                found[name][part.name] = sharded_tensor(primaries, own, size, env, part.dtype)
        return found

    def _whole(
        self, part: Part, shards: Sequence[Shard], tensors: Mapping[int, Tensor], size: tuple[int, int]
    ) -> Tensor:
        """A matrix of one process, which its shards are views of from now on."""
        whole = torch.empty(size, dtype=part.dtype)
        for number, tensor in tensors.items():
            whole[slice(*shards[number].rows), slice(*shards[number].cols)] = tensor
        for tensors_of_shard in self.local.values():
            for number, tensor in tensors.items():
                if tensors_of_shard.get(part.name) is tensor:
                    tensors_of_shard[part.name] = whole[slice(*shards[number].rows), slice(*shards[number].cols)]
        return whole

    def expect(self, collection: ShardedCollection, counts: Mapping[str, Sequence[int]]) -> None:
        """Allocates memory for the rows of a checkpoint, all zeros. `entries` shares it. Then call `replace`."""
        self.counts = {name: list(own) for name, own in counts.items()}
        for key, table in tables_of(collection).items():
            if key[0] in self.parts:
                shard = self._ranges(key[0], self.shards[key[0]]).get(key[1])
                self.local[key] = self._allocate(key, 0 if shard is None else shard.num_rows, table.columns)

    def copies(self) -> list[Move]:
        """Copies what a checkpoint has once to every column shard. Collective."""
        moves = []
        for name, parts in self.parts.items():
            ranges = self._ranges(name, self.shards[name])
            for part in parts:
                shards = part.shards(list(ranges.values()))
                tensors = {
                    n: self.local[name, at][part.name] for n, at in enumerate(ranges) if (name, at) in self.local
                }
                first = dict(primary_rows(shards, part.extent))
                others = [number for number in range(len(shards)) if number not in first]
                if others:
                    sources = [shards[number] for number in first]
                    own = {n: tensors[number] for n, number in enumerate(first) if number in tensors}
                    into = {n: tensors[number] for n, number in enumerate(others) if number in tensors}
                    moves.append(Move(part.dtype, sources, [shards[number] for number in others], own, into))
        return moves

    def replace(self, collection: ShardedCollection) -> None:
        """Makes the rows of a checkpoint those of the tiers."""
        for key, table in tables_of(collection).items():
            if key in self.local:
                _chain(table).clear()
                self._store(key, table, self.local[key])


def tables_of(collection: ShardedCollection) -> dict[Key, DynamicTable]:
    """The shards of dynamic tables on this rank."""
    return {
        (collection.tables[number].name, position): table
        for group in collection.executor.lookup.groups
        if isinstance(group.kernel, DynamicKernel)
        for (number, position), table in zip(group.shards, group.kernel.tables, strict=True)
    }


def _chain(table: DynamicTable) -> Chain:
    assert table.tiers is not None
    return table.tiers


def _by_row(shards: TableShards) -> Iterator[Part]:
    return (part for part in shards.state_parts if part.extent != "table")


def _axes(part: Part, shard: Shard) -> tuple[int, int]:
    """Rows and columns of a shard's matrix."""
    (own,) = part.shards([shard])
    return own.num_rows, own.num_cols
