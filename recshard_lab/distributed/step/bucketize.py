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
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from recshard_lab.distributed.step.types import host_list
from recshard_lab.embedding.dynamic.index_rounds import partitions_of
from recshard_lab.embedding.kernels import kernel_named


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
