"""Distinct ids: of shard features that send each id once, and of replicated ones.

Replicated shard features: each rank looks up its own batch, and every rank applies the gradients of all ranks.

A table is never summed whole over the ranks. Each sender chooses, for each shard feature of each batch, the smaller of
two messages to every rank:

::

    bags    ids of the bags in forward, gradients of the pooled rows [S, D] in backward
    rows    the distinct ids [U] in forward, their summed gradients [U, D] in backward. Sequence collections always
            send rows. The kernels get U bags of one id each.

All ranks step the same kernels on the same bags in the same order, and kernels of replicas are deterministic, so
replicas stay equal to the last bit.

"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from recshard_lab.distributed.step.batch import FeatureIds, LocalBatch, TouchedRows, host_list, join
from recshard_lab.distributed.step.columns import ColumnMap, Stacked, Target, runs_of, widths_of
from recshard_lab.distributed.step.layout import Layout, ShardFeature
from recshard_lab.distributed.step.route import Source, Wiring
from recshard_lab.sparse.ops import complete_cumsum


@dataclass(slots=True)
class Sorted:
    """The ids of k shard features, sorted by feature and id, on their device.

    Attributes:
        ids: ``[n]`` sorted.
        order: ``[n]`` the place of each of them in the input.
        row: ``[n]`` the number of its distinct row, over all features.
        ends: ``[k + 1]`` distinct rows before each feature.
    """

    ids: Tensor
    order: Tensor
    row: Tensor
    ends: Tensor


def sort_rows(ids: Tensor, counts: Tensor, bases: Tensor, chosen: Tensor | None = None) -> Sorted:
    """Sorts without a wait of the host.

    Args:
        ids: ``[n]`` of all segments.
        counts: ids of each segment.
        bases: for each segment a number that no row of another segment plus its base reaches, ascending over the
            chosen segments; larger than all of these for the others.
        chosen: the numbers of the k segments that count; all where left out.
    """
    # one sort for all segments: the keys of each are above those of the segments before it
    keys = ids + torch.repeat_interleave(bases, counts, output_size=ids.numel())
    keys, order = sort_keys(keys)
    # the slice is for no keys, where the pad alone is one
    row = pad(keys[1:] != keys[:-1], (1, 0))[: keys.numel()].cumsum(0)
    # chosen segments are sorted first, so their ids are the first ones
    ends = complete_cumsum(counts if chosen is None else counts.index_select(0, chosen))
    rows_before = pad(row + 1, (1, 0)).index_select(0, ends)
    return Sorted(ids.index_select(0, order), order, row, rows_before)


def sort_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """The keys ``[n]`` sorted, and the place of each in the input. Equal keys keep their order.

    On a CPU, key and place are packed into one integer where both fit: numpy sorts numbers 10x as fast as torch sorts
    pairs (1 thread, 133,000 keys).

    >>> sort_keys(torch.tensor([7, 2, 7]))
    (tensor([2, 7, 7]), tensor([1, 0, 2]))
    """
    bits = keys.numel().bit_length()
    if keys.device.type == "cpu" and keys.numel():
        numbers = keys.numpy()
        if numbers.min() >= 0 and int(numbers.max()).bit_length() + bits < 64:
            # the place in the low bits makes all numbers different, and the sort stable
            packed = np.sort(numbers.astype(np.int64) << bits | np.arange(keys.numel()))
            return torch.from_numpy(packed >> bits), torch.from_numpy(packed & ((1 << bits) - 1))
    ordered = keys.sort(stable=True)
    return ordered.values, ordered.indices


def split_rows(
    ordered: Sorted, members: Tensor, weights: Tensor | None, distinct: Sequence[int], counts: Sequence[int]
) -> list[TouchedRows]:
    """The distinct rows of each feature.

    Args:
        ordered: as `sort_rows` returns it.
        members: ``[n]`` for each id of the input, its bag in its shard feature (in sequence collections, its place).
        weights: ``[n]`` per-sample weights, or None.
        distinct: U of each feature.
        counts: ids of each feature.
    """
    device, total, used = ordered.ids.device, int(sum(distinct)), int(sum(counts))
    starts = torch.searchsorted(ordered.row, torch.arange(total, device=device))  # [sum of U]
    rows = ordered.ids.index_select(0, starts)
    # counted from the first id of their feature
    starts = starts - host_list(np.repeat(np.cumsum(counts) - counts, distinct), device)
    order = ordered.order[:used]  # ids of other segments are behind
    sorted_members = members.index_select(0, order)
    sorted_weights = None if weights is None else weights.index_select(0, order)
    return [
        TouchedRows(r, s, m, w)
        for r, s, m, w in zip(
            rows.split(list(distinct)),
            starts.split(list(distinct)),
            sorted_members.split(list(counts)),
            [None] * len(counts) if sorted_weights is None else sorted_weights.split(list(counts)),
            strict=True,
        )
    ]


def distinct_ids(source: Source, segments: Sequence[int], rows: Sequence[int]) -> Source:
    """The distinct ids of some segments, as a source with one bag a segment. Does not read the device.

    Its first ids belong to the segments; how many they are is known once the host has read its counts.

    Args:
        source: without weights.
        segments: ascending.
        rows: for each, the rows of its shard.

    >>> source = Source(torch.tensor([3, 2]), torch.tensor([7, 2, 7, 1, 1]), None, None, np.array([1, 1]))
    >>> found = distinct_ids(source, [0, 1], [8, 8])
    >>> found.ids[:3].tolist(), found.uses[:3].tolist(), found.counts().tolist(), found.order.tolist()
    ([2, 7, 1], [1, 2, 2], [2, 1], [1, 0, 2, 3, 4])
    """
    device = source.ids.device
    bases = np.full(len(source.bags), _LAST_BASE)  # other segments are sorted last
    bases[list(segments)] = np.cumsum([0, *rows[:-1]])
    chosen = None if len(segments) == len(source.bags) else host_list(segments, device)
    ordered = sort_rows(source.ids, source.counts(), host_list(bases, device), chosen)
    # equal ids write equal values, so their order does not matter
    ids = torch.empty_like(source.ids).scatter_(0, ordered.row, ordered.ids)
    uses = torch.zeros_like(ordered.row).scatter_add_(0, ordered.row, torch.ones_like(ordered.row))
    return Source(ordered.ends.diff(), ids, None, ordered.order, np.ones(len(segments), np.int64), uses)


def rows_are_smaller(distinct: int, ids: int, bags: int, dim: int) -> bool:
    """Whether a pooled shard feature of D columns takes fewer elements as rows than as bags."""
    return distinct * (dim + 1) < bags * (dim + 1) + ids


class DistinctRows:
    """Finds the distinct rows of a batch's replicated shard features.

    Args:
        layout: the layout.
        pooled: False for sequence collections, which have at most as many rows as ids.
    """

    def __init__(self, layout: Layout, pooled: bool) -> None:
        self.features, self.pooled = layout.replicated_features, pooled
        self._sorted: list[_Batch] = []

    def sort_on_device(self, sources: Sequence[Source], wiring: Wiring, read: list[Tensor]) -> None:
        """Sorts before the host knows any count; the numbers of distinct rows join the one read."""
        copies = wiring.segment[len(wiring.segment) - len(self.features) :].tolist()
        for number, source in enumerate(sources):
            first = wiring.first_segment[number]
            rows = {
                segment - first: feature.shard.num_rows
                for segment, feature in zip(copies, self.features, strict=True)
                if first <= segment < wiring.first_segment[number + 1]
            }
            if rows:
                # columns of one table share a segment, which is sorted once
                chosen = sorted(rows)
                bases = np.full(len(source.bags), _LAST_BASE)
                bases[chosen] = np.cumsum([0, *(rows[segment] for segment in chosen[:-1])])
                self._sort(source, [first + segment for segment in chosen], bases, chosen, read)

    def sort_on_host(self, replicas: Sequence[FeatureIds], segments: Sequence[int]) -> None:
        """Sorts CPU tensors, of which the host knows all counts: only features that rows may make smaller.

        Args:
            replicas: the ids of each replicated shard feature.
            segments: for each, its segment. Columns of one table share a segment.
        """
        chosen: dict[int, int] = {}
        for number, (ids, segment, feature) in enumerate(zip(replicas, segments, self.features, strict=True)):
            if not self.pooled or _worth_sorting(ids, feature):
                chosen.setdefault(segment, number)
        if chosen:
            own = [replicas[number] for number in chosen.values()]
            weights = [ids.weights for ids in own if ids.weights is not None]
            source = Source(
                join([ids.lengths for ids in own]),
                join([ids.ids for ids in own]),
                join(weights) if weights else None,
                None,
                np.array([ids.num_bags for ids in own]),
            )
            rows = [self.features[number].shard.num_rows for number in chosen.values()]
            self._sort(source, list(chosen), np.cumsum([0, *rows[:-1]]), None, None, [ids.num_ids for ids in own])

    def _sort(
        self,
        source: Source,
        segments: list[int],
        bases: NDArray[np.int64],
        chosen: list[int] | None,
        read: list[Tensor] | None,
        counts: Sequence[int] | None = None,
    ) -> None:
        device = source.ids.device
        on_device = source.counts() if counts is None else host_list(counts, device)
        choice = None if chosen is None else host_list(chosen, device)
        ordered = sort_rows(source.ids, on_device, host_list(bases, device), choice)
        place = -1
        if read is not None:
            place = len(read)
            read.append(ordered.ends)  # [k + 1]
        self._sorted.append(_Batch(source, segments, ordered, self._members(source, on_device), place))

    def _members(self, source: Source, counts: Tensor) -> Tensor:
        """``[n]`` for each id its bag in its segment; in sequence collections, its place there."""
        device, total = source.ids.device, source.ids.numel()
        if not self.pooled:
            starts = complete_cumsum(counts)[:-1]
            return torch.arange(total, device=device) - torch.repeat_interleave(starts, counts, output_size=total)
        bags = source.bags
        # computed on the device where it can be
        if (bags == bags[0]).all():
            numbers = torch.arange(int(bags[0]), device=device).repeat(len(bags))
        else:
            numbers = host_list(np.arange(bags.sum()) - np.repeat(np.cumsum(bags) - bags, bags), device)
        return torch.repeat_interleave(numbers, source.lengths.long(), output_size=total)

    def split(
        self, replicas: Sequence[FeatureIds], segments: Sequence[int], numbers: Sequence[NDArray[np.int64]]
    ) -> list[TouchedRows | None]:
        """For each replicated shard feature its distinct rows; None where its bags are smaller.

        Args:
            replicas: the ids of each.
            segments: for each, its segment.
            numbers: what the host has read.
        """
        found: dict[int, TouchedRows] = {}
        counts = {segment: ids.num_ids for segment, ids in zip(segments, replicas, strict=True)}
        for batch in self._sorted:
            # CPU tensors were sorted after the read
            ends = batch.ordered.ends.numpy() if batch.place < 0 else numbers[batch.place]
            own = [counts[segment] for segment in batch.segments]
            rows = split_rows(batch.ordered, batch.members, batch.source.weights, np.diff(ends).tolist(), own)
            found |= dict(zip(batch.segments, rows, strict=True))
        chosen: list[TouchedRows | None] = []
        for ids, segment, feature in zip(replicas, segments, self.features, strict=True):
            touched = found.get(segment)
            if touched is not None and self.pooled:
                distinct, columns = touched.rows.numel(), feature.shard.num_cols
                smaller = rows_are_smaller(distinct, ids.num_ids, ids.num_bags, columns)
                # checked again, as a GPU has sorted all features: every device then sends the same messages
                touched = touched if smaller and _worth_sorting(ids, feature) else None
            chosen.append(touched)
        return chosen


def _worth_sorting(ids: FeatureIds, feature: ShardFeature) -> bool:
    """Whether distinct rows may take fewer elements than bags. The answer is the same on every device."""
    return min(feature.shard.num_rows, ids.num_ids) <= 2 * ids.num_bags


@dataclass(slots=True)
class _Batch:
    """Sorted segments of one source; `place` of their row counts in the host's read, -1 for CPU tensors."""

    source: Source
    segments: list[int]
    ordered: Sorted
    members: Tensor
    place: int


_LAST_BASE = 2**62  # more than all rows of a model


# Gradients of replicated shard features: every rank receives them, behind those of the exchanged shard features.
#
# A shard feature travels as bags or as rows. Its sender decides when it sends the ids.


class Replicas:
    """Packs and unpacks these gradients, for pooled collections.

    Args:
        layout: the wiring.
        sources: W.
        target: the output, whose gradients are sent.
        steps: sizes of which the other rows in a message are multiples.
    """

    def __init__(self, layout: Layout, sources: int, target: Target, steps: Sequence[int]) -> None:
        self.features = layout.replicated_features
        self.widths = widths_of(self.features)
        self.order = Stacked(self.widths, sources, steps)
        runs = [runs_of([feature], number, target.places)[0].reversed() for number, feature in enumerate(self.features)]
        self._areas = [target.places[feature.block][0] for feature in self.features]
        self._take = ColumnMap(runs, target.widths, self.widths)

    def sends(self, rows: Sequence[int], local_batch: LocalBatch) -> list[int]:
        """Rows of each shard feature that every rank receives from this one; ``rows`` of each area of the output."""
        pairs = zip(self._areas, local_batch.touched, strict=True)
        return [rows[area] if touch is None else touch.rows.numel() for area, touch in pairs]

    def bind(
        self, rows: Sequence[int], device: torch.device, scale: float, dtype: torch.dtype
    ) -> Callable[[Tensor, LocalBatch], Tensor]:
        """What every rank receives of the output's gradient, flat, means divided, times ``scale``; flat."""
        bags = [rows[area] for area in self._areas]
        take = self._take.bind(rows, bags, device, scale, dtype)
        return lambda grad, local_batch: sum_touched(take(grad), bags, self.widths, local_batch.touched)


def sum_touched(
    flat: Tensor, rows: Sequence[int], widths: Sequence[int], touched: Sequence[TouchedRows | None]
) -> Tensor:
    """Sums the gradients of bags (or ids) that read one row. One embedding bag serves all areas of one width.

    Args:
        flat: areas end to end.
        rows: of each area.
        widths: of each area.
        touched: for each area the rows that it is summed to; None copies it.
    """
    if all(touch is None for touch in touched):
        return flat
    parts = list(flat.split([n * width for n, width in zip(rows, widths, strict=True)]))
    for width in sorted(set(widths)):
        summed = [(n, touch) for n, touch in enumerate(touched) if touch is not None and widths[n] == width]
        if not summed:
            continue
        numbers = [n for n, _ in summed]
        table = flat if len(numbers) == len(parts) else torch.cat([parts[n] for n in numbers])
        shifts = list(accumulate((rows[n] for n in numbers[:-1]), initial=0))  # first row of each area in `table`
        sums = _sums(table.view(-1, width), [touch for _, touch in summed], shifts)
        # one width: the sums are in order already
        if len(numbers) == len(parts):
            return sums
        sizes = [width * touch.rows.numel() for _, touch in summed]
        for n, own in zip(numbers, sums.split(sizes), strict=True):
            parts[n] = own
    return torch.cat(parts)


def _sums(table: Tensor, touched: Sequence[TouchedRows], shifts: Sequence[int]) -> Tensor:
    """The summed gradients, flat; the members of each count from row ``shifts`` of ``table``."""
    if not any(touch.rows.numel() for touch in touched):
        return table.new_empty(0)
    # members and starts count from their area; one embedding bag needs them over all areas
    begins = list(accumulate((touch.members.numel() for touch in touched[:-1]), initial=0))
    members = torch.cat(torch._foreach_add([touch.members for touch in touched], list(shifts)))
    bags = torch.cat(torch._foreach_add([touch.starts for touch in touched], begins))
    weights = [touch.weights for touch in touched if touch.weights is not None]
    scales = torch.cat(weights).to(table.dtype) if weights else None
    return torch.embedding_bag(table, members, bags, mode=0, per_sample_weights=scales)[0].view(-1)
