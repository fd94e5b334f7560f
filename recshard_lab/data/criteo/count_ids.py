"""Second step: each category's ids are counted, and those that are frequent enough get numbers.

The numbers are TorchRec's: 2, 3, ... in the order in which the frequent ids appear first, 1 for all that appear fewer
times than the threshold (``sparse_to_contiguous`` of ``torchrec.datasets.criteo``); 0 stays unused.

A category is counted in memory that does not grow with the data: if its ids need more, the table keeps
half of them, chosen by their hash. A further pass over the category counts the others, and halves them again if needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from recshard_lab.data.criteo import CAT_FEATURE_COUNT, DEFAULT_CAT_NAMES
from recshard_lab.data.criteo.blocks import Blocks
from recshard_lab.data.criteo.folder import Column, FileWriter, Manifest
from recshard_lab.data.criteo.table_loops import count_frequent, count_ids, rehash, take_frequent
from recshard_lab.data.criteo.work import Work, in_order

FIRST_NUMBER = 2
FULL = 0.6  # of a table's slots
_BYTES_A_SLOT = 40  # id, count and first place; twice while a table grows or its ids are sorted
_FIRST_BITS, _LEAST_BITS = 12, 4
_MERGED_AT_ONCE = 1 << 18
_FOUND = np.dtype([("first", np.int64), ("id", np.uint32), ("count", np.uint32)])

Ids = Callable[[], Iterator[NDArray[np.uint32]]]
"""One category's ids, in the order of days and samples. Each call starts again."""


def count_days(work: Work, manifest: Manifest) -> None:
    """Numbers the ids of the categories that are not yet counted according to the manifest, in parallel."""
    done = {column.name for column in manifest.columns}
    left = [number for number, name in enumerate(DEFAULT_CAT_NAMES) if name not in done]
    total = sum(day.text_bytes for day in manifest.days)
    readers = [Blocks(work.folder / day.files["ids"].name) for day in manifest.days] if left else []
    try:
        for column in in_order(work, lambda number: _count_column(work, readers, number), left):
            manifest.columns.append(column)
            manifest.save(work.folder)
            share = len(manifest.columns) / CAT_FEATURE_COUNT
            work.tell("count", f"{column.name}, {column.distinct:,} ids", total * share, total)
    finally:
        for reader in readers:
            reader.close()


def _count_column(work: Work, readers: list[Blocks], number: int) -> Column:
    name = DEFAULT_CAT_NAMES[number]
    scratch = work.folder / f"{name}.parts"
    counted = Counter(work.memory_bytes // work.threads, work.settings.threshold, scratch)
    try:
        counted.count(lambda: (ids for reader in readers for ids in reader.column(number)))
        writers = {kind: FileWriter(work.folder / f"{name}_{kind}.npy", (np.uint32, 1)) for kind in ("ids", "counts")}
        frequent = 0
        for found in counted.in_order():
            writers["ids"].write(np.ascontiguousarray(found["id"]))
            writers["counts"].write(np.ascontiguousarray(found["count"]))
            frequent += len(found)
    finally:
        for left in work.folder.glob(f"{scratch.name}*"):
            left.unlink()
    files = {kind: writer.finish() for kind, writer in writers.items()}
    return Column(name, FIRST_NUMBER + frequent, counted.distinct, counted.passes, files)


class Counter:
    """Counts ids within a memory limit.

    Args:
        memory_bytes: of its tables.
        threshold: ids that appear fewer times are left out.
        scratch: name of the temporary files of the parts; each adds a number to it.

    Attributes:
        distinct: number of different ids; passes: number of times that the ids were read.
    """

    def __init__(self, memory_bytes: int, threshold: int, scratch: Path) -> None:
        self.most_bits = max(_LEAST_BITS, (memory_bytes // _BYTES_A_SLOT).bit_length() - 1)
        self.threshold, self.scratch = threshold, scratch
        self.distinct = self.passes = 0
        self.parts: list[NDArray[np.void]] = []

    def count(self, ids: Ids) -> None:
        """Counts them, part by part."""
        left = [(0, 1)]
        while left:
            part, parts = left.pop()
            self.passes += 1
            left += self._count_part(ids(), part, parts)

    def _count_part(self, ids: Iterator[NDArray[np.uint32]], part: int, parts: int) -> list[tuple[int, int]]:
        """Counts the ids of a part. Returns the parts that did not fit."""
        bits = min(_FIRST_BITS, self.most_bits)
        slots, firsts = np.zeros(1 << bits, np.uint64), np.empty(1 << bits, np.int64)
        used, begin, out = 0, 0, []
        for own in ids:
            at = 0
            while True:
                most = int(FULL * (1 << bits))
                at, used = count_ids(own, at, begin, slots, firsts, bits, part, parts, used, most)
                if at == len(own):
                    break
                if bits < self.most_bits:
                    bits = min(bits + 2, self.most_bits)
                else:
                    out.append((part + parts, 2 * parts))
                    parts *= 2
                old, old_firsts = slots, firsts
                slots, firsts = np.zeros(1 << bits, np.uint64), np.empty(1 << bits, np.int64)
                used = rehash(old, old_firsts, slots, firsts, bits, part, parts)
                del old, old_firsts
            begin += len(own)
        self.distinct += used
        found = np.empty(count_frequent(slots, self.threshold), _FOUND)
        take_frequent(slots, firsts, self.threshold, found["id"], found["count"], found["first"])
        del slots, firsts
        found = found[np.argsort(found["first"])]
        if part or parts > 1:  # there are others: wait on disk
            path = Path(f"{self.scratch}{len(self.parts)}.npy")
            np.save(path, found)
            found = np.load(path, mmap_mode="r")
        self.parts.append(found)
        return out

    def in_order(self) -> Iterator[NDArray[np.void]]:
        """The frequent ids (first, id, count) in the order of their first occurrence, in blocks."""
        at = [0] * len(self.parts)
        while any(begin < len(part) for begin, part in zip(at, self.parts, strict=True)):
            ends = [begin + _MERGED_AT_ONCE for begin in at]
            # stop at the earliest end of a part that has more ids after it
            bound = min(
                (part["first"][end - 1] for end, part in zip(ends, self.parts, strict=True) if end < len(part)),
                default=np.iinfo(np.int64).max,
            )
            pieces = [part[begin:end] for part, begin, end in zip(self.parts, at, ends, strict=True)]
            pieces = [piece[: np.searchsorted(piece["first"], bound, side="right")] for piece in pieces]
            at = [begin + len(piece) for begin, piece in zip(at, pieces, strict=True)]
            found = np.concatenate(pieces)
            yield found[np.argsort(found["first"])]
