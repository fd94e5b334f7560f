"""Sorts the ids of a batch by row stripe, features and bags kept in their order inside every stripe.

::

    bags      [3 9] [] [1]   of a table cut at row 5          stripe 0   [3]   [] [1]
                                                              stripe 1   [4]   [] []       9 - 5 = 4

fbgemm does it in one pass where it is installed; plain torch everywhere else, with the same result.

Shape letters: F features, K stripes (of the table with most), N ids, S bags of all features.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from recshard_lab.embedding.kernels import kernel_named
from recshard_lab.sparse.ops import complete_cumsum


@dataclass(slots=True)
class Striped:
    """Ids by stripe, then by feature, then by bag.

    Attributes:
        lengths: ``[K * S]``, dtype of the lengths given.
        ids: ``[N]``, counted from the first row of their stripe.
        weights: ``[N]`` or None.
        order: ``[N]`` where each id stood before; None unless asked for.
    """

    lengths: Tensor
    ids: Tensor
    weights: Tensor | None
    order: Tensor | None


class Stripes:
    """Where the tables of F features are cut.

    Args:
        num_rows: for each feature, the rows of its table.
        starts: for each feature, the first row of every stripe, ascending from 0.
        use_fbgemm: None takes fbgemm where it is there.

    >>> stripes = Stripes([10], [[0, 5]])
    >>> made = stripes.sort(torch.tensor([2, 0, 1]), torch.tensor([3, 9, 1]), None, [3], False)
    >>> made.lengths.tolist(), made.ids.tolist()
    ([1, 0, 1, 1, 0, 0], [3, 1, 4])
    """

    def __init__(self, num_rows: list[int], starts: list[list[int]], use_fbgemm: bool | None = None) -> None:
        self.num_rows, self.starts = num_rows, starts
        self.count = max(len(own) for own in starts)
        self.use_fbgemm = has_fbgemm() if use_fbgemm is None else use_fbgemm
        sizes = [_even_size(rows, own) for rows, own in zip(num_rows, starts, strict=True)]
        self._sizes = [size or rows for size, rows in zip(sizes, num_rows, strict=True)]
        self._even = all(sizes)
        self._tensors: dict[tuple[torch.device, torch.dtype], tuple[Tensor, list[Tensor] | None]] = {}

    def sort(self, lengths: Tensor, ids: Tensor, weights: Tensor | None, bags: list[int], want_order: bool) -> Striped:
        """Sorts one batch.

        Args:
            lengths: ``[S]`` bag by bag.
            ids: ``[N]`` in their table's range.
            weights: ``[N]`` fp32 or fp64, or None.
            bags: bags of each feature; they sum to S.
            want_order: whether the caller needs ``order``.
        """
        if self.use_fbgemm and (weights is None or weights.dtype == torch.float32):
            return self._with_fbgemm(lengths, ids, weights, bags, want_order)
        return self._with_torch(lengths, ids, weights, bags)

    def _with_fbgemm(
        self, lengths: Tensor, ids: Tensor, weights: Tensor | None, bags: list[int], want_order: bool
    ) -> Striped:
        # fbgemm reads memory from the first element on, whatever the strides
        lengths, ids = lengths.contiguous(), ids.contiguous()
        weights = None if weights is None else weights.contiguous()
        sizes, cuts = self._on(ids.device, ids.dtype)
        variable: dict[str, Any] = {}
        if any(number != bags[0] for number in bags):
            batches = torch.tensor(bags, dtype=lengths.dtype, device=ids.device)
            variable = {"batch_size_per_feature": batches, "max_B": max(bags)}
        found = torch.ops.fbgemm.block_bucketize_sparse_features(
            lengths,
            ids,
            False,
            want_order,
            sizes,
            self.count,
            weights=weights,
            block_bucketize_pos=cuts,
            **variable,
        )
        order = None
        if want_order:  # fbgemm tells where each id went
            order = torch.empty_like(found[4])
            order[found[4]] = torch.arange(ids.numel(), dtype=order.dtype, device=ids.device)
        return Striped(found[0], found[1], found[2], order)

    def _on(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, list[Tensor] | None]:
        """fbgemm's arguments: the size of even stripes, and the edges of uneven ones."""
        if (device, dtype) not in self._tensors:
            sizes = torch.tensor(self._sizes, dtype=dtype, device=device)
            edges = None
            if not self._even:
                rows = zip(self.starts, self.num_rows, strict=True)
                edges = [torch.tensor([*own, last], dtype=dtype, device=device) for own, last in rows]
            self._tensors[device, dtype] = sizes, edges
        return self._tensors[device, dtype]

    def _with_torch(self, lengths: Tensor, ids: Tensor, weights: Tensor | None, bags: list[int]) -> Striped:
        total = lengths.numel()
        feature_ends = [0]
        for part in lengths.split(bags):
            feature_ends.append(feature_ends[-1] + int(part.sum()))
        small = torch.int8 if self.count < 128 else torch.int32
        stripe = torch.zeros(ids.numel(), dtype=small, device=ids.device)
        for (start, end), cuts in zip(pairwise(feature_ends), self.starts, strict=True):
            own, numbers = ids[start:end], stripe[start:end]
            if len(cuts) <= _FEW_CUTS:
                for cut in cuts[1:]:
                    numbers += own >= cut
            else:
                edges = torch.tensor(cuts[1:], dtype=ids.dtype, device=ids.device)
                numbers.copy_(torch.searchsorted(edges, own, right=True))
        order = stripe.sort(stable=True).indices
        bag = torch.repeat_interleave(lengths.long(), output_size=ids.numel())
        made = torch.bincount(stripe.long() * total + bag, minlength=self.count * total).to(lengths.dtype)
        ids = ids.index_select(0, order)
        self._count_from_first_rows(ids, made, bags)
        return Striped(made, ids, None if weights is None else weights.index_select(0, order), order)

    def _count_from_first_rows(self, ids: Tensor, lengths: Tensor, bags: list[int]) -> None:
        ends = edges_of(lengths, bags * self.count)
        for number, (start, end) in enumerate(pairwise(ends)):
            stripe, feature = divmod(number, len(bags))
            if start < end and stripe:
                ids[start:end] -= self.starts[feature][stripe]


_FEW_CUTS = 8


def edges_of(lengths: Tensor, bags: list[int]) -> list[int]:
    """Where the ids of each run of ``bags[n]`` bags end: ``[len(bags) + 1]`` from 0."""
    ends = complete_cumsum(lengths)
    found: list[int] = ends[_bag_ends(tuple(bags), ends.device)].tolist()
    return found


@lru_cache(maxsize=64)
def _bag_ends(bags: tuple[int, ...], device: torch.device) -> Tensor:
    """``[len(bags) + 1]`` from 0. Kept, because a copy to a GPU makes the host wait, and batches repeat their sizes."""
    return torch.tensor([*accumulate(bags, initial=0)], device=device)


def _even_size(num_rows: int, starts: list[int]) -> int:
    """Rows of a stripe where all but the last have the same number; 0 where they do not."""
    size = starts[1] if len(starts) > 1 else num_rows
    even = all(start == number * size for number, start in enumerate(starts))
    return size if even and num_rows <= len(starts) * size else 0


@cache
def has_fbgemm() -> bool:
    """Whether fbgemm's operators are loaded; the kernel of that name loads them."""
    return kernel_named("fbgemm").unavailable() is None
