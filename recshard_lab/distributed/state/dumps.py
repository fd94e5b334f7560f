"""Dumps of a model's tables, sharded or not.

Every rank writes the files of its shards, and rank 0 the manifest. Reading needs neither the same ranks nor the same
shards: a rank reads the rows and columns of its own.

Shape letters: N rows, E rows of a table, d columns of a shard.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.comm import ShardingEnv, agreed, from_first_rank, gathered
from recshard_lab.complete_folders import Staging, described
from recshard_lab.distributed.sharded_collections import ShardedCollection
from recshard_lab.distributed.state.parts import primary_rows
from recshard_lab.embedding import EmbeddingBagCollection, EmbeddingCollection, FusedCollection
from recshard_lab.embedding.dynamic.collections import DynamicCollection
from recshard_lab.embedding.dynamic.dumps.collection import (
    Paths,
    Since,
    first_step,
    folders_of,
    refuse_other_tables,
)
from recshard_lab.embedding.dynamic.dumps.files import (
    DUMP,
    Dumped,
    DumpError,
    Entry,
    FileReader,
    FileWriter,
    Restored,
    dtype_name,
    joined,
    safetensors_torch,
    steps_of,
)
from recshard_lab.embedding.dynamic.dumps.read import check_dynamic, check_shape, copy_values, read_dynamic
from recshard_lab.embedding.dynamic.dumps.write import write_dynamic, write_rows
from recshard_lab.embedding.dynamic.kernel import DynamicKernel
from recshard_lab.embedding.dynamic.table import DynamicTable


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
