"""Finds the ids of each shard feature in a local batch, after a check that all ids are rows.

Ids are sorted by row shard. Features and bags keep their order inside each row shard::

    bags      [3 9] [] [1]   of a table split at row 5        row shard 0   [3]   [] [1]
                                                              row shard 1   [4]   [] []       9 - 5 = 4

fbgemm does it in one operator where it is installed. Plain torch gives the same result elsewhere. Neither makes the
host wait for a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
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

from recshard_lab.distributed.step.batch import host_list, segment_index
from recshard_lab.distributed.step.layout import Layout
from recshard_lab.embedding.dynamic.index_rounds import partitions_of
from recshard_lab.embedding.inputs import OutOfRange
from recshard_lab.embedding.kernels import kernel_named
from recshard_lab.sparse import KeyedJaggedTensor
from recshard_lab.sparse.ops import complete_cumsum

Array = NDArray[np.int64]


@dataclass(slots=True)
class Source:
    """Ids by segment, then by bag.

    Attributes:
        lengths: ids of each bag.
        ids: counted from the first row of their row shard.
        weights: per-sample weights, or None.
        order: the place of each id in what was sorted; None unless requested. Of distinct ids: the place in their
            source of each id that they stand for, sorted.
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


class Splits(ABC):
    """Sorts the ids of F features by shard; features and bags keep their order inside each shard.

    Args:
        count: K.
        bags: of each feature.
        device: of the ids.
    """

    def __init__(self, count: int, bags: Sequence[int], device: torch.device) -> None:
        self.count, self.bags, self.device = count, np.tile(np.array(bags, dtype=np.int64), count), device
        features = torch.arange(len(bags), device=device)
        self._feature_of_bag = features.repeat_interleave(host_list(bags, device), output_size=sum(bags))

    @abstractmethod
    def sort(self, lengths: Tensor, ids: Tensor, weights: Tensor | None, want_order: bool) -> Source:
        """Sorts one batch. Its segments are by shard, then by feature.

        Args:
            lengths: ``[S]`` bag by bag.
            ids: ``[N]`` in their table's range.
            weights: ``[N]`` fp32 or fp64, or None.
            want_order: whether the caller needs ``order``.
        """

    def _feature_and_bag(self, lengths: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """``[N]`` each: the feature and the bag of every id."""
        bag = torch.repeat_interleave(lengths.long(), output_size=ids.numel())
        return self._feature_of_bag.index_select(0, bag), bag

    def _sorted_by(self, shard: Tensor, lengths: Tensor, bag: Tensor, ids: Tensor, weights: Tensor | None) -> Source:
        """Ids ``[N]`` by their ``shard``, otherwise in their order."""
        order = shard.to(torch.int16 if self.count < 2**15 else torch.int32).sort(stable=True).indices
        total = lengths.numel()
        # [K * S]: every shard has every bag
        new_lengths = lengths.new_zeros(self.count * total)
        new_lengths.scatter_add_(0, shard * total + bag, lengths.new_ones(1).expand(ids.numel()))
        weights = None if weights is None else weights.index_select(0, order)
        return Source(new_lengths, ids.index_select(0, order), weights, order, self.bags)


class RowSplits(Splits):
    """Tables that are split by rows. Ids are counted from the first row of their row shard.

    Args:
        num_rows: for each feature, the rows of its table.
        starts: for each feature, the first row of every row shard, ascending from 0.
        bags: of each feature.
        like: a tensor of the dtype and device of ids.
        use_fbgemm: None uses fbgemm where it is installed.

    >>> splits = RowSplits([10], [[0, 5]], [3], torch.empty(0, dtype=torch.int64))
    >>> sorted_ids = splits.sort(torch.tensor([2, 0, 1]), torch.tensor([3, 9, 1]), None, False)
    >>> sorted_ids.lengths.tolist(), sorted_ids.ids.tolist()
    ([1, 0, 1, 1, 0, 0], [3, 1, 4])
    """

    def __init__(
        self,
        num_rows: list[int],
        starts: list[list[int]],
        bags: Sequence[int],
        like: Tensor,
        use_fbgemm: bool | None = None,
    ) -> None:
        device, dtype = like.device, like.dtype
        super().__init__(max(map(len, starts)), bags, device)
        use_fbgemm = has_fbgemm() if use_fbgemm is None else use_fbgemm
        self._for_fbgemm = use_fbgemm and sum(bags) > 0  # its CUDA kernel refuses a batch without bags
        self._variable = list(bags) if len(set(bags)) > 1 else None
        even = [_even_size(rows, first_rows) for rows, first_rows in zip(num_rows, starts, strict=True)]
        #: rows of even row shards; of uneven ones also their edges
        self._sizes = host_list([size or rows for size, rows in zip(even, num_rows, strict=True)], device, dtype)
        tables = zip(starts, num_rows, strict=True)
        self._edges = None if all(even) else [host_list([*rows, last], device, dtype) for rows, last in tables]
        # row shards of all tables are numbered through: one search finds the row shard of every id
        base = [*accumulate(num_rows[:-1], initial=0)]
        firsts = [*accumulate(map(len, starts[:-1]), initial=0)]
        edges = [first + row for first, rows in zip(base, starts, strict=True) for row in rows]
        self._numbered = tuple(host_list(numbers, device) for numbers in (edges, firsts, base))

    def sort(self, lengths: Tensor, ids: Tensor, weights: Tensor | None, want_order: bool) -> Source:
        """As `Splits.sort`."""
        if self._for_fbgemm and (weights is None or weights.dtype == torch.float32):
            return self._with_fbgemm(lengths, ids, weights, want_order)
        edges, first_edge, base = self._numbered
        feature, bag = self._feature_and_bag(lengths, ids)
        rows = ids + base.index_select(0, feature)  # in all tables, one below the other
        edge = torch.searchsorted(edges, rows, right=True) - 1
        row_shard = edge - first_edge.index_select(0, feature)
        local = (rows - edges.index_select(0, edge)).to(ids.dtype)
        return self._sorted_by(row_shard, lengths, bag, local, weights)

    def _with_fbgemm(self, lengths: Tensor, ids: Tensor, weights: Tensor | None, want_order: bool) -> Source:
        variable: dict[str, Any] = {}
        if self._variable is not None:
            of_features = host_list(self._variable, ids.device, lengths.dtype)
            variable = {"batch_size_per_feature": of_features, "max_B": max(self._variable)}
        found = torch.ops.fbgemm.block_bucketize_sparse_features(
            lengths.contiguous(),  # fbgemm ignores strides
            ids.contiguous(),
            False,
            want_order,
            self._sizes,
            self.count,
            weights=None if weights is None else weights.contiguous(),
            block_bucketize_pos=self._edges,
            **variable,
        )
        order = None
        if want_order:  # fbgemm returns the new place of each id
            order = torch.empty_like(found[4])
            order[found[4]] = torch.arange(ids.numel(), dtype=order.dtype, device=ids.device)
        return Source(found[0], found[1], found[2], order, self.bags)


class HashSplits(Splits):
    """Dynamic tables: a shard has whole partitions of the index. Ids stay as they are.

    Args:
        partitions: for each feature, the partitions of its table.
        starts: for each feature, the first partition of every shard, ascending from 0.
        bags: of each feature.
        device: of the ids.

    >>> splits = HashSplits([8], [[0, 4]], [3], torch.device("cpu"))
    >>> splits.sort(torch.tensor([2, 0, 1]), torch.tensor([3, 9, -1]), None, False).ids.sort().values.tolist()
    [-1, 3, 9]
    """

    def __init__(
        self, partitions: list[int], starts: list[list[int]], bags: Sequence[int], device: torch.device
    ) -> None:
        super().__init__(max(map(len, starts)), bags, device)
        pairs = zip(partitions, starts, strict=True)
        #: for each feature and partition, the shard
        shards = [bisect_right(own, partition) - 1 for many, own in pairs for partition in range(many)]
        first = [*accumulate(partitions[:-1], initial=0)]
        self._tensors = tuple(host_list(numbers, device) for numbers in (shards, first, partitions))

    def sort(self, lengths: Tensor, ids: Tensor, weights: Tensor | None, want_order: bool) -> Source:
        """As `Splits.sort`."""
        shard_of, first, many = self._tensors
        feature, bag = self._feature_and_bag(lengths, ids)
        partition = partitions_of(ids.long(), many.index_select(0, feature))
        shard = shard_of.index_select(0, first.index_select(0, feature) + partition)
        return self._sorted_by(shard, lengths, bag, ids, weights)


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


NO_LIMIT = 2**31 - 1
"""In place of the rows of a table, for keys that no table reads. Their ids are never sent."""


@dataclass(slots=True)
class Checked:
    """A batch whose ids are all rows.

    Attributes:
        features: the batch.
        wiring: of such batches.
        lengths: for each block, its bag lengths ``[B_f]`` as given; None where the batch is unchanged.
        kept: for each block, the places of the remaining ids ``[M]``, or None where all remain.
    """

    features: KeyedJaggedTensor
    wiring: Wiring
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
    # reduceat returns a number for an empty segment, too
    ids, first = values.detach().numpy(), ends[filled]
    used = bounds[filled] > 0  # ids of other keys may have any value
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


def apply_policy(
    features: KeyedJaggedTensor, position: list[int], layout: Layout, policy: OutOfRange
) -> tuple[KeyedJaggedTensor, list[Tensor], list[Tensor | None]]:
    """The batch under the out-of-range policy, with one key for each block. Reads the device.

    Returns:
        It, and ``lengths`` and ``kept`` of `Checked`.

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
    return rebuilt, lengths, kept


# Finds the ids of every shard feature in a local batch.
#
# A batch is read from several *sources*. Source 0 is the batch itself: one segment for each key. Every further source
# is one bucketization: the ids of some keys sorted by row shard, one segment for each (row shard, key). The ids of a
# shard feature are one segment of one source, known before any batch; where a segment begins is known after the one
# read of the device.
#
# ::
#
#     keys f, g; the table of g is split at row 5        source 0   f | g
#                                                        source 1   g, rows 0-4 | g, rows 5-9
#
# Row ranges of a table that overlap (a tiling drawn by hand) are sorted by separate bucketizations. With
# `distinct`, exchanged shard features read the distinct ids of these sources, which are sources too.


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
    """Where shard features are in batches of one form: with these keys, and these bags of each.

    Attributes:
        position: for each block, its key.
        limits: as `row_limits` returns them.
        counts_known: whether the host knows the ids of each key. If not, whole batches are bucketized: which of
            their elements belong to a key is not known.
        bags: of each key.
        bag_starts: for each key, its first bag.
        keys: for each bucketization, the keys it sorts.
        splits: for each bucketization, how.
        segment: ``[E + R]`` the segment of each exchanged and each replicated shard feature, counted over all sources.
        source: ``[E + R]`` its source.
        first_segment: the first segment of each source, and at last their number.
        distinct: the segments whose distinct ids are sent; one further source for each entry.
        tensors: ``[3 * (E + R)]`` 3 * source + kind, of the lengths (kind 0), the ids (1) and the weights (2).
        bag_runs: ``([E + R], [E + R])`` first bag of each shard feature in its source, and its end.
        copies: the segment of each replicated shard feature.
    """

    position: list[int]
    limits: list[int]
    counts_known: bool
    bags: Array
    bag_starts: Array
    keys: list[list[int]]
    splits: list[Splits]
    segment: Array
    source: Array
    first_segment: list[int]
    distinct: list[DistinctSegments]
    tensors: Array
    bag_runs: tuple[Array, Array]
    copies: list[int]


def segment_runs(sizes: Sequence[Array], segment: Array) -> tuple[Array, Array]:
    """Where each shard feature begins and ends in its source.

    Args:
        sizes: for each source, the size of each segment.
        segment: of each shard feature.
    """
    flat = sizes[0] if len(sizes) == 1 else np.concatenate(sizes)
    ends = flat.cumsum() if len(sizes) == 1 else np.concatenate(list(map(np.cumsum, sizes)))
    return ends[segment] - flat[segment], ends[segment]


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

    def _ranges(self, index: int) -> dict[tuple[int, int], tuple[int, int]]:
        """(first row, end) of a block's row ranges -> (bucketization, number of the range there)."""
        block = self.layout.blocks[index]
        rows = self.layout.tables[block.table].num_embeddings
        layers: list[list[tuple[int, int]]] = []
        # overlapping ranges need different bucketizations: a range joins the first layer that it does not overlap
        for start, end in sorted({shard.rows for shard in self.layout.shards[block.table]} - {(0, rows)}):
            layer = next((own for own in layers if own[-1][1] <= start), None)
            if layer is None:
                layers.append([(start, end)])
            else:
                layer.append((start, end))
        found: dict[tuple[int, int], tuple[int, int]] = {}
        for layer in layers:
            # gaps between ranges are ranges, too: every id needs one
            edges = sorted({0, *(edge for pair in layer for edge in pair)} - {rows})
            number = self._bucketization_without(block.feature, self.layout.dynamic[block.table])
            self.bucketizations[number].blocks.append(index)
            self.bucketizations[number].starts.append(edges)
            found |= {pair: (number, edges.index(pair[0])) for pair in layer}
        return found

    def _bucketization_without(self, feature: str, dynamic: bool) -> int:
        for number, one in enumerate(self.bucketizations):
            # a segment is one (range, key), so a bucketization has each key once
            if one.dynamic == dynamic and all(self.layout.blocks[block].feature != feature for block in one.blocks):
                return number
        self.bucketizations.append(Bucketization(dynamic, [], []))
        return len(self.bucketizations) - 1

    def wiring(self, position: list[int], bags: Sequence[int], counts_known: bool, like: Tensor) -> Wiring:
        """Where shard features are in batches whose blocks have these keys.

        Args:
            position: for each block, the number of its key.
            bags: of each key.
            counts_known: whether the host knows the ids of each key.
            like: a tensor of the dtype and device of ids.
        """
        keys, first, segment_bags = [], [0, len(bags)], [np.array(bags, dtype=np.int64)]
        splits: list[Splits] = []
        for one, with_bags in zip(self.bucketizations, self.with_bags, strict=True):
            rows: dict[int, Any] = {
                position[block]: self.layout.tables[self.layout.blocks[block].table] for block in one.blocks
            }
            starts = {position[block]: own for block, own in zip(one.blocks, one.starts, strict=True)}
            # with counts, only the keys of this bucketization are copied and sorted
            chosen = [position[block] for block in one.blocks] if counts_known else list(range(len(bags)))
            keys.append(chosen)
            edges = [starts.get(key, [0]) for key in chosen]
            # without lengths on the wire, a key is sorted as one bag
            own_bags = [bags[key] if with_bags else 1 for key in chosen]
            if one.dynamic:  # a key that no table reads is one partition
                many = [rows[key].partitions if key in rows else 1 for key in chosen]
                units = [rows[key].num_embeddings // rows[key].partitions if key in rows else 1 for key in chosen]
                firsts = [[row // unit for row in own] for own, unit in zip(edges, units, strict=True)]
                splits.append(HashSplits(many, firsts, own_bags, like.device))
            else:
                sizes = [rows[key].num_embeddings if key in rows else NO_LIMIT for key in chosen]
                splits.append(RowSplits(sizes, edges, own_bags, like))
            segment_bags.append(splits[-1].bags)
            first.append(first[-1] + len(splits[-1].bags))
        source, segment = [], []
        for block, place in zip(self.blocks, self.places, strict=True):
            key = position[block]
            source.append(0 if place is None else place[0] + 1)
            # segments of a bucketization are by range, then by key
            number = key if place is None else place[1] * len(keys[place[0]]) + keys[place[0]].index(key)
            segment.append(first[source[-1]] + number)
        distinct = self._read_distinct(source, segment, first)
        # the distinct ids of a segment are one bag
        segment_bags += [np.ones(len(own.segments), dtype=np.int64) for own in distinct]
        sources, segments = np.array(source, int), np.array(segment, int)
        return Wiring(
            position,
            row_limits(len(bags), position, self.layout),
            counts_known,
            segment_bags[0],
            np.cumsum(segment_bags[0]) - segment_bags[0],
            keys,
            splits,
            segments,
            sources,
            first,
            distinct,
            np.concatenate([3 * sources + kind for kind in range(3)]),
            segment_runs(segment_bags, segments),
            segment[len(segment) - len(self.layout.replicated_features) :],
        )

    def _read_distinct(self, source: list[int], segment: list[int], first: list[int]) -> list[DistinctSegments]:
        """Lets shard features read distinct ids: new sources, whose segments are counted last."""
        found = []
        for base in sorted({source[n] for n in self.distinct}):
            features = [n for n in self.distinct if source[n] == base]
            rows: dict[int, int] = {}
            for n in features:
                # columns of one table share a segment, which is sorted once
                rows[segment[n]] = max(rows.get(segment[n], 0), self.shard_rows[n])
            chosen = sorted(rows)
            found.append(DistinctSegments(base, [own - first[base] for own in chosen], [rows[own] for own in chosen]))
            place = {own: first[-1] + number for number, own in enumerate(chosen)}
            for n in features:
                source[n], segment[n] = len(first) - 1, place[segment[n]]  # the next source
            first.append(first[-1] + len(chosen))
        return found

    def sources(self, wiring: Wiring, batch: Source, counts: Array | None, want_order: bool) -> list[Source]:
        """The sources of one batch. Does not read the device.

        Args:
            wiring: for its form.
            batch: its ids, all of them rows.
            counts: ids of each key, if the host knows them.
            want_order: whether rows must find back to their ids.
        """
        found = [batch]
        for keys, splits, with_bags in zip(wiring.keys, wiring.splits, self.with_bags, strict=True):
            lengths, ids, weights = batch.lengths, batch.ids, batch.weights
            if counts is not None:
                starts, sizes = (np.cumsum(counts) - counts)[keys], counts[keys]
                ids = gather_runs(ids, starts, sizes)
                weights = None if weights is None else gather_runs(weights, starts, sizes)
                lengths = gather_runs(lengths, wiring.bag_starts[keys], wiring.bags[keys])
            if not with_bags:  # a key is one bag
                one = Source(lengths, ids, None, None, wiring.bags[keys])
                lengths = one.counts() if counts is None else host_list(counts[keys], ids.device)
                lengths = lengths.to(batch.lengths.dtype)
            found.append(splits.sort(lengths, ids, weights, want_order))
        return found


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
    # from the place among the copied keys to the place in the batch
    shift = starts[keys] - (np.cumsum(sizes) - sizes)
    if not shift.any():
        return source.order
    # segments are by range, then by key
    device, repeated = source.ids.device, np.tile(shift, len(counts) // len(keys))
    return source.order + torch.repeat_interleave(
        host_list(repeated, device), host_list(counts, device), output_size=source.ids.numel()
    )


# Where the ids of shard features are in the sources of a batch, and how runs of a flat tensor are moved.


def places_of(
    wiring: Wiring, sources: Sequence[Source], counts: Sequence[Array], shard_features: Array
) -> tuple[Tensor, Array, Tensor | None]:
    """``places``, ``num_places`` and ``uses`` of the local batch, for some of its shard features.

    Args:
        wiring: for the form of the batch.
        sources: of the batch.
        counts: for each source, ids of each segment.
        shard_features: their numbers.
    """
    first, ids = len(wiring.keys) + 1, sources[0].ids
    orders = [torch.arange(ids.numel(), device=ids.device)]  # for each source, [n] places in the batch
    for source, own, keys in zip(sources[1:first], counts[1:], wiring.keys, strict=False):
        orders.append(order_in_batch(source, own, keys, counts[0]))
    stood_for = list(counts[:first])
    for source, distinct in zip(sources[first:], wiring.distinct, strict=True):
        assert source.order is not None
        # from the ids behind a distinct id to their source, then to the batch
        order = orders[distinct.source]
        orders.append(source.order if distinct.source == 0 else order.index_select(0, source.order))
        stood_for.append(counts[distinct.source][distinct.segments])
    starts, ends = (own[shard_features] for own in segment_runs(stood_for, wiring.segment))
    chosen = wiring.source[shard_features]
    places = _gather_from(orders, chosen, starts, ends)
    if not wiring.distinct:
        return places, ends - starts, None
    # sources without distinct ids: each id is used once
    ones = orders[0].new_ones(1)
    uses = [ones.expand(own.ids.numel()) if own.uses is None else own.uses for own in sources]
    first_sent, end_sent = (own[shard_features] for own in segment_runs(counts, wiring.segment))
    return places, ends - starts, _gather_from(uses, chosen, first_sent, end_sent)


def _gather_from(of_sources: Sequence[Tensor], source: Array, starts: Array, ends: Array) -> Tensor:
    """The runs of some shard features, of one tensor for each source."""
    used = sorted(set(source.tolist()))
    base = np.zeros(len(of_sources), np.int64)
    base[used] = np.cumsum([0, *(of_sources[number].numel() for number in used)])[:-1]
    flat = of_sources[used[0]] if len(used) == 1 else torch.cat([of_sources[number] for number in used])
    return gather_runs(flat, starts + base[source], ends - starts)


def gather_runs(flat: Tensor, starts: Array, sizes: Array) -> Tensor:
    """The runs ``flat[starts[i] : starts[i] + sizes[i]]`` end to end, by a constant number of operators.

    >>> gather_runs(torch.arange(10), np.array([7, 0]), np.array([2, 3])).tolist()
    [7, 8, 0, 1, 2]
    """
    filled = np.flatnonzero(sizes)
    if not len(filled):
        return flat[:0]
    starts, sizes = starts[filled], sizes[filled]
    total, gaps = int(sizes.sum()), np.flatnonzero(starts[1:] != starts[:-1] + sizes[:-1])
    if flat.is_cpu and len(gaps) > 8 and total < _SHORT_RUN * len(gaps):
        index = np.arange(total) + np.repeat(starts - (np.cumsum(sizes) - sizes), sizes)
        return flat.index_select(0, torch.from_numpy(index))  # a view of each run takes the host longer
    if len(gaps) < _FEW_RUNS:  # runs of adjacent runs
        first, last = [0, *(gaps + 1).tolist()], [*gaps.tolist(), len(starts) - 1]
        pairs = zip(starts[first].tolist(), (starts[last] + sizes[last]).tolist(), strict=True)
        parts = [flat[start:end] for start, end in pairs]
        return torch.cat(parts) if len(parts) > 1 else flat if total == flat.numel() else parts[0]
    if has_fbgemm() and flat.dtype in (torch.int32, torch.int64):
        return _permuted(flat, starts, sizes, total)
    return flat.index_select(0, segment_index(host_list(starts, flat.device), host_list(sizes, flat.device), total))


_FEW_RUNS, _SHORT_RUN = 128, 64  # runs, and numbers of one


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
    # lengths that were sent, then ones for bags that were sent without lengths
    for own, values in ((sent > 0, flat), ((sent == 0) & (bags > 0), None)):
        starts, sizes = columns.T[own.T], bags.T[own.T]
        total = int(sizes.sum())
        if total:
            index = segment_index(host_list(starts, device), host_list(sizes, device), total)
            padded.index_copy_(0, index, flat.new_ones(total) if values is None else values)
    return padded.view(features, most)
