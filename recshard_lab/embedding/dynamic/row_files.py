"""What the folder of a dump contains: safetensors files of rows, and a manifest in JSON.

::

    00000-000000.safetensors    rank 0's first rows of a table: ids [M], weight [M, d], states.momentum1 [M], ...
    manifest.json               per table its steps, size and settings, and for each range of columns its files

A folder is complete or absent (`recshard_lab.complete_folders`). Every rank writes its own files. Files of a table
whose ids are hashed name the 64ths of the hash that they have, so that a rank opens only files with ids of its shards.

Shape letters: M rows of a file, K ids, d columns.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from recshard_lab.complete_folders import MANIFEST, FolderFormat, Staging, described
from recshard_lab.embedding.dynamic.config import MOST_PARTITIONS, SLOTS, DynamicEmbeddingConfig
from recshard_lab.embedding.dynamic.index import ScoredIndex
from recshard_lab.embedding.dynamic.index_rounds import partitions_of
from recshard_lab.embedding.dynamic.stores.base import RowFormat, Rows
from recshard_lab.embedding.dynamic.table import DynamicTable

FILE_BYTES = 64 * 2**20


class DumpError(ValueError):
    """A dump that is missing, incomplete, or does not fit the tables."""


DUMP = FolderFormat(
    noun="dump", name="recshard_lab dump", version=1, error=DumpError, fix="pass a folder that dump() wrote"
)
Entry: TypeAlias = dict[str, Any]
"""A table in the manifest."""


@dataclass(frozen=True)
class Dumped:
    """The result of a dump.

    Attributes:
        path: the folder.
        rows: table -> rows written, over all ranks.
        present: table -> rows of the table, over all ranks. A full dump of a dynamic table writes all.
        steps: table -> its step at the dump.
        bytes: of all files.
    """

    path: Path
    rows: dict[str, int]
    present: dict[str, int]
    steps: dict[str, int]
    bytes: int

    @classmethod
    def of(cls, path: Path, manifest: Mapping[str, Any]) -> Dumped:
        """What a manifest says."""
        rows, present, steps = {}, {}, {}
        for name, entry in manifest["tables"].items():
            first = [piece for piece in entry["pieces"] if piece["columns"][0] == 0]
            files = [file for piece in first for file in piece["files"]]
            rows[name] = sum(file["rows"] for file in files)
            present[name] = rows[name] + sum(file["kept"] for file in files)
            steps[name] = entry["step"]
        return cls(path, rows, present, steps, sum(file["bytes"] for file in manifest["files"].values()))


@dataclass(frozen=True)
class Restored:
    """The result of a load.

    Attributes:
        rows: table -> rows of this rank that were read from files.
        lost: table -> rows of this rank that found no place, those with the lowest scores. `DynamicTable.on_evict` is
            passed them, and they count as evictions.
    """

    rows: dict[str, int]
    lost: dict[str, int]

    def then(self, later: Restored) -> Restored:
        """Both loads, one after the other."""
        pairs = (self.rows, later.rows), (self.lost, later.lost)
        return Restored(*({n: one.get(n, 0) + other.get(n, 0) for n in one | other} for one, other in pairs))


class FileWriter:
    """Writes the files of one rank.

    Args:
        folder: an existing folder.
        rank: its number.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank, self.paths = folder, rank, list[Path]()

    def write(self, tensors: Mapping[str, Tensor]) -> str:
        """Writes a file to the disk (fsync). Returns its name."""
        name = f"{self.rank:05}-{len(self.paths):06}.safetensors"
        path = self.folder / name
        safetensors_torch().save_file({key: tensor.cpu().contiguous() for key, tensor in tensors.items()}, str(path))
        with path.open("rb") as file:
            os.fsync(file.fileno())
        self.paths.append(path)
        return name

    def index_file(self, tensors: Mapping[str, Tensor], *, hashed: bool = True) -> Entry:
        """Writes ``ids [M]`` or ``kept_ids [K]`` with what belongs to them. Returns the file's entry."""
        ids = tensors["ids"] if "ids" in tensors else tensors["kept_ids"]
        span = [0, MOST_PARTITIONS]
        if hashed and len(ids):
            parts = partitions_of(ids, MOST_PARTITIONS)
            span = [int(parts.min()), int(parts.max()) + 1]
        rows, kept = (len(tensors[key]) if key in tensors else 0 for key in ("ids", "kept_ids"))
        return {"file": self.write(tensors), "rows": rows, "kept": kept, "hash": span}


class FileReader:
    """Reads the files of a table.

    Args:
        folder: the dump.
        entry: the table in its manifest.
    """

    def __init__(self, folder: Path, entry: Entry) -> None:
        self.folder, self.entry = folder, entry

    def pieces(self, columns: tuple[int, int]) -> Iterator[tuple[tuple[int, int], list[Entry]]]:
        """Columns and files of every piece that has some of these columns."""
        for piece in self.entry["pieces"]:
            first, end = piece["columns"]
            if first < columns[1] and columns[0] < end:
                yield (first, end), piece["files"]

    def rows(
        self, columns: tuple[int, int], span: tuple[int, int] | None = None
    ) -> Iterator[tuple[tuple[int, int], Any, Tensor]]:
        """Its columns, the opened file and its ids, for every file with rows of some of these columns."""
        for own, files in self.pieces(columns):
            for file in self.opened(files, span):
                if "ids" in set(file.keys()):
                    yield own, file, file.get_tensor("ids")

    def opened(self, files: Iterable[Entry], span: tuple[int, int] | None = None) -> Iterator[Any]:
        """Every file that may have ids in these 64ths of the hash, as safetensors opens it."""
        for file in files:
            low, high = file["hash"]
            if span is None or (low < span[1] and span[0] < high):
                try:
                    with safetensors_torch().safe_open(str(self.folder / file["file"]), framework="pt") as opened:
                        yield opened
                except OSError as error:
                    raise DumpError(f"{self.folder / file['file']} could not be read: {error}") from error


def settings_of(config: DynamicEmbeddingConfig) -> dict[str, Any]:
    """What the rows of a dynamic table depend on, beside its name and what a dump has of each row.

    ``weight_init`` are the ends of the initial values. None stands for the default, which follows ``max_capacity``.

    >>> settings_of(DynamicEmbeddingConfig("user", 4, capacity=128, seed=3))
    {'seed': 3, 'weight_init': None, 'absent': 'initial', 'evict': 'lru'}
    """
    default = config.weight_init_min is None and config.weight_init_max is None
    return {
        "seed": config.seed,
        "weight_init": None if default else list(config.init_range),
        "absent": config.absent,
        "evict": "a function of ids" if callable(config.evict) else config.evict,
    }


def steps_of(since: int | str | Path | None) -> Mapping[str, Entry] | int | None:
    """The first step whose rows a dump has: of each table, as the manifest of an earlier dump says, or of all."""
    if since is None or (isinstance(since, int) and not isinstance(since, bool)):
        return since
    if not isinstance(since, str | Path):
        raise ValueError(f"since={since!r} is not supported. Fix: pass the path of an earlier dump, or a step")
    folder = DUMP.readable(since)
    return {name: entry["next"] for name, entry in DUMP.manifest_of(folder)["tables"].items()}


def joined(by_rank: Iterable[Mapping[str, Entry]]) -> dict[str, Entry]:
    """The tables of a manifest, from what each rank has written."""
    tables: dict[str, Entry] = {}
    for entries in by_rank:
        for name, entry in entries.items():
            other = tables.setdefault(name, {**entry, "pieces": [], "counts": []})
            other["step"] = max(other["step"], entry["step"])
            other["pieces"] += entry["pieces"]
            other["counts"] += entry["counts"]
            other["next"] = {key: min(step, other["next"][key]) for key, step in entry["next"].items()}
    return tables


def safetensors_torch() -> Any:
    """The module that reads and writes files.

    Raises:
        ValueError: the package is not installed.
    """
    try:
        import safetensors.torch
    except ImportError:
        raise ValueError(
            'dumps need the package safetensors, which is not installed. Fix: pip install "recshard-lab[safetensors]"'
        ) from None
    return safetensors.torch


def dtype_name(dtype: torch.dtype) -> str:
    """``float32``."""
    return str(dtype).removeprefix("torch.")


# Writes tables.
#
# A delta has the rows that were touched since a step, and the ids and slots of all others. What is neither was erased
# or evicted.
#
# Shape letters: M rows, C slots, d columns.


def write_dynamic(
    writer: FileWriter,
    table: DynamicTable,
    since: Mapping[str, int] | int | None,
    pending: int | None,
) -> Entry:
    """Writes a table or a shard. The shards of its first columns write ids with scores; the others have the same ids.

    Args:
        writer: of this rank.
        table: the table.
        since: the first step whose rows are written; of rows and of admission, as ``next`` of an earlier dump has it.
        pending: the first step whose backward is to come; None for none.

    Returns:
        The table in the manifest.
    """
    with table.lock:
        index, counts = table.index, table.admission_counts
        own = since if isinstance(since, Mapping) else {"rows": since, "admission": None}
        step, primary = index.step, table.columns[0] == 0
        entry: Entry = {
            **_entry("dynamic", table.config.embedding_dim, table.weight, table.states),
            "settings": settings_of(table.config),
            "step": step,
            "epoch": index.epoch,
            "since": own["rows"],
            "next": {
                "rows": step + 1 if pending is None else min(pending, step + 1),
                "admission": 0 if counts is None else counts.step + 1,
            },
            "geometry": _geometry(index),
            "pieces": [
                {"columns": list(table.columns), "files": list(_row_files(writer, table, own["rows"], primary))}
            ],
        }
        if counts is not None:
            entry |= {"counts_step": counts.step, "counts_geometry": _geometry(counts)}
        if counts is not None and primary:
            files = _index_files(counts, own["admission"], True, FILE_BYTES // 32)
            entry["counts"] = [writer.index_file(tensors) for _, tensors in files]
        return entry


def write_static(
    writer: FileWriter,
    rows: Tensor,
    size: tuple[int, int],
    first_row: int,
    columns: tuple[int, int],
    weight: Tensor,
    states: Mapping[str, Tensor],
) -> Entry:
    """Writes rows of a shard of a static table. Returns the table in the manifest.

    Args:
        writer: of this rank.
        rows: ``[M]`` int64, of the whole table; those of other shards are left out.
        size: of the whole table.
        first_row: the table's row that is the first of the shard.
        columns: of the shard.
        weight: ``[E, d]``. states: name -> ``[E]``, ``[E, d]`` or one number for the table.
    """
    local = rows.to(weight.device) - first_row
    local = local[(local >= 0) & (local < len(weight))]
    files = []
    for part in local.split(_rows_a_file(weight, states)):
        tensors = {"ids": part + first_row} | _values(part, weight, states, columns[0] == 0)
        files.append(writer.index_file(tensors, hashed=False))
    pieces = [{"columns": list(columns), "files": files}]
    return _entry("static", size[1], weight, states) | {"rows": size[0], "step": 0, "since": None, "pieces": pieces}


def _entry(kind: str, dim: int, weight: Tensor, states: Mapping[str, Tensor]) -> Entry:
    """What the manifest has of each kind of table."""
    kinds = {"kind": kind, "dim": dim, "dtype": dtype_name(weight.dtype), "states": sorted(states)}
    return kinds | {"next": {}, "counts": []}


def _geometry(index: ScoredIndex) -> dict[str, int]:
    """What the slots of ids depend on."""
    return {"partitions": index.partitions, "buckets": index.buckets, "choices": index.choices}


def _row_files(writer: FileWriter, table: DynamicTable, since: int | None, primary: bool) -> Iterator[Entry]:
    """The files of a table's rows. Those in tiers below the fast one have slot -1."""
    many = _rows_a_file(table.weight, table.states)
    for slots, tensors in _index_files(table.index, since, primary, many):
        if slots is not None:
            tensors |= _values(slots, table.weight, table.states, primary)
        yield writer.index_file(tensors)
    for rows in () if table.tiers is None else table.tiers.batches(many, table._in_fast):
        fresh = torch.ones_like(rows.ids, dtype=torch.bool) if since is None else rows.touched >= since
        kept, own = rows.ids[~fresh], rows.at(fresh)
        if primary and len(kept):
            yield writer.index_file({"kept_ids": kept, "kept_slots": torch.full_like(kept, -1)})
        if len(own.ids):
            tensors = {"ids": own.ids} | _values(slice(None), own.weight, own.states, primary)
            if primary:
                tensors |= {"scores": own.scores, "touched": own.touched, "slots": torch.full_like(own.ids, -1)}
            yield writer.index_file(tensors)


def _index_files(
    index: ScoredIndex, since: int | None, primary: bool, many: int
) -> Iterator[tuple[Tensor | None, dict[str, Tensor]]]:
    """What the files of an index have: ids and slots that a delta leaves, then slots touched since a step.

    Yields those slots, at most ``many`` at a time, or None, and the tensors of a file. Others than the ``primary``
    shard write only ids.
    """
    slots = index.slots()
    fresh = torch.ones_like(slots, dtype=torch.bool) if since is None else index.touched[slots] >= since
    kept = slots[~fresh]
    for some in kept.split(FILE_BYTES // 16) if primary and len(kept) else ():
        yield None, {"kept_ids": index.keys[some], "kept_slots": _in_table(index, some)}
    for some in slots[fresh].split(many):
        tensors = {"ids": index.keys[some]}
        if primary:
            scores, touched = index.accesses[some].unbind(1)
            tensors |= {"scores": scores, "touched": touched, "slots": _in_table(index, some)}
        yield some, tensors


def _in_table(index: ScoredIndex, slots: Tensor) -> Tensor:
    """Slots of a shard, counted from the first one of the table. Half the bytes where they fit."""
    slots = slots + index.shard[0] * index.buckets * SLOTS
    return slots.int() if index.partitions * index.buckets * SLOTS < 2**31 else slots


def _values(rows: Tensor | slice, weight: Tensor, states: Mapping[str, Tensor], primary: bool) -> dict[str, Tensor]:
    """Weight and optimizer states of rows. Numbers that belong to whole rows or the table are written once."""
    values = {"weight": weight[rows]}
    for name, state in states.items():
        if state.shape == weight.shape:
            values[f"states.{name}"] = state[rows]
        elif primary:
            values[f"states.{name}"] = state[rows] if is_by_row(state, weight) else state.reshape(-1)
    return values


def is_by_row(state: Tensor, weight: Tensor) -> bool:
    """Whether a state has one entry per row."""
    return state.dim() > 0 and state.shape[0] == len(weight)


def _rows_a_file(weight: Tensor, states: Mapping[str, Tensor]) -> int:
    by_row = {name: state for name, state in states.items() if is_by_row(state, weight)}
    return max(1, FILE_BYTES // (32 + RowFormat.of(weight, by_row).row_bytes))


# Reads tables. A table may have another size, other columns and other partitions than the one that was dumped.
#
# Shape letters: M rows, K ids, C slots, d columns.


_COLUMNS = ("ids", "scores", "touched", "slots"), ("kept_ids", "kept_slots")

_DEPENDS = {
    "seed": "the rows of new ids",
    "weight_init": "the rows of new ids",
    "absent": "what ids without a row look up",
    "evict": "the meaning of scores",
}  # what depends on a setting


def check_dynamic(folder: Path, name: str, entry: Entry, table: DynamicTable, optimizer_state: bool) -> None:
    """Checks that a table of a dump fits this one.

    Raises:
        DumpError: other columns, number format, settings, optimizer states or admission, or a delta whose base is
            missing.
    """
    dtype, states = table.weight.dtype, table.states if optimizer_state else {}
    check_rows(folder, name, entry, table.config.embedding_dim, dtype, states, table.index.step)
    there = entry.get("settings", {})
    for key, value in settings_of(table.config).items():
        if value != there.get(key):
            raise DumpError(
                f"table {name!r} has {key}={value!r}, and in {folder} {key}={there.get(key)!r}: {_DEPENDS[key]} would "
                f"differ. Fix: build the table with that {key.replace('weight_init', 'weight_init_min and _max')}"
            )
    if table.admission_counts is not None and not entry["counts"]:
        raise DumpError(f"{folder} has no counts of absent ids of table {name!r}, which admit= needs")


def check_rows(
    folder: Path, name: str, entry: Entry, dim: int, dtype: torch.dtype, states: Iterable[str], step: int
) -> None:
    """Checks that rows of a dynamic table of a dump fit a table at a step.

    Raises:
        DumpError: as of `check_dynamic`.
    """
    check_shape(folder, name, entry, dim, dtype, states)
    if entry["kind"] != "dynamic":
        raise DumpError(f"{folder} has a static table {name!r}, and this one is dynamic")
    since = entry["since"]
    if since is not None and not since - 1 <= step <= entry["step"]:
        raise DumpError(
            f"{folder} has the rows of table {name!r} that changed from step {since} to {entry['step']}, and the table "
            f"is at step {step}. Fix: load the dump before it first"
        )


def check_shape(folder: Path, name: str, entry: Entry, dim: int, dtype: torch.dtype, states: Iterable[str]) -> None:
    """Checks columns, number format and optimizer states.

    Raises:
        DumpError: they differ.
    """
    here = (dim, dtype_name(dtype))
    if here != (entry["dim"], entry["dtype"]):
        raise DumpError(
            f"table {name!r} has {here[0]} columns of {here[1]}, and in {folder} {entry['dim']} of {entry['dtype']}. "
            f"Fix: build the table with that embedding_dim and data_type"
        )
    missing = sorted(set(states) - set(entry["states"]))
    if missing:
        raise DumpError(
            f"table {name!r} has the optimizer states {sorted(states)}, and {folder} has {entry['states']}. "
            f"Fix: optimizer_state=False, which sets them to 0, or the optimizer that wrote the dump"
        )


@torch.no_grad()
def read_dynamic(folder: Path, entry: Entry, table: DynamicTable, optimizer_state: bool) -> tuple[int, int]:
    """Makes a table, or a shard, that of a dump. `check_dynamic` precedes.

    It reads one file at a time. Besides, ids, scores, steps and slots of the rows with a slot are in memory, 32 bytes
    a row; without tiers below the fast one, those of all rows.

    Returns:
        Rows in the files, and rows that the table lost: those without a slot, or with tiers without a place in them.
    """
    with table.lock:
        reader, index, has_tiers = FileReader(folder, entry), table.index, table.tiers is not None
        first = [file for _, files in reader.pieces((0, 1)) for file in files]
        fresh, (ids, scores, touched, slots), before, kept = _next_index(reader, first, index, has_tiers)
        _leave_below(table, kept)
        new, placed = len(ids) - len(before), torch.full_like(ids, -1)
        here = slots >= 0 if has_tiers else torch.ones_like(slots, dtype=torch.bool)
        placed[here] = index.refill(ids[here], scores[here], touched[here], slots[here], entry["geometry"])
        lost = (placed < 0).nonzero().squeeze(1)
        left = lost[lost >= new]
        kept_rows = table._rows(ids[left], scores[left], touched[left], before[left - new])
        _move_rows(table, before, placed[new:])
        if not optimizer_state:
            some = placed[:new][placed[:new] >= 0]
            for _, state in table._by_row():
                state[some] = 0
        _read_values(reader, table, optimizer_state)
        gone = len(lost)
        if has_tiers or table.on_evict is not None:
            below = (table._put_below(rows) for rows in _rows_without_slot(reader, table, optimizer_state))
            gone = sum(len(rows.ids) for rows in chain(below, [table._put_below(kept_rows)]) if rows is not None)
        index.step, index.epoch = entry["step"], entry["epoch"]
        if table.admission_counts is not None:
            counts = table.admission_counts
            _, (ids, scores, touched, slots), *_ = _next_index(reader, entry["counts"], counts)
            counts.refill(ids, scores, touched, slots, entry["counts_geometry"])
            counts.step = entry["counts_step"]
        return fresh, gone


def _leave_below(table: DynamicTable, kept: Tensor) -> None:
    """Removes all rows of the tiers below the fast one, but for those that a delta leaves."""
    if table.tiers is None:
        return
    kept = kept.cpu()
    every = table.tiers.batches(1 << 16, lambda ids: torch.zeros_like(ids, dtype=torch.bool))
    gone = [rows.ids[~torch.isin(rows.ids, kept)] for rows in every]
    for ids in gone:
        table.tiers.delete(ids)


def _span(index: ScoredIndex) -> tuple[int, int]:
    """The 64ths of the hash of a shard."""
    ways = MOST_PARTITIONS // index.partitions
    return index.shard[0] * ways, index.shard[1] * ways


def _of_shard(index: ScoredIndex, ids: Tensor) -> Tensor:
    """``[K]`` bool: which ids belong to the shard."""
    part = partitions_of(ids, index.partitions)
    return (part >= index.shard[0]) & (part < index.shard[1])


def _next_index(
    reader: FileReader, files: list[Entry], index: ScoredIndex, slots_only: bool = False
) -> tuple[int, list[Tensor], Tensor, Tensor]:
    """What an index has after a dump.

    Returns:
        Rows of the shard in the dump. Ids, scores, steps and slots: of the dump, then of ids that it leaves and that
        have a slot here. The slots of the latter here. All ids that it leaves. ``slots_only``: without rows of the dump
        that had no slot.
    """
    own: dict[str, list[Tensor]] = {name: [] for names in _COLUMNS for name in names}
    many = 0
    for file in reader.opened(files, _span(index)):
        keys = set(file.keys())
        for names in _COLUMNS:
            if names[0] not in keys:
                continue
            here = _of_shard(index, file.get_tensor(names[0]))
            if names[0] == "ids":
                many += int(here.sum())
                here &= (file.get_tensor("slots") >= 0) | (not slots_only)
            for name in names:
                own[name].append(file.get_tensor(name)[here].to(index.device, torch.int64))
    none = torch.empty(0, dtype=torch.int64, device=index.device)
    ids, scores, touched, slots, kept, kept_slots = (torch.cat([none, *parts]) for parts in own.values())
    before = index._find(kept)
    there = before >= 0
    before = before[there]
    left = kept[there], index.scores[before], index.touched[before], kept_slots[there]
    pairs = zip((ids, scores, touched, slots), left, strict=True)
    return many, [torch.cat(pair) for pair in pairs], before, kept


def _move_rows(table: DynamicTable, before: Tensor, after: Tensor) -> None:
    """Moves the rows that a delta leaves to their new slots, in new memory if the index has another size."""
    if len(table.weight) != table.index.capacity:
        table._resize(before, after)
        return
    moves = (after >= 0) & (before != after)
    before, after = before[moves], after[moves]
    for tensor in (table.weight, *(state for _, state in table._by_row())):
        tensor[after] = tensor[before]  # slots may change places: all rows are copied first


def positions(ordered: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Where ids are in ``ordered``, and a mask of those that are there."""
    at = torch.searchsorted(ordered, ids).clamp(max=max(0, len(ordered) - 1))
    found = ordered[at] == ids if len(ordered) else torch.zeros_like(ids, dtype=torch.bool)
    return at[found], found


def _read_values(reader: FileReader, table: DynamicTable, optimizer_state: bool) -> None:
    """Reads weights and states of the table's columns, of the rows that have a slot."""
    index, targets = table.index, (table.weight, dict(table.states) if optimizer_state else {})
    for columns, file, ids in reader.rows((0, table.config.embedding_dim), _span(index)):
        own = _of_shard(index, ids).nonzero().squeeze(1)
        slots = index._find(ids[own].to(index.device))
        present = slots >= 0
        copy_values(file, columns, table.columns, own[present.cpu()], slots[present], *targets)


def _rows_without_slot(reader: FileReader, table: DynamicTable, optimizer_state: bool) -> Iterator[Rows]:
    """The rows of a shard in the dump that have no slot, at most those of a file at a time.

    If the dump has the table's columns in several files, they are joined, for which some files are read repeatedly.
    """
    index = table.index
    joins = any(columns[1] < table.columns[1] for columns, _ in reader.pieces((0, 1)))
    waiting: list[tuple[Tensor, ...]] = []
    for columns, file, ids in reader.rows((0, 1), _span(index)):
        own = _of_shard(index, ids)
        own[own.clone()] = (index._find(ids[own].to(index.device)) < 0).cpu()
        at = own.nonzero().squeeze(1)
        at = at[ids[at].argsort()]
        waiting.append((ids[at], file.get_tensor("scores")[at], file.get_tensor("touched")[at]))
        if not joins and len(at):
            yield _filled(table, waiting.pop(), [(columns, file, ids)], optimizer_state)
    if not joins or not waiting:
        return
    known = tuple(torch.cat(parts) for parts in zip(*waiting, strict=True))
    ids = known[0]
    order = ids.argsort()
    order = order[partitions_of(ids[order], MOST_PARTITIONS).argsort(stable=True)]
    for some in order.split(_rows_a_file(table.weight, table.states)) if len(order) else ():
        some = some[ids[some].argsort()]
        parts = partitions_of(ids[some], MOST_PARTITIONS)
        files = reader.rows((0, table.config.embedding_dim), (int(parts.min()), int(parts.max()) + 1))
        yield _filled(table, tuple(own[some] for own in known), files, optimizer_state)


def _filled(
    table: DynamicTable,
    known: tuple[Tensor, ...],
    files: Iterable[tuple[tuple[int, int], Any, Tensor]],
    optimizer_state: bool,
) -> Rows:
    """The rows of ids, with values from files that may have them. ``known``: ascending ids, their scores and steps."""
    ids, scores, touched = (own.to(table.device) for own in known)
    states = {name: state.new_zeros(len(ids), *state.shape[1:]) for name, state in table._by_row()}
    weight = table.weight.new_zeros(len(ids), table.weight.shape[1])
    for columns, file, there in files:
        at, found = positions(ids, there.to(table.device))
        own = found.nonzero().squeeze(1)
        copy_values(file, columns, table.columns, own, at, weight, states if optimizer_state else {})
    return Rows(ids, scores, touched, weight, states)


def copy_values(
    file: Any,
    columns: tuple[int, int],
    target: tuple[int, int],
    rows: Tensor,
    slots: Tensor,
    weight: Tensor,
    states: Mapping[str, Tensor],
) -> None:
    """Copies rows of a file to rows of a shard.

    Args:
        file: as safetensors opens it.
        columns: of the file. target: of the shard.
        rows: ``[M]`` of the file. slots: ``[M]`` where they go.
        weight, states: of the shard.
    """
    low, high = max(columns[0], target[0]), min(columns[1], target[1])
    source, into = slice(low - columns[0], high - columns[0]), slice(low - target[0], high - target[0])
    keys, targets = set(file.keys()), {"weight": weight} | {f"states.{name}": state for name, state in states.items()}
    for key, own in targets.items():
        if own is not weight and key not in keys:
            continue
        if own.shape != weight.shape and not is_by_row(own, weight):
            own.copy_(file.get_tensor(key).view(own.shape))
        elif len(rows):
            part = file.get_tensor(key)[rows.cpu()].to(weight.device)
            if own.shape != weight.shape:
                own[slots] = part.view(-1, *own.shape[1:])
            elif low < high:
                own[slots, into] = part[:, source]


# Whole dumps. Ranks pass how they call a function together; one process just calls it.


Since = int | str | Path | None
Paths = str | Path | Iterable[str | Path]
T = TypeVar("T")


def _call(function: Callable[[], T]) -> T:
    return function()


def write_dump(
    path: str | Path,
    write: Callable[[FileWriter], list[dict[str, Entry]]],
    rank: int = 0,
    *,
    first: Callable[[Callable[[], Any]], Any] = _call,
    every: Callable[[Callable[[], T]], list[T]] = lambda function: [function()],
) -> Dumped:
    """Writes a dump to a folder.

    Args:
        path: the folder.
        write: writes what this rank has of each table. Returns the tables in the manifest.
        rank: its number.
        first: returns what a function returns on the first rank, which calls it.
        every: returns what a function returns on each rank.
    """
    staging: Staging | None = None

    def started() -> Path:
        nonlocal staging
        safetensors_torch()
        staging = Staging(DUMP, Path(path))
        return staging.path

    def written() -> tuple[list[dict[str, Entry]], dict[str, Any]]:
        writer = FileWriter(folder, rank)
        return write(writer), described(writer.paths)

    def finished() -> dict[str, Any]:
        assert staging is not None
        files = {name: entry for _, own in by_rank for name, entry in own.items()}
        staging.commit(files, tables=joined(entry for entries, _ in by_rank for entry in entries))
        return DUMP.manifest_of(DUMP.readable(path))

    try:
        folder = first(started)
        by_rank: Any = every(written)  # type: ignore[arg-type]
        return Dumped.of(Path(path), first(finished))
    finally:
        if staging is not None:
            staging.discard()


def read_dumps(
    paths: Paths,
    check: Callable[[Path, dict[str, Entry]], object],
    fill: Callable[[Path, dict[str, Entry]], Restored],
    ranks: tuple[int, int] = (0, 1),
    *,
    together: Callable[[Callable[[], Any]], Any] = _call,
) -> Restored:
    """Reads dumps in order.

    Args:
        paths: their folders.
        check: checks that the tables of a dump fit.
        fill: reads them.
        ranks: this one, and how many there are.
        together: calls a function on every rank. An error on one is raised on all.
    """
    result = Restored({}, {})

    def opened(path: str | Path) -> tuple[Path, dict[str, Entry]]:
        ((folder, entries),) = folders_of(path, *ranks)
        check(folder, entries)
        return folder, entries

    for path in [paths] if isinstance(paths, str | Path) else paths:
        result = result.then(together(partial(fill, *together(partial(opened, path)))))
    return result


Shards: TypeAlias = Sequence[tuple[DynamicTable, int | None]]
"""Shards of a dynamic table, each with the first step whose backward is to come, or None."""


def write_tables(
    writer: FileWriter, tables: Mapping[str, Shards], steps: Mapping[str, Entry] | int | None
) -> list[dict[str, Entry]]:
    """Writes the dynamic tables of a rank, from the steps that `steps_of` returned. Returns each in the manifest."""
    return [
        {name: write_dynamic(writer, table, first_step(steps, name), pending)}
        for name, shards in tables.items()
        for table, pending in shards
    ]


def check_tables(
    folder: Path, entries: Mapping[str, Entry], tables: Mapping[str, Shards], optimizer_state: bool
) -> None:
    """Raises DumpError if a dump lacks a dynamic table, or has another one."""
    refuse_other_tables(folder, entries, tables)
    for name, shards in tables.items():
        for table, _ in shards:
            check_dynamic(folder, name, entries[name], table, optimizer_state)


def fill_tables(
    folder: Path, entries: Mapping[str, Entry], tables: Mapping[str, Shards], optimizer_state: bool
) -> Restored:
    """Fills the dynamic tables of a rank from a dump. `check_tables` precedes."""
    rows, lost = dict.fromkeys(tables, 0), dict.fromkeys(tables, 0)
    for name, shards in tables.items():
        for table, _ in shards:
            read, gone = read_dynamic(folder, entries[name], table, optimizer_state)
            if table.columns[0] == 0:  # column shards have the same rows
                rows[name], lost[name] = rows[name] + read, lost[name] + gone
    return Restored(rows, lost)


def dump_shards(path: str | Path, tables: Mapping[str, Shards], since: Since) -> Dumped:
    """Writes the dynamic tables of one process, see `DynamicCollection.dump`."""
    steps = steps_of(since)
    return write_dump(path, lambda writer: write_tables(writer, tables, steps))


def load_shards(paths: Paths, tables: Mapping[str, Shards], optimizer_state: bool) -> Restored:
    """Fills the dynamic tables of one process, see `DynamicCollection.load`."""
    settings: Any = {"tables": tables, "optimizer_state": optimizer_state}
    return read_dumps(paths, partial(check_tables, **settings), partial(fill_tables, **settings))


def folders_of(paths: Paths, rank: int = 0, world_size: int = 1) -> Iterator[tuple[Path, dict[str, Entry]]]:
    """The folder and the tables of each dump. Compares its files with their checksums first."""
    for path in [paths] if isinstance(paths, str | Path) else paths:
        folder = DUMP.readable(path)
        manifest = DUMP.manifest_of(folder)
        DUMP.check_files(folder, manifest["files"], rank, world_size)
        entries = dict(manifest["tables"])
        for entry in entries.values():
            for file in [file for piece in entry["pieces"] for file in piece["files"]] + entry["counts"]:
                if file["file"] not in manifest["files"]:
                    raise DumpError(f"{folder / MANIFEST} names {file['file']!r}, which is not a file of the dump")
        yield folder, entries


def refuse_other_tables(folder: Path, entries: Mapping[str, Entry], tables: Iterable[str]) -> None:
    """Raises DumpError if a dump lacks a table."""
    missing = [name for name in tables if name not in entries]
    if missing:
        raise DumpError(
            f"{folder} has the tables {sorted(entries)}, and no {missing[0]!r}. Fix: load it into a model with its "
            f"tables"
        )


def first_step(steps: Mapping[str, Entry] | int | None, table: str) -> Any:
    """Of which step on a table's rows are written."""
    if not isinstance(steps, Mapping):
        return steps
    if table not in steps:
        raise DumpError(f"the dump of since= has no table {table!r}. Fix: omit since, which dumps everything")
    return steps[table]
