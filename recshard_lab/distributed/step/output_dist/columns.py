"""Copies and adds columns of many senders in one kernel.

::

    sender 0  [b, 12]   t0: 8 columns, t1: columns 0-4           output  [b, 16]
    sender 1  [b, 12]   t0: 8 columns, t1: columns 4-8           t0 = both added, t1 = one beside the other

A flat tensor holds *areas* end to end. The rows of an area have one width: an area is, for example, what one sender
sent. All column edges are multiples of a chunk, their greatest common divisor. An embedding bag over chunks gathers
and adds. Its indices are computed once for each set of area sizes. Its additions have one order on every rank.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Generic, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints: TypeAlias = NDArray[np.int64]
Numbers: TypeAlias = Sequence[int] | Ints
T = TypeVar("T")


class Memo(Generic[T]):
    """Keeps the last few values of a function. Unlike ``lru_cache`` of a method it holds no reference to its owner.

    >>> memo = Memo[int]()
    >>> memo.get(3, lambda: 9), memo.get(3, lambda: 0)
    (9, 9)
    """

    def __init__(self, keep: int = 8) -> None:
        self._keep, self._known = keep, dict[Hashable, T]()

    def get(self, key: Hashable, compute: Callable[[], T]) -> T:
        """The value for ``key``, computed if it is not known."""
        if key not in self._known:
            while len(self._known) >= self._keep:
                del self._known[next(iter(self._known))]
            self._known[key] = compute()
        return self._known[key]


@dataclass(frozen=True, slots=True)
class Run:
    """Columns ``[source, source + width)`` of area ``sender`` go to ``[target, target + width)`` of ``receiver``."""

    sender: int
    source: int
    target: int
    width: int
    receiver: int = 0

    def reversed(self) -> "Run":
        """The same columns in the other direction."""
        return Run(self.receiver, self.target, self.source, self.width, self.sender)


@dataclass(frozen=True, slots=True)
class Indices:
    """Arguments of `gather`. A copy needs only the chunks; sums and products are embedding bags."""

    chunks: Tensor
    bags: Tensor | None
    scales: Tensor | None


def gather(flat: Tensor, chunk: int, indices: Indices) -> Tensor:
    """Chunks of ``flat``, or sums of them, end to end."""
    rest = flat.numel() % chunk
    table = (flat[:-rest] if rest else flat).view(-1, chunk)
    if indices.bags is None:
        return table.index_select(0, indices.chunks).view(-1)
    summed: Tensor = torch.embedding_bag(
        table, indices.chunks, indices.bags, mode=0, per_sample_weights=indices.scales
    )[0]
    return summed.view(-1)


class ColumnMap:
    """From source areas to target areas. Row r of a target area is made of row r of source areas.

    Columns with several runs are their sum, in the order of the runs; columns without one are zeros.

    Args:
        runs: which columns go where.
        source_widths: columns of each source area.
        target_widths: columns of each target area.
        steps: further sizes that area starts may be multiples of.
        keep: number of sets of sizes whose indices are kept.

    >>> join = ColumnMap([Run(0, 0, 0, 2), Run(1, 0, 0, 2), Run(1, 2, 2, 1)], [2, 3], [3])
    >>> join(torch.tensor([1.0, 2.0, 10.0, 20.0, 30.0]), [1, 1], [1])
    tensor([11., 22., 30.])
    """

    def __init__(
        self,
        runs: Iterable[Run],
        source_widths: Sequence[int],
        target_widths: Sequence[int],
        steps: Iterable[int] = (),
        keep: int = 8,
    ) -> None:
        merged = _merge_runs(runs)
        self.source_widths, self.target_widths = tuple(source_widths), tuple(target_widths)
        edges = [edge for run in merged for edge in (run.source, run.target, run.width)]
        self.chunk = gcd(*source_widths, *target_widths, *edges, *steps) or 1
        width = max(target_widths, default=0) if len({*source_widths, *target_widths}) == 1 else 0
        #: whether every target area is the source area
        self._whole = width > 0 and merged == [Run(0, 0, 0, width, area) for area in range(len(target_widths))]
        #: whether the target area is the sum of two source areas
        self._sums_two = width > 0 and merged == [Run(area, 0, 0, width) for area in range(2)]
        self._tabulate(merged)
        self._memo = Memo[Indices](keep)

    def _tabulate(self, runs: Sequence[Run]) -> None:
        """Entries: a chunk that is read, for each chunk of a target row in turn."""
        table = np.array(
            [(run.sender, run.source, run.target, run.width, run.receiver) for run in runs], dtype=np.int64
        ).reshape(-1, 5)
        counts = table[:, 3] // self.chunk
        sender, source, target, _, receiver = np.repeat(table, counts, axis=0).T
        within = np.arange(counts.sum()) - np.repeat(_starts(counts), counts)
        per_row = np.array(self.target_widths, dtype=np.int64) // self.chunk
        place = _starts(per_row)[receiver] + target // self.chunk + within
        order = np.argsort(place, kind="stable")
        self._sender, self._offset = sender[order], source[order] // self.chunk + within[order]
        self._stride = np.array(self.source_widths, dtype=np.int64)[self._sender] // self.chunk
        self._summands = np.bincount(place, minlength=int(per_row.sum()))
        self._chunks = per_row  # in a row of each target area
        self._widths = per_row * self.chunk
        self._entries = np.bincount(receiver[order], minlength=len(per_row))
        self._copies = bool((self._summands == 1).all())
        #: whether rows are single chunks at one distance
        self._steady = self._copies and bool((self._entries == 1).all() and (self._stride == self._stride[:1]).all())

    def __call__(
        self, flat: Tensor, source_rows: Numbers, rows: Numbers, scale: float = 1.0, starts: Ints | None = None
    ) -> Tensor:
        """The target areas, flat, end to end.

        Args:
            flat: holds the source areas.
            source_rows: of each source area.
            rows: of each target area.
            scale: multiplies them.
            starts: where each source area begins in ``flat``. Default: the areas are end to end.
        """
        rows = np.asarray(rows, dtype=np.int64)
        total = int(rows @ self._widths)
        if self._whole and flat.numel() * len(self.target_widths) == total:
            return _copies(flat, len(self.target_widths), scale)
        if self._sums_two and flat.numel() == 2 * total and scale == 1.0:
            return torch.add(*flat.view(2, total))
        if not total or not len(self._sender):
            return flat.new_zeros(total)
        return gather(flat, self.chunk, self.indices(source_rows, rows, flat, scale, starts))

    def indices(
        self, source_rows: Numbers, rows: Numbers, like: Tensor, scale: float = 1.0, starts: Ints | None = None
    ) -> Indices:
        """What the call gathers from a tensor ``like`` this one."""
        before, counts = np.asarray(source_rows, dtype=np.int64), np.asarray(rows, dtype=np.int64)
        begins = None if starts is None else starts.tobytes()
        key = before.tobytes(), counts.tobytes(), begins, scale, like.dtype, like.device

        def compute() -> Indices:
            first = starts_of(before, self.source_widths) if starts is None else starts
            return self._compute(first, counts, scale, like.dtype, like.device)

        return self._memo.get(key, compute)

    def _compute(self, starts: Ints, counts: Ints, scale: float, dtype: torch.dtype, device: torch.device) -> Indices:
        first = starts[self._sender] // self.chunk + self._offset
        if self._steady and scale == 1.0:
            return Indices(_expand_steady(first, int(self._stride[0]), counts, device), None, None)
        chunks = expand(first, self._stride, self._entries, counts)
        if self._copies and scale == 1.0:
            return Indices(to_device(chunks, device), None, None)
        if self._copies:
            bags = np.arange(len(chunks))
        else:  # the bags of one row after the other
            size = np.repeat(self._entries, self._chunks)
            begin = np.repeat(_starts(self._entries * counts) - _starts(self._entries), self._chunks)
            bags = expand(begin + _starts(self._summands), size, self._chunks, counts)
        scales = None if scale == 1.0 else torch.full((len(chunks),), scale, dtype=dtype, device=device)
        return Indices(to_device(chunks, device), to_device(bags, device), scales)


def expand(first: Ints, stride: Ints, entries: Ints, rows: Ints) -> Ints:
    """``first[e] + r * stride[e]`` for each entry e of each row r of each area.

    Args:
        first, stride: of each entry, area after area.
        entries: of a row of each area.
        rows: of each area.
    """
    if len(rows) == 1:
        single: Ints = first + np.arange(int(rows[0]), dtype=np.int64)[:, None] * stride
        return single.reshape(-1)
    sizes = entries * rows
    area = np.repeat(np.arange(len(rows)), sizes)
    within = np.arange(len(area)) - _starts(sizes)[area]
    row = within // entries[area]
    entry = within - row * entries[area] + _starts(entries)[area]
    return first[entry] + row * stride[entry]


def _expand_steady(first: Ints, step: int, rows: Ints, device: torch.device) -> Tensor:
    """`expand` of one entry in each area, on the device."""
    table = to_device(np.stack([first - _starts(rows) * step, rows]), device)
    total = int(rows.sum())
    shifts = torch.repeat_interleave(table[0], table[1], output_size=total)
    return shifts.add_(torch.arange(0, total * step, step, device=device))


def starts_of(rows: Numbers, widths: Numbers = (1,)) -> Ints:
    """Where areas begin that stand end to end.

    >>> starts_of([2, 3, 1], [4, 1, 5]).tolist()
    [0, 8, 11]
    """
    return _starts(np.asarray(rows, dtype=np.int64) * np.asarray(widths, dtype=np.int64))


def to_device(numbers: Ints, device: torch.device) -> Tensor:
    """Integers of the host on a device, without waiting for it."""
    host = torch.from_numpy(numbers)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def _starts(sizes: Ints) -> Ints:
    return np.cumsum(sizes) - sizes


def _copies(flat: Tensor, number: int, scale: float) -> Tensor:
    """Copies of ``flat`` times ``scale``, end to end; itself where there is nothing to do."""
    if number == 1:
        return flat if scale == 1.0 else flat * scale
    return flat.repeat(number) if scale == 1.0 else (flat.expand(number, -1) * scale).view(-1)


def _merge_runs(runs: Iterable[Run]) -> list[Run]:
    """Joins runs that are adjacent in both source and target."""
    merged: list[Run] = []
    for run in runs:
        last = merged[-1] if merged else Run(-1, 0, 0, 0)
        end = last.sender, last.receiver, last.source + last.width, last.target + last.width
        if end == (run.sender, run.receiver, run.source, run.target):
            merged[-1] = replace(last, width=last.width + run.width)
        else:
            merged.append(run)
    return merged
