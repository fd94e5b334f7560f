"""Where the ids of shard features are in the sources of a batch, and how runs of a flat tensor are moved.

Shape letters: E exchanged shard features of all ranks together, R replicated ones, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recshard_lab.distributed.step.bucketize import has_fbgemm
from recshard_lab.distributed.step.route_ids import Source, Wiring, order_in_batch
from recshard_lab.distributed.step.types import FeatureIds, host_list, join, segment_index

Array = NDArray[np.int64]


class Segments:
    """Where the ids and bags of every shard feature are.

    Args:
        sources: of the batch.
        counts: for each source, ids of each segment.
        wiring: for the batch's keys.
        num_exchanged: E.

    Attributes:
        ids: ``([E + R], [E + R])`` first id of each shard feature in its source, and its end.
        bags: the same of its bags.
    """

    def __init__(self, sources: Sequence[Source], counts: Sequence[Array], wiring: Wiring, num_exchanged: int) -> None:
        self.counts, self.wiring, self.num_exchanged = list(counts), wiring, num_exchanged
        self.ids = self._runs(counts)
        self.bags = self._runs([source.bags for source in sources])

    def _runs(self, sizes: Sequence[Array]) -> tuple[Array, Array]:
        flat = sizes[0] if len(sizes) == 1 else np.concatenate(sizes)
        ends = flat.cumsum() if len(sizes) == 1 else np.concatenate([own.cumsum() for own in sizes])
        ends = ends[self.wiring.segment]
        return ends - flat[self.wiring.segment], ends

    def places(self, sources: Sequence[Source], shard_features: Array) -> tuple[Tensor, Array, Tensor | None]:
        """``places``, ``num_places`` and ``uses`` of the local batch, for some of its shard features."""
        wiring, first = self.wiring, len(self.wiring.keys) + 1
        ids = sources[0].ids
        orders = [torch.arange(ids.numel(), device=ids.device)]
        for source, own, keys in zip(sources[1:first], self.counts[1:], wiring.keys, strict=False):
            orders.append(order_in_batch(source, own, keys, self.counts[0]))
        stood_for = self.counts[:first]
        for source, distinct in zip(sources[first:], wiring.distinct, strict=True):
            assert source.order is not None
            order = orders[distinct.source]
            orders.append(source.order if distinct.source == 0 else order.index_select(0, source.order))
            stood_for.append(self.counts[distinct.source][distinct.segments])
        starts, ends = (own[shard_features] for own in self._runs(stood_for))
        places = self._gather(orders, starts, ends, shard_features)
        if not wiring.distinct:
            return places, ends - starts, None
        ones = orders[0].new_ones(1)
        uses = [ones.expand(own.ids.numel()) if own.uses is None else own.uses for own in sources]
        first_sent, end_sent = (own[shard_features] for own in self.ids)
        return places, ends - starts, self._gather(uses, first_sent, end_sent, shard_features)

    def _gather(self, of_sources: Sequence[Tensor], starts: Array, ends: Array, shard_features: Array) -> Tensor:
        """The runs of these shard features, of one tensor for each source."""
        source = self.wiring.source[shard_features]
        used = sorted(set(source.tolist()))
        sizes = [of_sources[number].numel() for number in used]
        base = np.zeros(len(of_sources), np.int64)
        base[used] = np.cumsum([0, *sizes])[:-1]
        flat = of_sources[used[0]] if len(used) == 1 else torch.cat([of_sources[number] for number in used])
        return gather_runs(flat, starts + base[source], ends - starts)

    @property
    def copies(self) -> list[int]:
        """The segment of each replicated shard feature, over all sources."""
        found: list[int] = self.wiring.segment[self.num_exchanged :].tolist()
        return found

    def feature(self, number: int, sources: Sequence[Source]) -> FeatureIds:
        """The local ids of one shard feature."""
        source = sources[self.wiring.source[number]]
        start, end = int(self.ids[0][number]), int(self.ids[1][number])
        return FeatureIds(
            (source.lengths, int(self.bags[0][number]), int(self.bags[1][number])),
            (source.ids, start, end),
            None if source.weights is None else (source.weights, start, end),
        )


def gather_runs(flat: Tensor, starts: Array, sizes: Array) -> Tensor:
    """The runs ``flat[starts[i] : starts[i] + sizes[i]]`` end to end, by a constant number of operators.

    >>> gather_runs(torch.arange(10), np.array([7, 0]), np.array([2, 3])).tolist()
    [7, 8, 0, 1, 2]
    """
    if 0 < len(starts) <= _FEW_RUNS:
        return join([(flat, start, start + size) for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)])
    filled = np.flatnonzero(sizes)
    if not len(filled):
        return flat[:0]
    starts, sizes = starts[filled], sizes[filled]
    total = int(sizes.sum())
    joined = starts[1:] == starts[:-1] + sizes[:-1]
    first = np.flatnonzero(np.concatenate([[True], ~joined]))
    if len(first) <= _FEW_RUNS:
        ends = np.append(first[1:], len(starts)) - 1
        runs = zip(starts[first].tolist(), (starts[ends] + sizes[ends]).tolist(), strict=True)
        return join([(flat, start, end) for start, end in runs])
    if has_fbgemm() and flat.dtype in (torch.int32, torch.int64):
        return _permuted(flat, starts, sizes, total)
    return flat.index_select(0, segment_index(host_list(starts, flat.device), host_list(sizes, flat.device), total))


_FEW_RUNS = 128


def _permuted(flat: Tensor, starts: Array, sizes: Array, total: int) -> Tensor:
    """By fbgemm, which permutes segments that cover ``flat``."""
    order = np.argsort(starts, kind="stable")
    ends = (starts + sizes)[order]
    lengths = np.zeros(2 * len(starts) + 1, dtype=np.int64)  # gap, run, gap, run, ..., gap
    lengths[1::2] = sizes[order]
    lengths[0:-1:2] = starts[order] - np.concatenate([[0], ends[:-1]])
    lengths[-1] = flat.numel() - ends[-1]
    place = np.empty_like(order)
    place[order] = 2 * np.arange(len(order)) + 1
    moved: Tensor = torch.ops.fbgemm.permute_1D_sparse_data(
        host_list(place, flat.device, torch.int32), host_list(lengths, flat.device, torch.int32), flat, None, total
    )[1]
    return moved


def padded(flat: Tensor, sent: Array, bags: Array) -> Tensor:
    """Lengths by shard feature and source -> ``[features, most bags of a feature]``, zeros behind them.

    Args:
        flat: the lengths that were sent, feature after feature.
        sent: ``[W, features]`` how many of them each source sent; 0 where each bag has one id.
        bags: ``[W, features]``.
    """
    features, device = bags.shape[1], flat.device
    totals = bags.sum(0)
    most = int(totals.max()) if features else 0
    if (sent == bags).all() and (totals == most).all():
        return flat.view(features, most)
    padded = flat.new_zeros(features * most)
    columns = np.cumsum(bags, 0) - bags + most * np.arange(features)
    for own, values in ((sent > 0, flat), ((sent == 0) & (bags > 0), None)):
        starts, sizes = columns.T[own.T], bags.T[own.T]
        total = int(sizes.sum())
        if total:
            index = segment_index(host_list(starts, device), host_list(sizes, device), total)
            padded.index_copy_(0, index, flat.new_ones(total) if values is None else values)
    return padded.view(features, most)
