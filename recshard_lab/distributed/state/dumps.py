"""Dumps of a model's tables, sharded or not.

Every rank writes the files of its shards, and rank 0 the manifest. Reading needs neither the same ranks nor the same
shards: a rank reads the rows and columns of its own.

Shape letters: N rows, E rows of a table, d columns of a shard.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.comm import ShardingEnv, agreed, from_first_rank, gathered
from recshard_lab.distributed.sharded_collections import ShardedCollection
from recshard_lab.distributed.state.forms import sharded_tensor
from recshard_lab.distributed.state.moves import Move, Tiles, in_file, primary_rows, region
from recshard_lab.distributed.state.table import ShardedTable, TableTensor
from recshard_lab.embedding import EmbeddingBagCollection, EmbeddingCollection, FusedCollection, dtype_to_data_type
from recshard_lab.embedding.dynamic.collections import DynamicCollection
from recshard_lab.embedding.dynamic.index_rounds import partitions_of
from recshard_lab.embedding.dynamic.row_files import (
    Dumped,
    DumpError,
    Entry,
    FileReader,
    FileWriter,
    Paths,
    Restored,
    Shards,
    Since,
    check_shape,
    check_tables,
    copy_values,
    fill_tables,
    read_dumps,
    steps_of,
    write_dump,
    write_static,
    write_tables,
)
from recshard_lab.embedding.dynamic.stores import Chain, Rows
from recshard_lab.embedding.dynamic.table import DynamicTable
from recshard_lab.embedding.managed_collision.modules import ManagedEmbeddingConfig
from recshard_lab.sharding import ParameterSharding, Shard

# Rows of dynamic tables that are in tiers below the fast one, as matrices over all ranks.
#
# A shard has whole partitions. In the order of partitions and ids, the rows of a shard are therefore a range of all
# rows, and its tensors a tiling of matrices that `moves.move` moves and checkpoints save::
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
"""The name of a table's weight in state dicts, and the position of a shard in its list."""

Local: TypeAlias = dict[Key, dict[str, Tensor]]
"""The matrices of shards on this rank, by part."""

_INDEX = TableTensor("index", "row", torch.int64, 6)
"""Columns: id, score, `Rows.touched`, slot in the tier, buckets of the tier, number of the tier."""
_BATCH = 1 << 16


class TierRows:
    """The rows of the tiers of the tables of a model.

    The constructor reads this rank's tiers, then `exchange` is collective. To move them to other shards, call `moves`,
    `clear` and `fill`, with all ranks in between; `drop` and `undo` revert them.

    Args:
        collections: module path -> collection.
        folder: of the files. Default: the system's folder for temporary files.
        reads: whether to read the tiers. Without, the tables have no rows here until `expect`.

    Attributes:
        counts: table -> rows of each partition.
    """

    def __init__(
        self, collections: Mapping[str, ShardedCollection], folder: str | Path | None = None, *, reads: bool = True
    ) -> None:
        self.collections, self.folder = collections, folder
        tables = self._tables()
        self.configs: dict[str, Any] = {key: own.config for key, own in tables.items()}
        self.parts = {
            key: [_INDEX, own.model_parts()[0], *(part for part in own.state_parts if part.extent != "table")]
            for key, own in tables.items()
        }
        self.shards = {key: own.sharding.shards for key, own in tables.items()}
        local = self._local_tables()
        self.chains = {key: _chain(table) for key, table in local.items()}
        self.local = {key: self._read(key[0], table) for key, table in local.items()} if reads else {}
        self.counts = {name: [0] * table.partitions for name, table in self.configs.items()}
        self._new: dict[Key, Chain] = {}
        self._targets: Local = {}
        self._cleared = False

    def _tables(self) -> dict[str, ShardedTable]:
        return {
            key: own
            for path, collection in self.collections.items()
            for key, own in collection.shards_by_weight(path).items()
            if getattr(own.config, "tiers", ())
        }

    def _local_tables(self) -> dict[Key, DynamicTable]:
        tables = self._tables()
        return {(k, n): kernel.tables[slot] for k, own in tables.items() for n, (kernel, slot) in own.dynamic.items()}

    def _placed(self) -> dict[str, list[Shard]]:
        """The shards of each table at its largest size, as of now."""
        return {
            key: list(collection.shardings[config.name].shards)
            for path, collection in self.collections.items()
            for key, config in zip(collection.shards_by_weight(path), collection.tables, strict=True)
            if key in self.configs
        }

    def _tiles(
        self, name: str, part: TableTensor, shards: Sequence[Shard] | None = None, local: Local | None = None
    ) -> Tiles:
        """All rows of a table: those before, or those of other shards."""
        ranges = self._ranges(name, self.shards[name] if shards is None else shards)
        local = self.local if local is None else local
        held = {number: local[name, at][part.name] for number, at in enumerate(ranges) if (name, at) in local}
        return Tiles(part.dtype, part.shards(list(ranges.values())), held)

    # ---- reading ----

    @torch.no_grad()
    def _read(self, name: str, table: DynamicTable) -> dict[str, Tensor]:
        with table.lock:
            chain = _chain(table)
            table._lose(chain.store_waiting())
            every = [rows.ids for _, rows in chain.levels(_BATCH, table._in_fast)]
            ids = torch.cat([torch.empty(0, dtype=torch.int64), *every])
            known, order = ids.sort()
            partition = partitions_of(known, table.index.partitions)
            at = torch.empty_like(order)
            at[partition.argsort(stable=True)] = torch.arange(len(ids))  # of each known id
            tensors = self._allocate(name, len(ids), table)
            for level, rows in chain.levels(_BATCH, table._in_fast):
                to = at[torch.searchsorted(known, rows.ids)]
                places = chain.stores[level].places(rows.ids)
                numbers = torch.full_like(rows.ids, level)
                tensors["index"][to] = torch.stack([*rows[:3], *places.unbind(1), numbers], dim=1)
                tensors["weight"][to] = rows.weight
                for part in self.parts[name][2:]:
                    tensors[part.name][to] = rows.states[part.name].view(len(to), -1)
        return tensors

    def _allocate(self, name: str, many: int, table: DynamicTable) -> dict[str, Tensor]:
        """Matrices for the rows of a shard, in a file."""
        width = table.columns[1] - table.columns[0]
        return in_file({p.name: (p.size(many, width), p.dtype) for p in self.parts[name]}, self.folder, "tiers")

    def _allocated(self, shards: Mapping[str, Sequence[Shard]]) -> Local:
        """Matrices for the rows of every shard on this rank."""
        ranges = {name: self._ranges(name, shards[name]) for name in self.parts}
        return {
            key: self._allocate(key[0], ranges[key[0]][key[1]].num_rows if key[1] in ranges[key[0]] else 0, table)
            for key, table in self._local_tables().items()
        }

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

    def moves(self) -> list[Move]:
        """Everything, from the shards before to those of the collection now. Allocates the latter."""
        after = {key: own.sharding.shards for key, own in self._tables().items()}
        self._targets = self._allocated(after)
        return [
            Move(self._tiles(name, part), self._tiles(name, part, after[name], self._targets))
            for name, parts in self.parts.items()
            for part in parts
        ]

    def clear(self) -> None:
        """Removes the rows of the shards before from their tiers. All ranks do so before any rank calls `fill`."""
        self._cleared = True
        for chain in self.chains.values():
            chain.clear()

    def fill(self) -> None:
        """Stores what the moves have brought."""
        for key, table in self._local_tables().items():
            self._new[key] = _chain(table)
            self._store(table, self._targets[key])

    def drop(self) -> None:
        """Reverts `fill`. All ranks do so before any rank calls `undo`."""
        for chain in self._new.values():
            chain.clear()

    def undo(self) -> None:
        """Reverts `clear`, for the shards before, which the collection has again."""
        for key, table in self._local_tables().items():
            if self._cleared or table.tiers is not self.chains[key]:
                self.chains[key].close()
                _chain(table).clear()
                self._store(table, self.local[key])

    @torch.no_grad()
    def _store(self, table: DynamicTable, tensors: Mapping[str, Tensor]) -> None:
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
            for part in parts if total else ():
                tiles, size = self._tiles(name, part), part.size(total, self.configs[name].embedding_dim)
                if env.pg is not None:
                    found[name][part.name] = sharded_tensor(tiles.primary(part.extent), size, env)
                    continue
                found[name][part.name] = whole = tiles.whole(size)
                for at, shard in zip(self._ranges(name, self.shards[name]), tiles.shards, strict=True):
                    self.local[name, at][part.name] = region(whole, shard)  # shares its memory from now on
        return found

    def expect(self, counts: Mapping[str, Sequence[int]]) -> None:
        """Allocates memory for the rows of a checkpoint, all zeros. `entries` shares it. Then call `replace`."""
        self.counts = {name: list(own) for name, own in counts.items()}
        self.local = self._allocated(self.shards)

    def copies(self) -> list[Move]:
        """Copies what a checkpoint has once to every column shard. Collective."""
        pairs = ((name, part) for name, parts in self.parts.items() for part in parts)
        return [copies for name, part in pairs for copies in self._tiles(name, part).replicas(part.extent)]

    def replace(self) -> None:
        """Makes the rows of a checkpoint those of the tiers."""
        for key, table in self._local_tables().items():
            _chain(table).clear()
            self._store(table, self.local[key])


def _chain(table: DynamicTable) -> Chain:
    assert table.tiers is not None
    return table.tiers


def tables_in(path: str, module: nn.Module, env: ShardingEnv) -> Iterator[tuple[str, ShardedTable]]:
    """Names of weights in state dicts, and tables, of a module that is a collection; every rank has unsharded ones."""
    if isinstance(module, ShardedCollection):
        yield from module.shards_by_weight(path).items()
    elif isinstance(module, FusedCollection | EmbeddingBagCollection | EmbeddingCollection):
        states = module.optimizer_states() if isinstance(module, FusedCollection) else {}
        configs = {table.name: table for table in module._tables}
        for key, weight in module.named_parameters(remove_duplicate=False):
            config = replace(configs[key.split(".")[-2]], data_type=dtype_to_data_type(weight.dtype))
            whole = [Shard(rank, (0, weight.shape[0]), (0, weight.shape[1])) for rank in range(env.world_size)]
            sharding = ParameterSharding("data_parallel", shards=whole)
            own = {env.rank: weight.detach()}, {env.rank: states.get(config.name, {})}
            yield f"{path}." * bool(path) + key, ShardedTable(config, sharding, *own, env)


class _Tables:
    """The tables of a model by name.

    Raises:
        ValueError: two tables of one name.
    """

    def __init__(self, model: nn.Module, env: ShardingEnv) -> None:
        self.env = env
        self.replica = getattr(model, "replica", 0)
        own_env: ShardingEnv = getattr(model, "env", env) if hasattr(model, "dense_env") else env
        self.names: list[str] = []
        #: shards on this rank, each with the first step whose backward is to come
        self.dynamic: dict[str, Shards] = {}
        self.static: dict[str, ShardedTable] = {}
        for path, module in getattr(model, "_bare", model).named_modules():
            if isinstance(module, DynamicCollection):
                self._know(module.tables())
                self.dynamic |= module._shards()
                continue
            for key, shards in tables_in(path, module, own_env):
                name = shards.config.name
                self._know([name])
                if isinstance(shards.config, ManagedEmbeddingConfig):
                    continue  # its rows mean nothing without the index, which checkpoints have
                if shards.config.dynamic:
                    held = shards.dynamic.values()
                    self.dynamic[name] = [(kernel.tables[n], kernel.pending()[n]) for kernel, n in held]
                else:
                    self.static[key] = shards

    def static_in(self, entries: Mapping[str, Entry]) -> Iterator[tuple[str, Entry, ShardedTable]]:
        """Name, entry and table of the static tables that a dump has."""
        for table in self.static.values():
            if table.config.name in entries:
                yield table.config.name, entries[table.config.name], table

    def _know(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self.names:
                raise ValueError(f"two tables are named {name!r}, and a dump names them alike. Fix: rename one")
            self.names.append(name)


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
            a `ModelDeltaTracker` of steps returns them. Of other ranks' rows, each rank writes none. Other static
            tables are not written. Default: none.

    Raises:
        DumpError: ``path`` exists and is not a dump, or ``since`` is not a dump of these tables.
        OSError: an error on any rank while writing, such as a full disk. The previous dump is complete.
        ValueError: ``rows`` names no static table; two tables of one name; gradients that wait for a step.
    """
    tables = _ready(model, "dump_tables")
    getattr(model, "level_tables", lambda: None)()  # slots are counted over a table of one size

    def write(writer: FileWriter) -> list[dict[str, Entry]]:
        return _written(writer, tables, steps_of(since), dict(rows or {})) if tables.replica == 0 else []

    env = tables.env
    return write_dump(path, write, env.rank, first=partial(from_first_rank, env), every=partial(gathered, env))


def _written(writer: FileWriter, tables: _Tables, steps: Any, rows: Mapping[str, Tensor]) -> list[dict[str, Entry]]:
    """Writes this rank's shards."""
    unknown = [key for key in rows if key not in tables.static]
    if unknown:
        raise ValueError(
            f"rows= names {unknown[0]!r}, which is no static table. Fix: use one of {sorted(tables.static)}"
        )
    entries = write_tables(writer, tables.dynamic, steps)
    for key, ids in rows.items():
        table = tables.static[key]
        shards, states = table.sharding.shards, table.states
        first = {position for position, _ in primary_rows(shards, "element")}
        for position in first & table.local_weights.keys():
            shard, weight, own = shards[position], table.local_weights[position], states.get(position, {})
            entry = write_static(writer, ids, table.size, shard.rows[0], shard.cols, weight, own)
            entries.append({table.config.name: entry})
    return entries


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
    env = tables.env
    check = partial(_check, tables=tables, optimizer_state=optimizer_state)
    fill = partial(_filled, tables=tables, optimizer_state=optimizer_state)
    return read_dumps(path, check, fill, (env.rank, env.world_size), together=partial(agreed, env))


def _check(folder: Path, entries: Mapping[str, Entry], tables: _Tables, optimizer_state: bool) -> None:
    """Raises DumpError if the tables of a dump do not fit the model."""
    check_tables(folder, entries, tables.dynamic, optimizer_state)
    unknown = [name for name in entries if name not in tables.names]
    if unknown:
        raise DumpError(
            f"{folder} has a table {unknown[0]!r}, and the model has {tables.names}. Fix: add it to the model"
        )
    for name, entry, table in tables.static_in(entries):
        (rows, dim), kind = table.size, entry["kind"]
        for position, weight in table.local_weights.items():
            states = table.states.get(position, {}) if optimizer_state else {}
            check_shape(folder, name, entry, dim, weight.dtype, states)
        if kind != "static" or entry["rows"] != rows:
            raise DumpError(f"{folder} has a {kind} table {name!r}, and the model a static one of {rows:,} rows")


@torch.no_grad()
def _filled(folder: Path, entries: Mapping[str, Entry], tables: _Tables, optimizer_state: bool) -> Restored:
    found = Restored(dict.fromkeys(entries, 0), dict.fromkeys(entries, 0))
    found = found.then(fill_tables(folder, entries, tables.dynamic, optimizer_state))
    for name, entry, table in tables.static_in(entries):
        for position, weight in table.local_weights.items():
            states = table.states.get(position, {}) if optimizer_state else {}
            shard = table.sharding.shards[position]
            found.rows[name] += _read_static(FileReader(folder, entry), shard, weight, states)
    return found


def _read_static(reader: FileReader, shard: Shard, weight: Tensor, states: Mapping[str, Tensor]) -> int:
    """Overwrites the rows of a shard that a dump has. Returns how many, of the first columns."""
    many = 0
    for columns, file, ids in reader.rows((0, reader.entry["dim"])):
        local = ids.to(weight.device) - shard.rows[0]
        own = ((local >= 0) & (local < shard.num_rows)).nonzero().squeeze(1)
        copy_values(file, columns, shard.cols, own, local[own], weight, states)
        many += len(own) if columns[0] == 0 and shard.cols[0] == 0 else 0
    return many


def _ready(model: nn.Module, action: str) -> _Tables:
    """The tables of a model, unless gradients wait for their step. All ranks return or raise alike."""
    env: ShardingEnv = getattr(model, "dense_env", ShardingEnv.from_local(1, 0))

    def read() -> _Tables:
        fused = getattr(model, "fused_optimizer", None)
        if fused is not None:
            fused.refuse_deferred(action)
        return _Tables(model, env)

    return agreed(env, read)
