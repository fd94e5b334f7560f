"""Writes tables.

A delta has the rows that were touched since a step, and the ids and slots of all others. What is neither was erased or
evicted.

Shape letters: M rows, C slots, d columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from recshard_lab.embedding.dynamic.dumps.files import FILE_BYTES, Entry, FileWriter, dtype_name, settings_of
from recshard_lab.embedding.dynamic.index import ScoredIndex
from recshard_lab.embedding.dynamic.sizes import SLOTS
from recshard_lab.embedding.dynamic.table import DynamicTable


def write_dynamic(
    writer: FileWriter,
    table: DynamicTable,
    since: Mapping[str, int] | int | None,
    pending: int | None,
    primary: bool = True,
) -> Entry:
    """Writes a table or a shard.

    Args:
        writer: of this rank.
        table: the table.
        since: the first step whose rows are written; of rows and of admission, as ``next`` of an earlier dump has it.
        pending: the first step whose backward is to come; None for none.
        primary: whether this shard has the first columns: the others have the same ids.

    Returns:
        The table in the manifest.
    """
    with table.lock:
        return _written(writer, table, since, pending, primary)


def _written(
    writer: FileWriter,
    table: DynamicTable,
    since: Mapping[str, int] | int | None,
    pending: int | None,
    primary: bool,
) -> Entry:
    index, counts = table.index, table.admission_counts
    own = since if isinstance(since, Mapping) else {"rows": since, "admission": None}
    step = index.step
    entry: Entry = {
        "kind": "dynamic",
        "dim": table.config.embedding_dim,
        "dtype": dtype_name(table.weight.dtype),
        "states": sorted(table.states),
        "settings": settings_of(table.config),
        "step": step,
        "epoch": index.epoch,
        "since": own["rows"],
        "next": {
            "rows": step + 1 if pending is None else min(pending, step + 1),
            "admission": 0 if counts is None else counts.step + 1,
        },
        "geometry": _geometry(index),
        "pieces": [{"columns": list(table.columns), "files": list(_row_files(writer, table, own["rows"], primary))}],
        "counts": [],
    }
    if counts is not None:
        entry |= {"counts_step": counts.step, "counts_geometry": _geometry(counts)}
    if counts is not None and primary:
        entry["counts"] = list(_index_files(writer, counts, own["admission"]))
    return entry


def write_rows(
    writer: FileWriter,
    rows: Tensor,
    first_row: int,
    columns: tuple[int, int],
    weight: Tensor,
    states: Mapping[str, Tensor],
) -> Entry:
    """Writes rows of a shard of a static table. Returns its piece in the manifest.

    Args:
        writer: of this rank.
        rows: ``[M]`` int64, of the whole table; those of other shards are left out.
        first_row: the table's row that is the first of the shard.
        columns: of the shard.
        weight: ``[E, d]``. states: name -> ``[E]``, ``[E, d]`` or one number for the table.
    """
    local = rows.to(weight.device) - first_row
    local = local[(local >= 0) & (local < len(weight))]
    files = []
    for part in local.split(_rows_a_file(weight, states)) if len(local) else (local,):
        tensors = {"ids": part + first_row} | _values(part, weight, states, columns[0] == 0)
        files.append(writer.index_file(tensors, hashed=False))
    return {"columns": list(columns), "files": files}


def _geometry(index: ScoredIndex) -> dict[str, int]:
    """What the slots of ids depend on."""
    return {"partitions": index.partitions, "buckets": index.buckets, "choices": index.choices}


def _row_files(writer: FileWriter, table: DynamicTable, since: int | None, primary: bool) -> Iterator[Entry]:
    index = table.index
    fresh, kept = _split(index, since)
    if primary:
        yield from _kept_files(writer, index, kept)
    for slots in fresh.split(_rows_a_file(table.weight, table.states)) if len(fresh) else (fresh,):
        tensors = _index_values(index, slots) if primary else {"ids": index.keys[slots]}
        yield writer.index_file(tensors | _values(slots, table.weight, table.states, primary))
    if table.tiers is not None:
        yield from _files_below(writer, table, since, primary)


def _files_below(writer: FileWriter, table: DynamicTable, since: int | None, primary: bool) -> Iterator[Entry]:
    """The files of rows in the tiers below the fast one. Their slot is -1."""
    assert table.tiers is not None
    for rows in table.tiers.batches(_rows_a_file(table.weight, table.states), table._in_fast):
        fresh = torch.ones_like(rows.ids, dtype=torch.bool) if since is None else rows.touched >= since
        kept = rows.ids[~fresh]
        if primary and len(kept):
            yield writer.index_file({"kept_ids": kept, "kept_slots": torch.full_like(kept, -1)})
        own = rows.at(fresh)
        if not len(own.ids):
            continue
        tensors = {"ids": own.ids, "weight": own.weight}
        if primary:
            tensors |= {"scores": own.scores, "touched": own.touched, "slots": torch.full_like(own.ids, -1)}
        for name, state in own.states.items():
            if primary or state.shape == own.weight.shape:
                tensors[f"states.{name}"] = state
        yield writer.index_file(tensors)


def _index_files(writer: FileWriter, index: ScoredIndex, since: int | None) -> Iterator[Entry]:
    """The files of an index without rows."""
    fresh, kept = _split(index, since)
    yield from _kept_files(writer, index, kept)
    for slots in fresh.split(FILE_BYTES // 32) if len(fresh) else (fresh,):
        yield writer.index_file(_index_values(index, slots))


def _kept_files(writer: FileWriter, index: ScoredIndex, kept: Tensor) -> Iterator[Entry]:
    for slots in kept.split(FILE_BYTES // 16) if len(kept) else ():
        yield writer.index_file({"kept_ids": index.keys[slots], "kept_slots": _in_table(index, slots)})


def _split(index: ScoredIndex, since: int | None) -> tuple[Tensor, Tensor]:
    """The slots touched at a step or later, and the others in use."""
    slots = index.slots()
    if since is None:
        return slots, slots[:0]
    fresh = index.touched[slots] >= since
    return slots[fresh], slots[~fresh]


def _index_values(index: ScoredIndex, slots: Tensor) -> dict[str, Tensor]:
    accesses = index.accesses[slots]
    return {
        "ids": index.keys[slots],
        "scores": accesses[:, 0],
        "touched": accesses[:, 1],
        "slots": _in_table(index, slots),
    }


def _in_table(index: ScoredIndex, slots: Tensor) -> Tensor:
    """Slots of a shard, counted from the first one of the table. Half the bytes where they fit."""
    slots = slots + index.shard[0] * index.buckets * SLOTS
    return slots.int() if index.partitions * index.buckets * SLOTS < 2**31 else slots


def _values(rows: Tensor, weight: Tensor, states: Mapping[str, Tensor], primary: bool) -> dict[str, Tensor]:
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
    by_row = [weight, *(state for state in states.values() if is_by_row(state, weight))]
    row_bytes = 32 + sum(each.element_size() * each[:1].numel() for each in by_row)
    return max(1, FILE_BYTES // row_bytes)
