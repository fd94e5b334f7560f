"""Copies and adds columns of many senders in one kernel.

::

    sender 0  [b, 12]   t0: 8 columns, t1: columns 0-4           output  [b, 16]
    sender 1  [b, 12]   t0: 8 columns, t1: columns 4-8           t0 = both added, t1 = one beside the other

A flat tensor holds *areas* end to end. The rows of an area have one width: an area is, for example, what one sender
sent. All column edges are multiples of a chunk, their greatest common divisor. An embedding bag over chunks gathers
and adds. Its indices are computed once for each set of area sizes. Its additions have one order on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from math import gcd
from typing import Generic, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recshard_lab.distributed.step.batch import LocalBatch, segment_index
from recshard_lab.distributed.step.layout import Layout, ShardFeature
from recshard_lab.sparse.ops import complete_cumsum

Ints: TypeAlias = NDArray[np.int64]
Numbers: TypeAlias = Sequence[int] | Ints
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Run:
    """Columns ``[source, source + width)`` of area ``sender`` go to ``[target, target + width)`` of ``receiver``."""

    sender: int
    source: int
    target: int
    width: int
    receiver: int = 0

    def reversed(self) -> Run:
        """The same columns in the other direction."""
        return Run(self.receiver, self.target, self.source, self.width, self.sender)


@dataclass(frozen=True, slots=True)
class Indices:
    """Which chunks to gather. A copy needs only the chunks; sums and products are embedding bags."""

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

    >>> join = ColumnMap([Run(0, 0, 0, 2), Run(1, 0, 0, 2), Run(1, 2, 2, 1)], [2, 3], [3])
    >>> join.bind([1, 1], [1], torch.device("cpu"))(torch.tensor([1.0, 2.0, 10.0, 20.0, 30.0]))
    tensor([11., 22., 30.])
    """

    def __init__(
        self,
        runs: Iterable[Run],
        source_widths: Sequence[int],
        target_widths: Sequence[int],
        steps: Iterable[int] = (),
    ) -> None:
        merged = _merge_runs(runs)
        self.source_widths, self.target_widths = tuple(source_widths), tuple(target_widths)
        edges = [edge for run in merged for edge in (run.source, run.target, run.width)]
        # the largest size that cuts no run: the fewest indices
        self.chunk = gcd(*source_widths, *target_widths, *edges, *steps) or 1
        width = max(target_widths, default=0) if len({*source_widths, *target_widths}) == 1 else 0
        #: whether every target area is the source area
        self._whole = width > 0 and merged == [Run(0, 0, 0, width, area) for area in range(len(target_widths))]
        #: whether the target area is the sum of two source areas
        self._sums_two = width > 0 and merged == [Run(area, 0, 0, width) for area in range(2)]
        self._tabulate(merged)

    def _tabulate(self, runs: Sequence[Run]) -> None:
        """Entries: a chunk that is read, for each chunk of a target row in turn."""
        table = np.array(
            [(run.sender, run.source, run.target, run.width, run.receiver) for run in runs], dtype=np.int64
        ).reshape(-1, 5)
        counts = table[:, 3] // self.chunk  # chunks of each run
        sender, source, target, _, receiver = np.repeat(table, counts, axis=0).T  # [entries] each
        within = np.arange(counts.sum()) - np.repeat(_starts(counts), counts)  # chunk of its run
        per_row = np.array(self.target_widths, dtype=np.int64) // self.chunk
        # the chunk that each entry adds to, in one row of all target areas side by side
        place = _starts(per_row)[receiver] + target // self.chunk + within
        # stable: summands keep the order of runs, so that all ranks round alike
        order = np.argsort(place, kind="stable")
        self._sender, self._offset = sender[order], source[order] // self.chunk + within[order]
        # chunks from a row to the next one in the source area
        self._stride = np.array(self.source_widths, dtype=np.int64)[self._sender] // self.chunk
        self._summands = np.bincount(place, minlength=int(per_row.sum()))  # of each target chunk
        self._chunks = per_row  # in a row of each target area
        self._widths = per_row * self.chunk
        self._entries = np.bincount(receiver[order], minlength=len(per_row))  # in a row of each target area
        self._copies = bool((self._summands == 1).all())
        #: whether rows are single chunks at one distance
        self._steady = self._copies and bool((self._entries == 1).all() and (self._stride == self._stride[:1]).all())

    def bind(
        self,
        source_rows: Numbers,
        rows: Numbers,
        device: torch.device,
        scale: float = 1.0,
        dtype: torch.dtype = torch.float32,
        starts: Ints | None = None,
    ) -> Callable[[Tensor], Tensor]:
        """What makes the target areas, flat, end to end, of a flat tensor that holds the source areas.

        Args:
            source_rows: of each source area.
            rows: of each target area.
            device: of the tensors.
            scale: multiplies them.
            dtype: of the tensors; read where they are scaled.
            starts: where each source area begins in the tensor. Default: the areas are end to end.
        """
        rows = np.asarray(rows, dtype=np.int64)
        total, areas = int(rows @ self._widths), len(self.target_widths)
        held = int(np.asarray(source_rows, dtype=np.int64) @ np.array(self.source_widths, dtype=np.int64))
        # a copy, and the sum of two row shards, need no indices
        if starts is None and self._whole and held * areas == total:
            return partial(_copies, number=areas, scale=scale)
        if starts is None and self._sums_two and held == 2 * total and scale == 1.0:
            return partial(_sum_of_two, size=total)
        if not total or not len(self._sender):
            return lambda flat: flat.new_zeros(total)
        indices = self.indices(source_rows, rows, device, scale, dtype, starts)
        return partial(gather, chunk=self.chunk, indices=indices)

    def indices(
        self,
        source_rows: Numbers,
        rows: Numbers,
        device: torch.device,
        scale: float = 1.0,
        dtype: torch.dtype = torch.float32,
        starts: Ints | None = None,
    ) -> Indices:
        """What `bind` gathers."""
        starts = starts_of(source_rows, self.source_widths) if starts is None else starts
        # first: [entries] the chunk that each entry reads for row 0
        counts, first = np.asarray(rows, dtype=np.int64), starts[self._sender] // self.chunk + self._offset
        # two numbers for each area go to the device, not an index for each chunk
        if self._steady and scale == 1.0:
            return Indices(_expand_steady(first, int(self._stride[0]), counts, device), None, None)
        chunks = expand(first, self._stride, self._entries, counts)
        if self._copies and scale == 1.0:
            return Indices(to_device(chunks, device), None, None)
        if self._copies:
            bags = np.arange(len(chunks))  # one chunk in a bag, to scale it
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
        single: Ints = first + np.arange(int(rows[0]), dtype=np.int64)[:, None] * stride  # [rows, entries]
        return single.reshape(-1)
    sizes = entries * rows
    area = np.repeat(np.arange(len(rows)), sizes)
    within = np.arange(len(area)) - _starts(sizes)[area]
    row = within // entries[area]
    entry = within - row * entries[area] + _starts(entries)[area]
    return first[entry] + row * stride[entry]


def _expand_steady(first: Ints, step: int, rows: Ints, device: torch.device) -> Tensor:
    """`expand` of one entry in each area, on the device."""
    # one copy to the device for both; starts are shifted, so that one arange counts through all areas
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


def _sum_of_two(flat: Tensor, size: int) -> Tensor:
    return torch.add(*flat.view(2, size))


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


class Target:
    """Where the columns of blocks are in the output.

    Side by side in one area ``[B, output width]``. In a variable batch, blocks have different numbers of bags: each is
    an area ``[bags, columns]``, one after the other.

    Args:
        layout: the wiring.
        variable: whether batches are variable.

    Attributes:
        widths: columns of each area.
        places: for each block, its area, and its first column there.
    """

    def __init__(self, layout: Layout, variable: bool) -> None:
        self.variable, blocks = variable, layout.blocks
        self.widths = [block.dim for block in blocks] if variable else [layout.output_width]
        self.places = [(n, 0) if variable else (0, block.start) for n, block in enumerate(blocks)]


def widths_of(features: Sequence[ShardFeature]) -> tuple[int, ...]:
    """Columns of each shard feature."""
    return tuple(feature.shard.num_cols for feature in features)


def runs_of(
    features: Sequence[ShardFeature], sender: int, places: Sequence[tuple[int, int]] | Mapping[int, tuple[int, int]]
) -> list[Run]:
    """From an area with these features side by side to the area and first column of each block in ``places``."""
    runs = []
    for feature, source in zip(features, accumulate(widths_of(features), initial=0), strict=False):
        receiver, start = places[feature.block]
        runs.append(Run(sender, source, start + feature.shard.cols[0], feature.shard.num_cols, receiver))
    return runs


class Last(Generic[T]):
    """The value of a function of numbers of rows. The last one is kept: batches often have equal numbers.

    >>> total = Last(lambda rows: int(rows.sum()))
    >>> total(np.array([2, 3])), total(np.array([2, 3]))
    (5, 5)
    """

    def __init__(self, compute: Callable[..., T]) -> None:
        self._compute, self._known = compute, dict[tuple[bytes, ...], T]()

    def __call__(self, *rows: Ints) -> T:
        key = tuple(own.tobytes() for own in rows)
        if key not in self._known:
            self._known = {key: self._compute(*rows)}
        return self._known[key]


# Which chunks of rows on the wire belong to which places of a batch.


class Chunks:
    """The columns of shard features in chunks, which divide all of their edges.

    Args:
        features: the shard features, in the order of their rows on the wire.
        dims: columns of each block.

    Attributes:
        size: columns of a chunk.
        blocks: the block of each shard feature.
        of_blocks: for each block, the chunks of its row.
    """

    def __init__(self, features: Sequence[ShardFeature], dims: Sequence[int]) -> None:
        columns = [feature.shard.cols for feature in features]
        self.size = gcd(*dims, *(edge for span in columns for edge in span)) or 1
        self.blocks = np.array([feature.block for feature in features], dtype=np.int64)
        self.of_blocks = np.array(dims, dtype=np.int64) // self.size
        self._first = np.array([first for first, _ in columns], dtype=np.int64) // self.size
        self._counts = np.array([end - first for first, end in columns], dtype=np.int64) // self.size

    def of(self, place: Tensor, starts: Ints, strides: Ints, rows: Ints, local_batch: LocalBatch) -> Indices:
        """For each chunk of rows on the wire, the chunks elsewhere of its places: one, or a bag of them.

        Args:
            place: ``[n]`` of each id of these shard features.
            starts: for each block, the chunk where place 0 begins.
            strides: for each block, the chunks from a place to the next.
            rows: rows of each shard feature on the wire.
            local_batch: has the number of places of each shard feature and of each row.
        """
        sizes, uses, device = local_batch.num_places, local_batch.uses, place.device
        assert sizes is not None
        if not len(place):
            return Indices(place.long(), None, None)
        # one copy to the device for all four
        table = np.stack([sizes, starts[self.blocks] + self._first, strides[self.blocks], self._counts])
        number, first, stride, counts = to_device(table, device)
        feature = torch.repeat_interleave(number, output_size=len(place))  # [n] of each place
        place = place * stride[feature] + first[feature]  # now the first chunk of each place
        bags = None if uses is None else complete_cumsum(uses)[:-1]
        # a row is one chunk, so places are chunks
        if (self._counts == 1).all():
            return Indices(place, bags, None)
        total, total_places = int(rows @ self._counts), int(sizes @ self._counts)
        chunks = counts[feature if bags is None else feature.index_select(0, bags)]
        row = torch.repeat_interleave(chunks, output_size=total)  # [chunks on the wire]
        within = torch.arange(total, device=device) - (chunks.cumsum(0) - chunks)[row]  # chunk of its row
        if uses is None or bags is None:
            return Indices(place[row] + within, None, None)
        uses = uses[row]  # of each chunk: a bag of the same chunk of all its places
        index = segment_index(bags[row], uses, total_places)
        within = torch.repeat_interleave(within, uses, output_size=total_places)
        return Indices(place[index] + within, complete_cumsum(uses)[:-1], None)


def first_ids(local_batch: LocalBatch) -> Ints:
    """For each block, the place in the batch of its first id."""
    return np.array([start for start, _ in local_batch.spans], dtype=np.int64)


def inverse_of(found: Indices, total: int) -> Tensor:
    """``[total]``: for each chunk elsewhere, the chunk on the wire; the number of these where it has none."""
    rows = torch.arange(len(found.chunks if found.bags is None else found.bags), device=found.chunks.device)
    if found.bags is not None:
        ends = torch.nn.functional.pad(found.bags[1:], (0, 1), value=len(found.chunks))
        rows = torch.repeat_interleave(rows, ends - found.bags, output_size=len(found.chunks))
    count = len(found.chunks if found.bags is None else found.bags)
    return found.chunks.new_full((total,), count).index_copy_(0, found.chunks, rows)


# From the order of rows in a kernel to their order on the wire, by source rank and shard feature, and back.


class Stacked:
    """Pooled kernels: shard features side by side; in each, the rows of all sources below each other, then zeros.

    ::

        wire       source 0: a a a, b   source 1: c, d d        kernel     a b
                                                                           a d
                                                                           a d
                                                                           c 0

    Args:
        widths: columns of each shard feature; or of one parcel that all of them share, which has equal orders.
        sources: W.
        steps: sizes of other things among the gradients that arrive.
    """

    def __init__(self, widths: Sequence[int], sources: int, steps: Sequence[int] = ()) -> None:
        self._widths = np.array(widths, dtype=np.int64)
        self.width, self._chunk = sum(widths), gcd(*widths, *steps) or 1
        self._columns = starts_of(self._widths)
        runs = [Run(area, 0, 0, width, area) for area, width in enumerate([*widths] * sources)]
        self._pack = ColumnMap(runs, [self.width] * len(runs), [*widths] * sources, self._columns)

    def by_source(self, bags: Ints, device: torch.device) -> Callable[[Tensor], Tensor]:
        """What puts rows ``[T, width]`` of the kernel in the order of the wire; ``bags [W, features]``."""
        # one shard feature has its rows by source already
        if len(self._widths) == 1:
            return torch.flatten
        # [W, features]: below the rows of earlier sources, in the columns of the feature
        starts = (np.cumsum(bags, 0) - bags) * self.width + self._columns
        counts = bags.reshape(-1)
        pack = self._pack.bind(counts, counts, device, starts=starts.reshape(-1))
        return lambda rows: pack(rows.reshape(-1))

    def by_kernel(self, bags: Ints, device: torch.device, begins: Ints | None = None) -> Callable[[Tensor], Tensor]:
        """What makes ``[T, width]`` of a flat message, zeros where a shard feature has fewer than T bags.

        Args:
            bags: ``[W, features]``.
            device: of the message.
            begins: where the rows of each source begin; without it, behind those of the source before.
        """
        width = self.width
        if begins is None and len(self._widths) == 1 and width:
            return lambda flat: flat.view(-1, width)
        # T, and [W] numbers from each source
        longest, sizes = int(bags.sum(0).max(initial=0)), bags @ self._widths
        if not longest * width:
            return lambda flat: flat.new_empty(longest, width)
        starts = starts_of(sizes) if begins is None else begins
        if len(self._widths) > 1:
            indices = self._compute(starts, bags, device)
            return lambda flat: gather(flat, self._chunk, indices).view(longest, width)

        def own_rows(flat: Tensor) -> Tensor:
            if flat.numel() > longest * width:
                edges = np.column_stack([starts, starts + sizes]).reshape(-1)  # gap, rows, gap, rows, ..., gap
                flat = torch.cat(flat.split(np.diff(edges, prepend=0, append=flat.numel()).tolist())[1::2])
            return flat.view(longest, width)

        return own_rows

    def _compute(self, begins: Ints, rows: Ints, device: torch.device) -> Indices:
        (sources, count), totals = rows.shape, rows.sum(0)
        longest = totals.max()
        sizes = rows * self._widths
        starts = begins[:, None] + np.cumsum(sizes, 1) - sizes
        chunks = self._widths // self._chunk
        # by shard feature and source, then the empty bags: where rows begin, in chunks, and -1
        first = np.vstack([starts // self._chunk, np.full(count, -1)]).T.reshape(-1)
        stride = np.vstack([np.tile(chunks, (sources, 1)), np.zeros_like(totals)]).T.reshape(-1)
        every = np.vstack([rows, longest - totals]).T.reshape(-1)
        table = expand(first, stride, np.ones_like(first), every).reshape(count, longest)
        begin = np.repeat(table, chunks, axis=0).T  # [T, chunks of a row]
        places = (begin + np.concatenate([np.arange(n) for n in chunks])).reshape(-1)
        if (totals == longest).all():
            return Indices(to_device(places, device), None, None)
        # an empty bag gathers nothing, so that its row is zeros
        known = (begin >= 0).reshape(-1)
        return Indices(to_device(places[known], device), to_device(np.cumsum(known) - known, device), None)


class Transposed:
    """Kernels of sequences, whose rows are flat: by shard feature, then source.

    Args:
        widths: columns of each shard feature.
        sources: W.
        device: of rows.
    """

    def __init__(self, widths: Sequence[int], sources: int, device: torch.device) -> None:
        self.features = count = len(widths)
        areas, turned = [width for width in widths for _ in range(sources)], [*widths] * sources
        pairs = [(n * sources + source, source * count + n) for n in range(count) for source in range(sources)]
        # an area is the rows of one feature and source: the map turns (feature, source) to (source, feature)
        runs = [Run(area, 0, 0, areas[area], place) for area, place in pairs]
        there, back = ColumnMap(runs, areas, turned), ColumnMap([run.reversed() for run in runs], turned, areas)
        self._there = Last(lambda counts: there.bind(counts.T.reshape(-1), counts.reshape(-1), device))
        self._back = Last(lambda counts: back.bind(counts.reshape(-1), counts.T.reshape(-1), device))

    def by_source(self, flat: Tensor, counts: Ints) -> Tensor:
        """Rows of the kernel, in the order of the wire; ``counts [W, features]``."""
        return self._there(counts)(flat)

    def by_kernel(self, flat: Tensor, counts: Ints) -> Tensor:
        """The other way."""
        return self._back(counts)(flat)


# Mean pooling: sums over the bag lengths of the local batch, in a number of kernels that no table adds to.


class Means:
    """Divides the columns of mean-pooled blocks.

    Args:
        layout: the wiring.
    """

    def __init__(self, layout: Layout) -> None:
        self.blocks = layout.mean_blocks
        dims = [block.dim for block in layout.blocks]
        self.chunk = gcd(*dims) or 1
        self._chunks = np.array(dims, dtype=np.int64) // self.chunk

    def bind(
        self, bags: Sequence[int], samples_first: bool, device: torch.device
    ) -> Callable[[Tensor, LocalBatch], Tensor] | None:
        """What divides sums by the lengths of their bags, empty bags by 1; None where no block is a mean.

        Args:
            bags: of each block.
            samples_first: whether sums are ``[B, output width]``; else they are flat, block after block.
            device: of the sums.
        """
        if not self.blocks or not sum(bags):
            return None
        index = self._index(bags, samples_first, device)

        def divide(rows: Tensor, local_batch: LocalBatch) -> Tensor:
            lengths = local_batch.lengths
            # the last number, 1, divides the blocks that are sums
            divided = torch.cat([*(lengths[block] for block in self.blocks), lengths[0].new_ones(1)])
            divisors = divided.clamp(min=1).to(rows.dtype).index_select(0, index).unsqueeze(1)
            return (rows.view(-1, self.chunk) / divisors).view(rows.shape)  # [chunks, chunk] / [chunks, 1]

        return divide

    def _index(self, bags: Sequence[int], samples_first: bool, device: torch.device) -> Tensor:
        """For each chunk of the rows, the place of its length; of a sum, the place of the 1 at the end."""
        stride = np.isin(np.arange(len(bags)), self.blocks).astype(np.int64)
        sizes = np.array(bags, dtype=np.int64)
        ends = np.cumsum(sizes * stride)
        first = np.repeat(np.where(stride, ends - sizes, ends[-1]), self._chunks)
        stride = np.repeat(stride, self._chunks)
        if samples_first:
            return to_device(expand(first, stride, self._chunks.sum(keepdims=True), sizes[:1]), device)
        return to_device(expand(first, stride, self._chunks, sizes), device)
