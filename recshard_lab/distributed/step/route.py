"""Sorts the ids of a batch by row shard; features and bags keep their order inside each row shard.

::

    bags      [3 9] [] [1]   of a table split at row 5        row shard 0   [3]   [] [1]
                                                              row shard 1   [4]   [] []       9 - 5 = 4

fbgemm does it in one operator where it is installed. Plain torch gives the same result elsewhere. Neither makes the
host wait for a GPU.

Shape letters: F features, K row shards (of the table with most), N ids, S bags of all features.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recshard_lab.distributed.step.batch import FeatureIds, host_list, join, segment_index
from recshard_lab.distributed.step.layout import Layout
from recshard_lab.embedding.dynamic.index_rounds import partitions_of
from recshard_lab.embedding.inputs import OutOfRange
from recshard_lab.embedding.kernels import kernel_named
from recshard_lab.sparse import KeyedJaggedTensor
from recshard_lab.sparse.ops import complete_cumsum


@dataclass(slots=True)
class Bucketized:
    """Ids by row shard, then by feature, then by bag.

    Attributes:
        lengths: ``[K * S]``, dtype of the input lengths.
        ids: ``[N]``, counted from the first row of their row shard.
        weights: ``[N]`` or None.
        order: ``[N]`` the place of each id in the input; None unless requested.
    """

    lengths: Tensor
    ids: Tensor
    weights: Tensor | None
    order: Tensor | None


class RowSplits:
    """Where the tables of F features are split by rows.

    Args:
        num_rows: for each feature, the rows of its table.
        starts: for each feature, the first row of every row shard, ascending from 0.
        use_fbgemm: None uses fbgemm where it is installed.

    >>> splits = RowSplits([10], [[0, 5]])
    >>> sorted_ids = splits.sort(torch.tensor([2, 0, 1]), torch.tensor([3, 9, 1]), None, [3], False)
    >>> sorted_ids.lengths.tolist(), sorted_ids.ids.tolist()
    ([1, 0, 1, 1, 0, 0], [3, 1, 4])
    """

    def __init__(self, num_rows: list[int], starts: list[list[int]], use_fbgemm: bool | None = None) -> None:
        self.num_rows, self.starts = num_rows, starts
        self.count = max(len(rows) for rows in starts)
        self.use_fbgemm = has_fbgemm() if use_fbgemm is None else use_fbgemm
        even = [_even_size(rows, first_rows) for rows, first_rows in zip(num_rows, starts, strict=True)]
        self._sizes = [size or rows for size, rows in zip(even, num_rows, strict=True)]
        self._even = all(even)
        self._tensors: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def sort(
        self, lengths: Tensor, ids: Tensor, weights: Tensor | None, bags: list[int], want_order: bool
    ) -> Bucketized:
        """Sorts one batch.

        Args:
            lengths: ``[S]`` bag by bag.
            ids: ``[N]`` in their table's range.
            weights: ``[N]`` fp32 or fp64, or None.
            bags: bags of each feature; they sum to S.
            want_order: whether the caller needs ``order``.
        """
        bags_here = lengths.numel()  # fbgemm's CUDA kernel refuses a batch without bags
        if self.use_fbgemm and bags_here and (weights is None or weights.dtype == torch.float32):
            return self._with_fbgemm(lengths, ids, weights, bags, want_order)
        return self._with_torch(lengths, ids, weights, bags)

    def _with_fbgemm(
        self, lengths: Tensor, ids: Tensor, weights: Tensor | None, bags: list[int], want_order: bool
    ) -> Bucketized:
        # fbgemm ignores strides
        lengths, ids = lengths.contiguous(), ids.contiguous()
        weights = None if weights is None else weights.contiguous()
        sizes, edges = self._for_fbgemm(ids.device, ids.dtype)
        variable: dict[str, Any] = {}
        if any(number != bags[0] for number in bags):
            variable = {"batch_size_per_feature": host_list(bags, ids.device, lengths.dtype), "max_B": max(bags)}
        found = torch.ops.fbgemm.block_bucketize_sparse_features(
            lengths,
            ids,
            False,
            want_order,
            sizes,
            self.count,
            weights=weights,
            block_bucketize_pos=edges,
            **variable,
        )
        order = None
        if want_order:  # fbgemm returns the new place of each id
            order = torch.empty_like(found[4])
            order[found[4]] = torch.arange(ids.numel(), dtype=order.dtype, device=ids.device)
        return Bucketized(found[0], found[1], found[2], order)

    def _for_fbgemm(self, device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
        """fbgemm's arguments: the size of even row shards, and the edges of uneven ones."""
        key = "fbgemm", device, dtype
        if key not in self._tensors:
            sizes = torch.tensor(self._sizes, dtype=dtype, device=device)
            edges = None
            if not self._even:
                rows = zip(self.starts, self.num_rows, strict=True)
                edges = [torch.tensor([*first_rows, last], dtype=dtype, device=device) for first_rows, last in rows]
            self._tensors[key] = sizes, edges
        return self._tensors[key]

    def _with_torch(self, lengths: Tensor, ids: Tensor, weights: Tensor | None, bags: list[int]) -> Bucketized:
        """Row shards of all tables are numbered through: one search finds the row shard of every id."""
        edges, first_edge, base = self._for_torch(ids.device)
        feature, bag = _feature_and_bag(lengths, ids, bags)
        rows = ids + base.index_select(0, feature)  # in all tables, one below the other
        edge = torch.searchsorted(edges, rows, right=True) - 1
        row_shard = edge - first_edge.index_select(0, feature)
        local = (rows - edges.index_select(0, edge)).to(ids.dtype)
        return _sorted_by(row_shard, self.count, lengths, bag, local, weights)

    def _for_torch(self, device: torch.device) -> tuple[Any, ...]:
        """(first row of every row shard [all], first row shard of each feature [F], first row of each feature [F])."""
        key = "torch", device
        if key not in self._tensors:
            base = [*accumulate(self.num_rows[:-1], initial=0)]
            firsts = [*accumulate(map(len, self.starts[:-1]), initial=0)]
            edges = [first + row for first, rows in zip(base, self.starts, strict=True) for row in rows]
            self._tensors[key] = tuple(torch.tensor(numbers, device=device) for numbers in (edges, firsts, base))
        return self._tensors[key]


class HashSplits:
    """Where the dynamic tables of F features are split: a shard has whole partitions of the index.

    Args:
        partitions: for each feature, the partitions of its table.
        starts: for each feature, the first partition of every shard, ascending from 0.

    >>> splits = HashSplits([8], [[0, 4]])
    >>> splits.sort(torch.tensor([2, 0, 1]), torch.tensor([3, 9, -1]), None, [3], False).ids.sort().values.tolist()
    [-1, 3, 9]
    """

    def __init__(self, partitions: list[int], starts: list[list[int]]) -> None:
        self.count = max(len(own) for own in starts)
        #: for each feature and partition, the shard
        self._shard_of = [
            [bisect_right(own, partition) - 1 for partition in range(many)]
            for many, own in zip(partitions, starts, strict=True)
        ]
        self._first = [*accumulate(map(len, self._shard_of[:-1]), initial=0)]
        self._many = partitions
        self._tensors: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}

    def sort(
        self, lengths: Tensor, ids: Tensor, weights: Tensor | None, bags: list[int], want_order: bool
    ) -> Bucketized:
        """Sorts one batch, as `RowSplits.sort`. Ids stay as they are."""
        feature, bag = _feature_and_bag(lengths, ids, bags)
        if ids.device not in self._tensors:
            flat = [shard for own in self._shard_of for shard in own]
            numbers = (torch.tensor(own, device=ids.device) for own in (flat, self._first, self._many))
            self._tensors[ids.device] = tuple(numbers)  # type: ignore[assignment]
        shard_of, first, many = self._tensors[ids.device]
        partition = partitions_of(ids.long(), many.index_select(0, feature))
        shard = shard_of.index_select(0, first.index_select(0, feature) + partition)
        return _sorted_by(shard, self.count, lengths, bag, ids, weights)


def _feature_and_bag(lengths: Tensor, ids: Tensor, bags: list[int]) -> tuple[Tensor, Tensor]:
    """``[N]`` each: the feature and the bag of every id."""
    feature_of_bag = torch.repeat_interleave(
        torch.arange(len(bags), device=ids.device), host_list(bags, ids.device), output_size=lengths.numel()
    )
    bag = torch.repeat_interleave(lengths.long(), output_size=ids.numel())
    return feature_of_bag.index_select(0, bag), bag


def _sorted_by(
    shard: Tensor, count: int, lengths: Tensor, bag: Tensor, ids: Tensor, weights: Tensor | None
) -> Bucketized:
    """Ids ``[N]`` by their ``shard`` of ``count``, otherwise in their order."""
    order = shard.to(torch.int16 if count < 2**15 else torch.int32).sort(stable=True).indices
    total = lengths.numel()
    new_lengths = lengths.new_zeros(count * total)
    new_lengths.scatter_add_(0, shard * total + bag, lengths.new_ones(1).expand(ids.numel()))
    weights = None if weights is None else weights.index_select(0, order)
    return Bucketized(new_lengths, ids.index_select(0, order), weights, order)


def _even_size(num_rows: int, starts: list[int]) -> int:
    """Rows of a row shard where all but the last have the same number; otherwise 0."""
    size = starts[1] if len(starts) > 1 else num_rows
    even = all(start == number * size for number, start in enumerate(starts))
    return size if even and num_rows <= len(starts) * size else 0


@cache
def has_fbgemm() -> bool:
    """Whether fbgemm's operators are loaded; the kernel of that name loads them."""
    return kernel_named("fbgemm").unavailable() is None


# Every id of a batch is a row of its table before it is sent. An id out of range is refused, clamped or left out.
#
# Valid batches cost the host nothing on a GPU: the check travels with the one read of a step. On a CPU it compares the
# smallest and the largest id of each feature. Only a batch with an id out of range is built again, with a key for each
# block, because a feature that two tables read may be in range of one of them alone.
#
# Shape letters: F keys, N ids of the batch, M remaining ids of a block, B_f bags of a block.


NO_LIMIT = 2**31 - 1
"""In place of the rows of a table, for keys that no table reads. Their ids are never sent."""


@dataclass(slots=True)
class Checked:
    """A batch whose ids are all rows.

    Attributes:
        features: the batch.
        position: for each block, the position of its key in the batch.
        lengths: for each block, its bag lengths ``[B_f]`` as given; None where the batch is unchanged.
        kept: for each block, the places of the remaining ids ``[M]``, or None where all remain.
    """

    features: KeyedJaggedTensor
    position: list[int]
    lengths: list[Tensor] | None = None
    kept: list[Tensor | None] | None = None


def check_dtype(values: Tensor) -> None:
    """Refuses ids that are not integers ``[N]``.

    Raises:
        ValueError: with shape and dtype.
    """
    if values.dtype not in (torch.int32, torch.int64) or values.dim() != 1:
        raise ValueError(
            f"ids must be [N] of int32 or int64, got {list(values.shape)} of {values.dtype}. Fix: use values.long()"
        )


def row_limits(num_keys: int, position: Sequence[int], layout: Layout) -> list[int]:
    """For each key, the rows of the smallest table that reads it; 0 where only dynamic tables do, or none."""
    limits = [0] * num_keys
    for block, key in zip(layout.blocks, position, strict=True):
        if layout.dynamic[block.table]:
            continue
        rows = layout.tables[block.table].num_embeddings
        limits[key] = min(limits[key] or rows, rows)
    return limits


def all_are_rows(values: Tensor, starts: Sequence[int], limits: Sequence[int]) -> bool:
    """Whether the ids of each key f, ``values[starts[f]:starts[f + 1]]``, are in ``[0, limits[f])``. On a CPU."""
    bounds, ends = np.asarray(limits), np.asarray(starts)
    filled = np.flatnonzero(ends[1:] > ends[:-1])
    if not len(filled):
        return True
    ids, first = values.detach().numpy(), ends[filled]
    used = bounds[filled] > 0
    low, high = np.minimum.reduceat(ids, first)[used], np.maximum.reduceat(ids, first)[used]
    return bool((low >= 0).all() and (high < bounds[filled][used]).all())


def clamp_to_rows(
    values: Tensor, counts: Tensor, limits: Sequence[int], dynamic: bool = False
) -> tuple[Tensor, Tensor]:
    """The ids moved into ``[0, limit)``, and ``[1]`` whether any was outside. Does not read the device.

    Args:
        values: ``[N]``.
        counts: ``[F]`` ids of each key.
        limits: as `row_limits` returns them.
        dynamic: whether ids of keys without a limit must stay as they are.
    """
    last = host_list([(limit or NO_LIMIT) - 1 for limit in limits], values.device)
    inside = torch.minimum(values.clamp(min=0), torch.repeat_interleave(last, counts, output_size=values.numel()))
    outside = inside != values
    if not all(limits):
        used = host_list([bool(limit) for limit in limits], values.device, torch.bool)
        limited = torch.repeat_interleave(used, counts, output_size=values.numel())
        outside &= limited
        if dynamic:
            inside = torch.where(limited, inside, values)
    return inside, outside.any().view(1)


def apply_policy(features: KeyedJaggedTensor, position: list[int], layout: Layout, policy: OutOfRange) -> Checked:
    """The batch under the out-of-range policy, with one key for each block. Reads the device.

    Raises:
        ValueError: under ``"error"``, with the feature and sample of the first id that is no row.
    """
    bags = features.lengths_offset_per_key()
    lengths = [features.lengths().reshape(-1)[bags[key] : bags[key + 1]] for key in position]
    parts, kept = [], []
    for block, key in zip(layout.blocks, position, strict=True):
        table = layout.tables[block.table]
        given = features.permute([key])[block.feature]
        if layout.dynamic[block.table]:
            part, places = given, None
        else:
            part, places = policy.fit(given, block.feature, table.name, table.num_embeddings)
        parts.append(part)
        kept.append(places)
    weighted = features.weights_or_none() is not None
    inverse = features.inverse_indices_or_none()
    rebuilt = KeyedJaggedTensor._unchecked(
        [block.key for block in layout.blocks],
        torch.cat([part.values() for part in parts]),
        torch.cat([part.weights() for part in parts]) if weighted else None,
        torch.cat([part.lengths() for part in parts]),
        stride=features.stride(),
        length_per_key=[part.values().shape[0] for part in parts],
        strides=[[part.numel()] for part in lengths] if features.variable_stride_per_key() else None,
        inverse=None if inverse is None else inverse[1],
        inverse_keys=None if inverse is None else inverse[0],
    )
    return Checked(rebuilt, list(range(len(parts))), lengths, kept)


# Finds the ids of every shard feature in a local batch.
#
# A batch is read from several *sources*. Source 0 is the batch itself: one segment for each key. Every further source
# is
# one bucketization: the ids of some keys sorted by row shard, one segment for each (row shard, key). The ids of a shard
# feature are one segment of one source, known before any batch; where a segment begins is known after the one read of
# the device.
#
# ::
#
#     keys f, g; the table of g is split at row 5        source 0   f | g
#                                                        source 1   g, rows 0-4 | g, rows 5-9
#
# Row ranges of a table that overlap (a tiling drawn by hand) are sorted by separate bucketizations. With
# `distinct`, exchanged shard features read the distinct ids of these sources, which are sources too.
#
# Shape letters: E shard features of all ranks together, F keys, K row shards, N ids, R replicated shard features.


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


# Where the ids of shard features are in the sources of a batch, and how runs of a flat tensor are moved.
#
# Shape letters: E exchanged shard features of all ranks together, R replicated ones, W ranks.


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
