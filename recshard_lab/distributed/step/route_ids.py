"""Finds the ids of every shard feature in a local batch.

A batch is read from several *sources*. Source 0 is the batch itself: one segment for each key. Every further source is
one bucketization: the ids of some keys sorted by row shard, one segment for each (row shard, key). The ids of a shard
feature are one segment of one source, known before any batch; where a segment begins is known after the one read of
the device.

::

    keys f, g; the table of g is split at row 5        source 0   f | g
                                                       source 1   g, rows 0-4 | g, rows 5-9

Row ranges of a table that overlap (a tiling drawn by hand) are sorted by separate bucketizations. With
`distinct`, exchanged shard features read the distinct ids of these sources, which are sources too.

Shape letters: E shard features of all ranks together, F keys, K row shards, N ids, R replicated shard features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recshard_lab.distributed.step.bucketize import HashSplits, RowSplits
from recshard_lab.distributed.step.check_ids import NO_LIMIT
from recshard_lab.distributed.step.layout import Layout
from recshard_lab.distributed.step.types import host_list, join
from recshard_lab.sparse.ops import complete_cumsum

Array = NDArray[np.int64]


@dataclass(slots=True)
class Source:
    """Ids by segment, then by bag.

    Attributes:
        lengths: ids of each bag.
        ids: counted from the first row of their row shard.
        weights: per-sample weights, or None.
        order: the place of each id in the joined input of the bucketization; None unless requested. Of distinct ids:
            the place in their source of each id that they stand for, sorted.
        bags: bags of each segment. Of distinct ids: 1.
        uses: of distinct ids, how often each occurs in its segment.
    """

    lengths: Tensor
    ids: Tensor
    weights: Tensor | None
    order: Tensor | None
    bags: Array
    uses: Tensor | None = None

    def counts(self) -> Tensor:
        """Ids of each segment, on their device."""
        if (self.bags == self.bags[0]).all():
            rows = self.lengths.view(len(self.bags), int(self.bags[0]))
            return rows.sum(1, dtype=rows.dtype)  # int32 lengths sum to fewer than 2**31 ids: they are local to a rank
        ends = host_list(np.concatenate([[0], np.cumsum(self.bags)]), self.lengths.device)
        return complete_cumsum(self.lengths).index_select(0, ends).diff()


@dataclass(frozen=True, slots=True)
class Bucketization:
    """Blocks of different features whose tables are split into disjoint row ranges.

    Attributes:
        dynamic: whether these are dynamic tables, whose ids are split by their hash.
        blocks: their numbers.
        starts: for each block, the first row of each range, ascending from 0; some of these ranges may be of no shard.
    """

    dynamic: bool
    blocks: list[int]
    starts: list[list[int]]


@dataclass(frozen=True, slots=True)
class DistinctSegments:
    """Segments of one source whose distinct ids are sent.

    Attributes:
        source: its number.
        segments: ascending, counted from the first of the source.
        rows: for each, the rows of its shard.
    """

    source: int
    segments: list[int]
    rows: list[int]


@dataclass(slots=True)
class Wiring:
    """Where shard features are in batches with given keys.

    Attributes:
        position: for each block, its key.
        keys: for each bucketization, the keys it sorts.
        splits: for each bucketization, how.
        segment: ``[E + R]`` the segment of each exchanged and each replicated shard feature, counted over all sources.
        source: ``[E + R]`` its source.
        first_segment: the first segment of each source, and at last their number.
        distinct: the segments whose distinct ids are sent; one further source for each entry.
        tensors: ``[3 * (E + R)]`` 3 * source + kind, of the lengths (kind 0), the ids (1) and the weights (2).
    """

    position: list[int]
    keys: list[list[int]]
    splits: list[RowSplits | HashSplits]
    segment: Array
    source: Array
    first_segment: list[int]
    distinct: list[DistinctSegments]
    tensors: Array


class IdRouter:
    """Routes the ids of local batches under one layout.

    Args:
        layout: the layout.
        distinct: the exchanged shard features, numbered rank after rank, that send each distinct id once.
        pooled: False for sequence collections, which send no bags.
    """

    def __init__(self, layout: Layout, distinct: Sequence[int] = (), *, pooled: bool = True) -> None:
        self.layout, self.distinct = layout, distinct
        self.bucketizations: list[Bucketization] = []
        ranges = [self._ranges(index) for index in range(len(layout.blocks))]
        features = [shard_feature for own in layout.exchanged_features for shard_feature in own]
        features += layout.replicated_features
        self.blocks = [shard_feature.block for shard_feature in features]
        self.shard_rows = [shard_feature.shard.num_rows for shard_feature in features]
        #: for each shard feature its bucketization and row range there; None where its shard has all rows
        self.places = [ranges[feature.block].get(feature.shard.rows) for feature in features]
        with_bags = {place[0] for n, place in enumerate(self.places) if place is not None and n not in set(distinct)}
        #: for each bucketization, whether the lengths of its bags are sent
        self.with_bags = [pooled and number in with_bags for number in range(len(self.bucketizations))]
        self._wirings: dict[tuple[tuple[int, ...], int, bool], Wiring] = {}

    def _ranges(self, index: int) -> dict[tuple[int, int], tuple[int, int]]:
        """(first row, end) of a block's row ranges -> (bucketization, number of the range there)."""
        block = self.layout.blocks[index]
        rows = self.layout.tables[block.table].num_embeddings
        layers: list[list[tuple[int, int]]] = []
        for start, end in sorted({shard.rows for shard in self.layout.shards[block.table]} - {(0, rows)}):
            layer = next((own for own in layers if own[-1][1] <= start), None)
            if layer is None:
                layers.append([(start, end)])
            else:
                layer.append((start, end))
        found: dict[tuple[int, int], tuple[int, int]] = {}
        for layer in layers:
            edges = sorted({0, *(edge for pair in layer for edge in pair)} - {rows})
            number = self._bucketization_without(block.feature, self.layout.dynamic[block.table])
            self.bucketizations[number].blocks.append(index)
            self.bucketizations[number].starts.append(edges)
            found |= {pair: (number, edges.index(pair[0])) for pair in layer}
        return found

    def _bucketization_without(self, feature: str, dynamic: bool) -> int:
        for number, one in enumerate(self.bucketizations):
            if one.dynamic == dynamic and all(self.layout.blocks[block].feature != feature for block in one.blocks):
                return number
        self.bucketizations.append(Bucketization(dynamic, [], []))
        return len(self.bucketizations) - 1

    def wiring(self, position: Sequence[int], num_keys: int, counts_known: bool) -> Wiring:
        """Where shard features are in batches whose blocks have these keys.

        Args:
            position: for each block, the number of its key.
            num_keys: F.
            counts_known: whether the host knows the ids of each key. If not, whole batches are bucketized: which of
                its elements belong to a key is not known.
        """
        cache_key = tuple(position), num_keys, counts_known
        if cache_key in self._wirings:
            return self._wirings[cache_key]
        keys, first = [], [0, num_keys]
        splits: list[RowSplits | HashSplits] = []
        for one in self.bucketizations:
            rows = {position[block]: self.layout.tables[self.layout.blocks[block].table] for block in one.blocks}
            starts = {position[block]: own for block, own in zip(one.blocks, one.starts, strict=True)}
            chosen = [position[block] for block in one.blocks] if counts_known else list(range(num_keys))
            keys.append(chosen)
            edges = [starts.get(key, [0]) for key in chosen]
            if one.dynamic:
                splits.append(_hash_splits([rows.get(key) for key in chosen], edges))
            else:
                sizes = [rows[key].num_embeddings if key in rows else NO_LIMIT for key in chosen]
                splits.append(RowSplits(sizes, edges))
            first.append(first[-1] + len(chosen) * splits[-1].count)
        source, segment = [], []
        for block, place in zip(self.blocks, self.places, strict=True):
            key = position[block]
            source.append(0 if place is None else place[0] + 1)
            number = key if place is None else place[1] * len(keys[place[0]]) + keys[place[0]].index(key)
            segment.append(first[source[-1]] + number)
        distinct = self._read_distinct(source, segment, first)
        sources = np.array(source, int)
        tensors = np.concatenate([3 * sources + kind for kind in range(3)])
        found = Wiring(list(position), keys, splits, np.array(segment, int), sources, first, distinct, tensors)
        if len(self._wirings) >= 16:  # batches come with few orders of keys
            self._wirings.clear()
        self._wirings[cache_key] = found
        return found

    def _read_distinct(self, source: list[int], segment: list[int], first: list[int]) -> list[DistinctSegments]:
        """Lets shard features read distinct ids: new sources, whose segments are counted last."""
        found = []
        for base in sorted({source[n] for n in self.distinct}):
            features = [n for n in self.distinct if source[n] == base]
            rows: dict[int, int] = {}
            for n in features:
                rows[segment[n]] = max(rows.get(segment[n], 0), self.shard_rows[n])
            chosen = sorted(rows)
            found.append(DistinctSegments(base, [own - first[base] for own in chosen], [rows[own] for own in chosen]))
            place = {own: first[-1] + number for number, own in enumerate(chosen)}
            for n in features:
                source[n], segment[n] = len(first) - 1, place[segment[n]]
            first.append(first[-1] + len(chosen))
        return found

    def sources(
        self,
        wiring: Wiring,
        lengths: Tensor,
        ids: Tensor,
        weights: Tensor | None,
        bags: Sequence[int],
        counts: Sequence[int] | None,
        want_order: bool,
    ) -> list[Source]:
        """The sources of one batch. Does not read the device.

        Args:
            wiring: for its keys.
            lengths: of all bags.
            ids: ``[N]``, all of them rows.
            weights: ``[N]``, or None.
            bags: bags of each key.
            counts: ids of each key, if the host knows them.
            want_order: whether rows must find back to their ids.
        """
        found = [Source(lengths, ids, weights, None, np.array(bags))]
        bag_starts = np.concatenate([[0], np.cumsum(bags)]).tolist()
        for keys, splits, with_bags in zip(wiring.keys, wiring.splits, self.with_bags, strict=True):
            own_lengths, own_ids, own_weights = lengths, ids, weights
            own_bags = [bags[key] for key in keys]
            if counts is not None:
                starts = np.concatenate([[0], np.cumsum(counts)]).tolist()
                spans = [(starts[key], starts[key + 1]) for key in keys]
                own_lengths = join([(lengths, bag_starts[key], bag_starts[key + 1]) for key in keys])
                own_ids = join([(ids, *span) for span in spans])
                own_weights = None if weights is None else join([(weights, *span) for span in spans])
            if not with_bags:  # a key is one bag
                one = Source(own_lengths, own_ids, None, None, np.array(own_bags))
                own_lengths = one.counts() if counts is None else host_list([counts[key] for key in keys], ids.device)
                own_lengths, own_bags = own_lengths.to(lengths.dtype), [1] * len(keys)
            done = splits.sort(own_lengths, own_ids, own_weights, own_bags, want_order)
            found.append(Source(done.lengths, done.ids, done.weights, done.order, np.tile(own_bags, splits.count)))
        return found


def _hash_splits(tables: Sequence[Any], starts: Sequence[Sequence[int]]) -> HashSplits:
    """The splits of dynamic tables whose shards begin at these rows. None: a key that no table reads."""
    partitions = [1 if table is None else table.partitions for table in tables]
    sizes = [1 if table is None else table.num_embeddings // table.partitions for table in tables]
    return HashSplits(partitions, [[row // size for row in own] for own, size in zip(starts, sizes, strict=True)])


def order_in_batch(source: Source, counts: Array, keys: Sequence[int], key_counts: Array) -> Tensor:
    """The place of each id of a bucketization in the batch, ``[N]``.

    Args:
        source: with its order.
        counts: ids of each segment.
        keys: of the bucketization.
        key_counts: ids of each key of the batch.
    """
    assert source.order is not None
    starts, sizes = np.cumsum(key_counts) - key_counts, key_counts[keys]
    shift = starts[keys] - (np.cumsum(sizes) - sizes)
    if not shift.any():
        return source.order
    device, repeated = source.ids.device, np.tile(shift, len(counts) // len(keys))
    return source.order + torch.repeat_interleave(
        host_list(repeated, device), host_list(counts, device), output_size=source.ids.numel()
    )
