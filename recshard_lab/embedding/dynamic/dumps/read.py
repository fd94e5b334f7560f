"""Reads tables. A table may have another size, other columns and other partitions than the one that was dumped.

Shape letters: M rows, K ids, C slots, d columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recshard_lab.embedding.dynamic.dumps.files import FILE_BYTES, DumpError, Entry, FileReader, dtype_name, settings_of
from recshard_lab.embedding.dynamic.dumps.write import is_by_row
from recshard_lab.embedding.dynamic.index import ScoredIndex
from recshard_lab.embedding.dynamic.index_rounds import partitions_of
from recshard_lab.embedding.dynamic.sizes import MOST_PARTITIONS
from recshard_lab.embedding.dynamic.stores.base import RowFormat, Rows
from recshard_lab.embedding.dynamic.table import DynamicTable

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
        return _read_dynamic(FileReader(folder, entry), table, optimizer_state)


def _read_dynamic(reader: FileReader, table: DynamicTable, optimizer_state: bool) -> tuple[int, int]:
    entry, index = reader.entry, table.index
    span = _span(index)
    first = [file for columns, files in reader.pieces((0, 1)) for file in files]
    fresh, (ids, scores, touched, slots), kept = _index_of(reader, first, index, span, table.tiers is not None)
    new = len(ids)
    _leave_below(table, kept[0])
    before = index._find(kept[0])
    there = before >= 0
    kept_ids, kept_slots, before = kept[0][there], kept[1][there], before[there]
    ids = torch.cat([ids, kept_ids])
    scores, touched = torch.cat([scores, index.scores[before]]), torch.cat([touched, index.touched[before]])
    old = table.weight, dict(table.states)
    by_row = {name for name, state in old[1].items() if is_by_row(state, old[0])}
    slots, placed = torch.cat([slots, kept_slots]), torch.full_like(ids, -1)
    here = slots >= 0 if table.tiers is not None else torch.ones_like(slots, dtype=torch.bool)
    placed[here] = index.refill(ids[here], scores[here], touched[here], slots[here], entry["geometry"])
    lost = (placed < 0).nonzero().squeeze(1)
    left = lost[lost >= new]
    kept_rows = table._rows(ids[left], scores[left], touched[left], before[left - new])
    _move_rows(table, old, by_row, before, placed[new:])
    del old
    if not optimizer_state:
        some = placed[:new][placed[:new] >= 0]
        for _, state in table._by_row():
            state[some] = 0
    gone = len(lost) if table.tiers is None else 0
    _read_values(reader, table, span, optimizer_state)
    if _reads_lost(table):
        for rows in _rows_without_slot(reader, table, span, optimizer_state):
            gone += _store_below(table, rows)
        gone += _store_below(table, kept_rows)
    index.step, index.epoch = entry["step"], entry["epoch"]
    counts = table.admission_counts
    if counts is not None:
        _read_counts(reader, counts)
    return fresh, gone


def _reads_lost(table: DynamicTable) -> bool:
    """Whether rows without a slot go anywhere."""
    return table.on_evict is not None or table.tiers is not None


def _store_below(table: DynamicTable, rows: Rows) -> int:
    """Stores rows in the tiers, if there are any. Returns how many these lose. `DynamicTable.on_evict` is passed them.

    Rows that a table without tiers loses were counted when they found no slot.
    """
    lost: Rows | None = rows if len(rows.ids) else None
    if table.tiers is None:
        table._lose(lost)
        return 0
    if lost is not None:
        lost = table.tiers.put(lost.to("cpu"))
    table._lose(lost)
    return 0 if lost is None else len(lost.ids)


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


def _index_of(
    reader: FileReader, files: list[Entry], index: ScoredIndex, span: tuple[int, int], slots_only: bool = False
) -> tuple[int, tuple[Tensor, ...], tuple[Tensor, Tensor]]:
    """The number of a shard's rows in the dump; ids, scores, steps and slots of them; ids and slots of those it leaves.

    ``slots_only``: without the rows that had no slot.
    """
    fresh: list[list[Tensor]] = [[] for _ in range(4)]
    kept: list[list[Tensor]] = [[], []]
    many = 0
    for file in reader.opened(files, span):
        keys = set(file.keys())
        for names, parts in ((("ids", "scores", "touched", "slots"), fresh), (("kept_ids", "kept_slots"), kept)):
            if names[0] in keys:
                own = _of_shard(index, file.get_tensor(names[0]))
                many += int(own.sum()) * (parts is fresh)
                if slots_only and parts is fresh:
                    own &= file.get_tensor("slots") >= 0
                for name, part in zip(names, parts, strict=True):
                    part.append(file.get_tensor(name)[own].to(index.device, torch.int64))
    none = torch.empty(0, dtype=torch.int64, device=index.device)
    values = tuple(torch.cat([none, *part]) for part in fresh)
    return many, values, (torch.cat([none, *kept[0]]), torch.cat([none, *kept[1]]))


def _move_rows(
    table: DynamicTable, old: tuple[Tensor, dict[str, Tensor]], by_row: set[str], before: Tensor, after: Tensor
) -> None:
    """Moves the rows that a delta leaves to their new slots, in new memory if the index has another size."""
    there = after >= 0
    before, after = before[there], after[there]
    grown = len(table.weight) != table.index.capacity
    if grown:
        table.weight, table.states = table._memory()
        sizes = FILE_BYTES
    else:
        moves = before != after  # slots of one memory may change places, so that all are copied first
        before, after = before[moves], after[moves]
        sizes = max(1, len(before)) * max(1, old[0][:1].nbytes)
    for some, to in zip(*(own.split(max(1, sizes // old[0][:1].nbytes)) for own in (before, after)), strict=True):
        weight, states = old[0][some], {name: old[1][name][some] for name in by_row}
        table.weight[to] = weight
        for name in by_row:
            table.states[name][to] = states[name]
    for name, state in table.states.items():
        if name not in by_row and state is not old[1][name]:
            state.copy_(old[1][name])


def positions(ordered: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Where ids are in ``ordered``, and a mask of those that are there."""
    at = torch.searchsorted(ordered, ids).clamp(max=max(0, len(ordered) - 1))
    found = ordered[at] == ids if len(ordered) else torch.zeros_like(ids, dtype=torch.bool)
    return at[found], found


def _read_values(reader: FileReader, table: DynamicTable, span: tuple[int, int], optimizer_state: bool) -> None:
    """Reads weights and states of the table's columns, of the rows that have a slot."""
    index, targets = table.index, (table.weight, dict(table.states) if optimizer_state else {})
    for columns, files in reader.pieces((0, table.config.embedding_dim)):
        for file in reader.opened(files, span):
            keys = set(file.keys())
            if "ids" not in keys:
                continue
            ids = file.get_tensor("ids").to(index.device)
            own = _of_shard(index, ids).nonzero().squeeze(1)
            slots = index._find(ids[own])
            present = slots >= 0
            copy_values(file, keys, columns, table.columns, own[present], slots[present], *targets)


def _rows_without_slot(
    reader: FileReader, table: DynamicTable, span: tuple[int, int], optimizer_state: bool
) -> Iterator[Rows]:
    """The rows of a shard in the dump that have no slot, at most those of a file at a time.

    If the dump has the table's columns in several files, they are joined, for which some files are read repeatedly.
    """
    index, whole = table.index, table.columns
    pieces = list(reader.pieces((0, 1)))
    joins = any(columns[1] < whole[1] for columns, _ in pieces)
    waiting: list[tuple[Tensor, Tensor, Tensor]] = []
    for columns, files in pieces:
        for file in reader.opened(files, span):
            keys = set(file.keys())
            if "ids" not in keys:
                continue
            ids = file.get_tensor("ids").to(index.device)
            own = _of_shard(index, ids)
            own[own.clone()] = index._find(ids[own]) < 0
            at = own.nonzero().squeeze(1)
            if not len(at):
                continue
            known = ids[at], *(file.get_tensor(name).to(index.device)[at] for name in ("scores", "touched"))
            if joins:
                waiting.append(known)
                continue
            rows = _empty_rows(table, *known)
            states = rows.states if optimizer_state else {}
            copy_values(file, keys, columns, whole, at, torch.arange(len(at), device=index.device), rows.weight, states)
            yield rows
    if not waiting:
        return
    ids, scores, touched = (torch.cat(parts) for parts in zip(*waiting, strict=True))
    order = ids.argsort()
    order = order[partitions_of(ids[order], MOST_PARTITIONS).argsort(stable=True)]
    for some in order.split(max(1, FILE_BYTES // RowFormat.of(table.weight, dict(table._by_row())).row_bytes)):
        some = some[ids[some].argsort()]
        rows = _empty_rows(table, ids[some], scores[some], touched[some])
        parts = partitions_of(rows.ids, MOST_PARTITIONS)
        _fill(reader, table, rows, (int(parts.min()), int(parts.max()) + 1), optimizer_state)
        yield rows


def _empty_rows(table: DynamicTable, ids: Tensor, scores: Tensor, touched: Tensor) -> Rows:
    states = {name: state.new_zeros(len(ids), *state.shape[1:]) for name, state in table._by_row()}
    return Rows(ids, scores, touched, table.weight.new_zeros(len(ids), table.weight.shape[1]), states)


def _fill(reader: FileReader, table: DynamicTable, rows: Rows, span: tuple[int, int], optimizer_state: bool) -> None:
    """Reads weights and states of rows, whose ids ascend, from every file that may have them."""
    states = rows.states if optimizer_state else {}
    for columns, files in reader.pieces((0, table.config.embedding_dim)):
        for file in reader.opened(files, span):
            keys = set(file.keys())
            if "ids" in keys:
                at, found = positions(rows.ids, file.get_tensor("ids").to(rows.ids.device))
                own = found.nonzero().squeeze(1)
                copy_values(file, keys, columns, table.columns, own, at, rows.weight, states)


def copy_values(
    file: Any,
    keys: set[str],
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
        keys: its tensors.
        columns: of the file. target: of the shard.
        rows: ``[M]`` of the file. slots: ``[M]`` where they go.
        weight, states: of the shard.
    """
    low, high = max(columns[0], target[0]), min(columns[1], target[1])
    source, into = slice(low - columns[0], high - columns[0]), slice(low - target[0], high - target[0])
    whole = slots.dtype == torch.int64 and len(rows) > 0

    def part(name: str) -> Tensor:
        return file.get_tensor(name)[rows.cpu()].to(weight.device)

    if whole and low < high:
        weight[slots, into] = part("weight")[:, source]
    for name, state in states.items():
        key = f"states.{name}"
        if key not in keys:
            continue
        if state.shape == weight.shape:
            if whole and low < high:
                state[slots, into] = part(key)[:, source]
        elif is_by_row(state, weight):
            if whole:
                state[slots] = part(key).view(-1, *state.shape[1:])
        else:
            state.copy_(file.get_tensor(key).view(state.shape))


def _read_counts(reader: FileReader, counts: ScoredIndex) -> None:
    """Makes the counts of absent ids those of a dump."""
    entry = reader.entry
    _, (ids, scores, touched, slots), kept = _index_of(reader, entry["counts"], counts, _span(counts))
    before = counts._find(kept[0])
    there = before >= 0
    before = before[there]
    counts.refill(
        torch.cat([ids, kept[0][there]]),
        torch.cat([scores, counts.scores[before]]),
        torch.cat([touched, counts.touched[before]]),
        torch.cat([slots, kept[1][there]]),
        entry["counts_geometry"],
    )
    counts.step = entry["counts_step"]
