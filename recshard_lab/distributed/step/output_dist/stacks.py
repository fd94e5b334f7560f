"""Columns that every source fills from the top: what kernels take where sources have different numbers of bags."""

from collections.abc import Sequence
from math import gcd

import numpy as np
import torch
from torch import Tensor

from recshard_lab.distributed.step.output_dist.columns import Indices, Ints, Memo, Numbers, expand, gather, to_device


class SourceStack:
    """Puts the rows of all sources below each other, for each shard feature, and shard features side by side.

    ::

        source 0   feature 0: a a a   feature 1: b          result   a b
        source 1   feature 0: c       feature 1: d d                 a d
                                                                     a d
                                                                     c 0

    Args:
        widths: columns of each shard feature.
        steps: sizes of other things in the same flat tensor.
    """

    def __init__(self, widths: Sequence[int], steps: Sequence[int] = ()) -> None:
        self._widths = np.array(widths, dtype=np.int64)
        self.width, self._chunk = sum(widths), gcd(*widths, *steps) or 1
        self._memo = Memo[Indices](keep=1)

    def __call__(self, flat: Tensor, begins: Numbers, bags: Ints) -> Tensor:
        """``[T, width]``, zeros where a shard feature has fewer than T bags.

        Args:
            flat: holds the rows of each source, one shard feature after the other.
            begins: where each source's rows begin.
            bags: of each source and shard feature.
        """
        longest = int(bags.sum(0).max(initial=0))
        if not longest:
            return flat.new_zeros(0, self.width)
        starts = np.asarray(begins, dtype=np.int64)
        key = starts.tobytes(), bags.tobytes(), flat.device
        indices = self._memo.get(key, lambda: self._compute(starts, bags, flat.device))
        return gather(flat, self._chunk, indices).view(longest, self.width)

    def sizes(self, bags: Ints) -> Ints:
        """Elements of each source."""
        return bags @ self._widths

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
        begin = np.repeat(table, chunks, axis=0).T
        places = (begin + np.concatenate([np.arange(n) for n in chunks])).reshape(-1)
        if (totals == longest).all():
            return Indices(to_device(places, device), None, None)
        known = (begin >= 0).reshape(-1)
        return Indices(to_device(places[known], device), to_device(np.cumsum(known) - known, device), None)
