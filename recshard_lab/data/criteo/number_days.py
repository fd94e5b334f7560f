"""Third step: replaces raw ids by their new numbers, sample by sample, in the final files.

The tables of all categories are in memory at the same time if they fit. The largest that do not fit are numbered
first, one after another and part by part, each into a separate file.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from recshard_lab.data.criteo import CAT_FEATURE_COUNT
from recshard_lab.data.criteo.blocks import Blocks
from recshard_lab.data.criteo.count_ids import FIRST_NUMBER, FULL
from recshard_lab.data.criteo.folder import Day, FileEntry, FileWriter, Manifest, naming_full_disk
from recshard_lab.data.criteo.table_loops import insert_ids, number_block, number_part
from recshard_lab.data.criteo.work import Work, in_order

_OTHER = 1  # the number of all infrequent ids
_SLOT_BYTES = 8
_IDS_AT_ONCE = 1 << 20
_LEAST_BITS = 4


@dataclass
class _Tables:
    """The tables that are in memory: one array, where each begins, how many bits it has (-1: numbered before)."""

    slots: NDArray[np.uint64]
    starts: NDArray[np.int64]
    bits: NDArray[np.int64]
    before: list[int] = field(default_factory=list)  # columns that are numbered before


def number_days(work: Work, manifest: Manifest) -> None:
    """Writes the final files of the days that lack them."""
    left = [day for day in manifest.days if "ids" in day.files]
    if not left:
        return
    tables = _resident_tables(work, manifest)
    total = sum(day.text_bytes for day in manifest.days)
    done = total - sum(day.text_bytes for day in left)
    for day in left:
        spent = _number_day(work, manifest, tables, day, done, total)
        done += day.text_bytes
        manifest.save(work.folder)
        for name in spent:
            (work.folder / name).unlink(missing_ok=True)


def _bits_for(count: int) -> int:
    """Bits of the smallest table that holds this number of ids.

    >>> _bits_for(9), _bits_for(10)
    (4, 5)
    """
    bits = _LEAST_BITS
    while int(FULL * (1 << bits)) < count:
        bits += 1
    return bits


def _resident_tables(work: Work, manifest: Manifest) -> _Tables:
    """Tables of the smallest categories, as many as fit."""
    starts, bits = np.zeros(CAT_FEATURE_COUNT, np.int64), np.full(CAT_FEATURE_COUNT, -1, np.int64)
    if not work.settings.numbers_ids:
        return _Tables(np.zeros(1, np.uint64), starts, bits)
    counts = {int(column.name[4:]): column.num_embeddings - FIRST_NUMBER for column in manifest.columns}
    size, before = 0, []
    for number in sorted(counts, key=lambda number: counts[number]):
        own = _bits_for(counts[number])
        if (size + (1 << own)) * _SLOT_BYTES > work.memory_bytes // 2:
            before.append(number)
            continue
        starts[number], bits[number] = size, own
        size += 1 << own
    tables = _Tables(np.zeros(max(size, 1), np.uint64), starts, bits, before)
    for number in range(CAT_FEATURE_COUNT):
        if bits[number] >= 0:
            begin, own = int(starts[number]), int(bits[number])
            _fill(work.folder / f"cat_{number}_ids.npy", tables.slots[begin : begin + (1 << own)], own, 0, 1)
    return tables


def _fill(path: Path, slots: NDArray[np.uint64], bits: int, part: int, parts: int) -> bool:
    """Inserts a category's ids and numbers into an empty table. False if they do not fit."""
    ids = np.load(path, mmap_mode="r").reshape(-1)
    room = int(FULL * len(slots))
    for begin in range(0, len(ids), _IDS_AT_ONCE):
        own = np.array(ids[begin : begin + _IDS_AT_ONCE])
        room = insert_ids(own, FIRST_NUMBER + begin, slots, bits, part, parts, room)
        if room < 0:
            return False
    return True


def _number_day(work: Work, manifest: Manifest, tables: _Tables, day: Day, done: int, total: int) -> list[str]:
    """Numbers a day. Returns the names of the files that are no longer needed."""
    scratch = {column: f"{day.name}_cat_{column}.numbers" for column in tables.before}
    with Blocks(work.folder / day.files["ids"].name) as blocks:
        for column, name in scratch.items():
            work.tell("number", f"{day.name}, cat_{column} by itself", done, total)
            count = next(own.num_embeddings for own in manifest.columns if own.name == f"cat_{column}") - FIRST_NUMBER
            _number_alone(work, blocks, column, count, work.folder / name)
        ready = {column: np.memmap(work.folder / name, np.int32, "r") for column, name in scratch.items()}
        begins = np.cumsum([0, *(rows for _, rows in blocks.begins)])

        def numbered(number: int) -> NDArray[np.int32]:
            ids = blocks.block(number)
            for column, numbers in ready.items():
                ids[column] = numbers[begins[number] : begins[number + 1]]
            out = np.empty((ids.shape[1], CAT_FEATURE_COUNT), np.int32)
            number_block(ids, tables.slots, tables.starts, tables.bits, _OTHER, out)
            return out

        writer = _writer(work, day)
        try:
            rows = 0
            for out in in_order(work, numbered, range(len(blocks.begins))):
                writer.write(out)
                rows += len(out)
                text = f"{day.name}, {rows:,} samples"
                work.tell("number", text, done + day.text_bytes * rows / day.rows, total)
            entry = writer.finish()
        except BaseException:
            writer.abandon()
            raise
    spent = [day.files.pop("ids").name, *scratch.values()]
    if work.settings.format == "parquet":
        spent += [day.files.pop(kind).name for kind in ("labels", "dense")]
    day.files[work.settings.format if work.settings.format == "parquet" else "sparse"] = entry
    return spent


class _Writer(Protocol):
    """Interface of a writer of numbered samples."""

    def write(self, numbers: NDArray[np.int32]) -> None: ...
    def finish(self) -> FileEntry: ...
    def abandon(self) -> None: ...


def _writer(work: Work, day: Day) -> _Writer:
    if work.settings.format == "npy":
        return FileWriter(work.folder / f"{day.name}_sparse.npy", (np.int32, CAT_FEATURE_COUNT))
    from recshard_lab.data.criteo.parquet import ParquetDayWriter

    return ParquetDayWriter(work.folder, day)


def _number_alone(work: Work, blocks: Blocks, column: int, count: int, target: Path) -> None:
    """Numbers one category of a day whose table does not fit, part by part.

    Written in place: a run that is stopped here writes the same once more.
    """
    parts, bits = 1, _bits_for(count)
    while (1 << bits) * _SLOT_BYTES > work.memory_bytes // 2 and bits > _LEAST_BITS:
        parts, bits = parts * 2, bits - 1
    rows = sum(rows for _, rows in blocks.begins)
    with target.open("wb") as file, naming_full_disk(target):
        os.posix_fallocate(file.fileno(), 0, max(1, 4 * rows))
    numbers = np.memmap(target, np.int32, "r+", shape=(rows,))
    left = [(part, parts) for part in range(parts)]
    while left:
        part, parts = left.pop()
        slots = np.zeros(1 << bits, np.uint64)
        if not _fill(work.folder / f"cat_{column}_ids.npy", slots, bits, part, parts):
            left += [(part, 2 * parts), (part + parts, 2 * parts)]
            continue
        begin = 0
        for ids in blocks.column(column):
            number_part(ids, slots, bits, part, parts, _OTHER, numbers[begin : begin + len(ids)])
            begin += len(ids)
    numbers.flush()
