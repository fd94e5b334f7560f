"""Dumps of a model's tables, sharded or not.

Every rank writes the files of its shards, and rank 0 the manifest. Reading needs neither the same ranks nor the same
shards: a rank reads the rows and columns of its own.

Shape letters: N rows, E rows of a table, d columns of a shard.
"""

import mmap
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.comm import ShardingEnv, agreed, from_first_rank, gathered
from recshard_lab.complete_folders import Staging, described
from recshard_lab.distributed.sharded_collections import ShardedCollection
from recshard_lab.distributed.state.forms import sharded_tensor
from recshard_lab.distributed.state.moves import Move
from recshard_lab.distributed.state.table import Part, TableShards, primary_rows
from recshard_lab.embedding import EmbeddingBagCollection, EmbeddingCollection, FusedCollection
from recshard_lab.embedding.dynamic.collections import DynamicCollection
from recshard_lab.embedding.dynamic.index_rounds import partitions_of
from recshard_lab.embedding.dynamic.kernel import DynamicKernel
from recshard_lab.embedding.dynamic.row_files import (
    DUMP,
    Dumped,
    DumpError,
    Entry,
    FileReader,
    FileWriter,
    Paths,
    Restored,
    Since,
    check_dynamic,
    check_shape,
    copy_values,
    dtype_name,
    first_step,
    folders_of,
    joined,
    read_dynamic,
    refuse_other_tables,
    safetensors_torch,
    steps_of,
    write_dynamic,
    write_rows,
)
from recshard_lab.embedding.dynamic.stores import Chain, Rows
from recshard_lab.embedding.dynamic.table import DynamicTable
from recshard_lab.sharding import Shard

# Rows of dynamic tables that are in tiers below the fast one, as matrices over all ranks.
#
# A shard has whole partitions. In the order of partitions and ids, the rows of a shard are therefore a range of all
# rows,
# and its tensors a tiling of matrices that `moves.move` moves and checkpoints save::
#
#     rows [M, D], sorted by partition and id          ranks before      ranks after
#     partition 0, ids 5, 9                            0                 0
#     partition 1, ids -3, 10**15, 10**15 + 1          0                 1
#     partition 2, id 7                                1                 1
#
# Rows are copied to an unnamed file, so that tiers larger than the memory can move.
#
# Shape letters: M rows of the table, m of a shard, D columns, d of a shard.


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


@dataclass
class _Dynamic:
    """A shard of a dynamic table on this rank, and the first step whose backward is to come."""

    table: DynamicTable
    pending: int | None

    @property
    def primary(self) -> bool:
        """Whether it has the first columns, with which ids and scores are written."""
        return self.table.columns[0] == 0


@dataclass
class _Static:
    """A shard of a static table on this rank.

    Attributes:
        key: name of the table's weight in state dicts.
        size: of the whole table.
        first_row, columns: of the shard.
        weight: ``[rows, d]``. states: name -> optimizer state.
        primary: False for a replica that another rank writes.
    """

    key: str
    size: tuple[int, int]
    first_row: int
    columns: tuple[int, int]
    weight: Tensor
    states: Mapping[str, Tensor]
    primary: bool


class _Tables:
    """The tables of a model by name.

    Raises:
        ValueError: two tables of one name.
    """

    def __init__(self, model: nn.Module) -> None:
        self.env: ShardingEnv = getattr(model, "dense_env", ShardingEnv.from_local(1, 0))
        self.replica = getattr(model, "replica", 0)
        self.names: list[str] = []
        self.dynamic: dict[str, list[_Dynamic]] = {}
        self.static: dict[str, list[_Static]] = {}
        self.keys: dict[str, str] = {}
        for path, module in getattr(model, "_bare", model).named_modules():
            prefix = f"{path}." if path else ""
            if isinstance(module, ShardedCollection):
                self._add_sharded(prefix, module)
            elif isinstance(module, DynamicCollection):
                tables = zip(module.tables().items(), module._kernel.pending(), strict=True)
                for (name, table), pending in tables:
                    self._known(name)
                    self.dynamic[name] = [_Dynamic(table, pending)]
            elif isinstance(module, FusedCollection | EmbeddingBagCollection | EmbeddingCollection):
                self._add_whole(prefix, module)

    def _known(self, name: str) -> None:
        if name in self.names:
            raise ValueError(f"two tables are named {name!r}, and a dump names them alike. Fix: rename one")
        self.names.append(name)

    def _add_sharded(self, prefix: str, module: ShardedCollection) -> None:
        for config in module.tables:
            self._known(config.name)
            (self.dynamic if config.dynamic else self.static)[config.name] = []
        for group in module.executor.lookup.groups:
            if isinstance(group.kernel, DynamicKernel):
                own = zip(group.shards, group.kernel.tables, group.kernel.pending(), strict=True)
                for (number, _), table, pending in own:
                    self.dynamic[module.tables[number].name].append(_Dynamic(table, pending))
        for key, shards in module.shards_by_weight().items():
            name = shards.config.name
            if name in self.dynamic:
                continue
            self.keys[prefix + key] = name
            first = {position for position, _ in primary_rows(shards.sharding.shards, "element")}
            for position, weight in shards.local_weights.items():
                shard, states = shards.sharding.shards[position], shards.states.get(position, {})
                self.static[name].append(
                    _Static(prefix + key, shards.size, shard.rows[0], shard.cols, weight, states, position in first)
                )

    def _add_whole(self, prefix: str, module: Any) -> None:
        states = module.optimizer_states() if isinstance(module, FusedCollection) else {}
        for key, weight in module.named_parameters(remove_duplicate=False):
            name, size = key.split(".")[-2], tuple(weight.shape)
            self._known(name)
            self.keys[prefix + key] = name
            own = _Static(prefix + key, size, 0, (0, size[1]), weight.detach(), states.get(name, {}), True)
            self.static[name] = [own]


@names_wrong_arguments
def dump_tables(
    path: str | Path,
    model: nn.Module,
    *,
    since: Since = None,
    rows: Mapping[str, Tensor] | None = None,
) -> Dumped:
    """Writes the dynamic tables of a model, and some rows of its static ones, to a folder.

    Collective over a sharded model's ranks, with a path that all of them can reach. See `DynamicCollection.dump`.

    Args:
        path: the folder. An existing dump is replaced once the new one is complete.
        model: a `DistributedModelParallel` or any module.
        since: the path of an earlier dump, or a step: writes a delta of the dynamic tables. Default: everything.
        rows: name of a static table's weight in state dicts -> its rows to write, ``[N]`` int64, as
            `ModelDeltaTracker.get_unique_ids` returns them. Of other ranks' rows, each rank writes none. Other static
            tables are not written. Default: none.

    Raises:
        DumpError: ``path`` exists and is not a dump, or ``since`` is not a dump of these tables.
        OSError: an error on any rank while writing, such as a full disk. The previous dump is complete.
        ValueError: ``rows`` names no static table; two tables of one name; gradients that wait for a step.
    """
    tables = _ready(model, "dump_tables")
    env, rows = tables.env, dict(rows or {})
    getattr(model, "level_tables", lambda: None)()  # slots are counted over a table of one size

    staging: Staging | None = None

    def started() -> Path:
        nonlocal staging
        safetensors_torch()
        staging = Staging(DUMP, Path(path))
        return staging.path

    try:
        folder = from_first_rank(env, started)

        def write() -> tuple[list[dict[str, Entry]], dict[str, Any]]:
            writer = FileWriter(folder, env.rank)
            entries = _written(writer, tables, steps_of(since), rows) if tables.replica == 0 else []
            return entries, described(writer.paths)

        by_rank = gathered(env, write)

        def finish() -> dict[str, Any]:
            nonlocal staging
            assert staging is not None
            written = {name: entry for _, files in by_rank for name, entry in files.items()}
            staging.commit(written, tables=joined(entry for entries, _ in by_rank for entry in entries))
            staging = None
            return DUMP.manifest_of(DUMP.readable(path))

        return Dumped.of(Path(path), from_first_rank(env, finish))
    finally:
        if staging is not None:
            staging.discard()


def _written(writer: FileWriter, tables: _Tables, steps: Any, rows: Mapping[str, Tensor]) -> list[dict[str, Entry]]:
    """Writes this rank's shards."""
    unknown = [key for key in rows if key not in tables.keys]
    if unknown:
        raise ValueError(f"rows= names {unknown[0]!r}, which is no static table. Fix: use one of {sorted(tables.keys)}")
    entries = []
    for name, shards in tables.dynamic.items():
        since = first_step(steps, name)
        entries += [{name: write_dynamic(writer, own.table, since, own.pending, own.primary)} for own in shards]
    for key, ids in rows.items():
        name = tables.keys[key]
        for shard in tables.static[name]:
            if shard.primary:
                at = (writer, ids, shard.first_row, shard.columns, shard.weight, shard.states)
                entries.append({name: _static_entry(shard, write_rows(*at))})
    return entries


def _static_entry(shard: _Static, piece: Entry) -> Entry:
    return {
        "kind": "static",
        "rows": shard.size[0],
        "dim": shard.size[1],
        "dtype": dtype_name(shard.weight.dtype),
        "states": sorted(shard.states),
        "step": 0,
        "since": None,
        "next": {},
        "pieces": [piece],
        "counts": [],
    }


@names_wrong_arguments
def load_tables(path: Paths, model: nn.Module, *, optimizer_state: bool = True) -> Restored:
    """Fills the tables of a model from what `dump_tables` or `DynamicCollection.dump` wrote.

    Collective over a sharded model's ranks. Their number, the shards and the capacities may differ from those at the
    dump. See `DynamicCollection.load`. Of static tables, the rows in the dump are overwritten.

    Args:
        path: the folder of a dump, or several in order: a full dump and its deltas.
        model: a `DistributedModelParallel` or any module. It has the dynamic tables of the dump.
        optimizer_state: whether to load optimizer states; False sets those of rows of dynamic tables to 0.

    Raises:
        DumpError: no dump, a damaged one, one of other tables or settings, or a delta whose base the tables do not
            have. An error on one rank is raised on all ranks.
        ValueError: two tables of one name; gradients that wait for a step.
    """
    tables = _ready(model, "load_tables")
    env, result = tables.env, Restored({}, {})
    for one in [path] if isinstance(path, str | Path) else list(path):
        folder, entries = agreed(env, partial(_opened, one, tables, optimizer_state))
        result = result.then(agreed(env, partial(_filled, folder, entries, tables, optimizer_state)))
    return result


def _opened(path: str | Path, tables: _Tables, optimizer_state: bool) -> tuple[Path, dict[str, Entry]]:
    """The folder and tables of a dump, which fit the model."""
    ((folder, entries, _),) = folders_of(path, tables.env.rank, tables.env.world_size)
    refuse_other_tables(folder, entries, tables.dynamic)
    for name, entry in entries.items():
        if name not in tables.names:
            raise DumpError(
                f"{folder} has a table {name!r}, and the model has {tables.names}. Fix: add it to the model"
            )
        for shard in tables.dynamic.get(name, ()):
            check_dynamic(folder, name, entry, shard.table, optimizer_state)
        for own in tables.static.get(name, ()):
            states = own.states if optimizer_state else {}
            check_shape(folder, name, entry, own.size[1], own.weight.dtype, states)
            if entry["kind"] != "static" or entry["rows"] != own.size[0]:
                raise DumpError(
                    f"{folder} has a {entry['kind']} table {name!r}, and the model a static one of {own.size[0]:,} rows"
                )
    return folder, entries


@torch.no_grad()
def _filled(folder: Path, entries: Mapping[str, Entry], tables: _Tables, optimizer_state: bool) -> Restored:
    rows, lost = dict.fromkeys(entries, 0), dict.fromkeys(entries, 0)
    for name, entry in entries.items():
        for shard in tables.dynamic.get(name, ()):
            read, gone = read_dynamic(folder, entry, shard.table, optimizer_state)
            rows[name] += read * shard.primary
            lost[name] += gone * shard.primary
        for own in tables.static.get(name, ()):
            rows[name] += _read_static(folder, entry, own, optimizer_state)
    return Restored(rows, lost)


def _read_static(folder: Path, entry: Entry, shard: _Static, optimizer_state: bool) -> int:
    """Overwrites the rows of a shard that a dump has. Returns how many, of the first columns."""
    reader, many = FileReader(folder, entry), 0
    for columns, files in reader.pieces((0, shard.size[1])):
        for file in reader.opened(files):
            local = file.get_tensor("ids").to(shard.weight.device) - shard.first_row
            own = ((local >= 0) & (local < len(shard.weight))).nonzero().squeeze(1)
            states = shard.states if optimizer_state else {}
            at = (shard.columns, own, local[own], shard.weight, states)
            copy_values(file, set(file.keys()), columns, *at)
            many += len(own) if columns[0] == 0 and shard.columns[0] == 0 else 0
    return many


def _ready(model: nn.Module, action: str) -> _Tables:
    """The tables of a model, unless gradients wait for their step. All ranks return or raise alike."""
    env: ShardingEnv = getattr(model, "dense_env", ShardingEnv.from_local(1, 0))

    def read() -> _Tables:
        fused = getattr(model, "fused_optimizer", None)
        if fused is not None:
            fused.refuse_deferred(action)
        return _Tables(model)

    return agreed(env, read)
