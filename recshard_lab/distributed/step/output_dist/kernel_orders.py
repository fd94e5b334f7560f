"""From the order of rows in a kernel to their order on the wire, by source rank and shard feature, and back."""

from collections.abc import Sequence
from math import gcd

import numpy as np
import torch
from torch import Tensor

from recshard_lab.distributed.step.output_dist.columns import (
    ColumnMap,
    Indices,
    Ints,
    Memo,
    Run,
    expand,
    gather,
    starts_of,
    to_device,
)


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
        self._pack = ColumnMap(runs, [self.width] * len(runs), [*widths] * sources, self._columns, keep=1)
        self._memo = Memo[Indices](keep=1)

    def by_source(self, rows: Tensor, bags: Ints) -> Tensor:
        """Rows ``[T, width]`` of the kernel, in the order of the wire; ``bags [W, features]``."""
        if len(self._widths) == 1:
            return rows.reshape(-1)
        starts = (np.cumsum(bags, 0) - bags) * self.width + self._columns
        counts = bags.reshape(-1)
        return self._pack(rows.reshape(-1), counts, counts, starts=starts.reshape(-1))

    def by_kernel(self, flat: Tensor, bags: Ints, begins: Ints | None = None) -> Tensor:
        """``[T, width]``, zeros where a shard feature has fewer than T bags.

        Args:
            flat: holds the rows of each source.
            bags: ``[W, features]``.
            begins: where the rows of each source begin; without it, behind those of the source before.
        """
        if begins is None and len(self._widths) == 1 and self.width:
            return flat.view(-1, self.width)
        longest, sizes = int(bags.sum(0).max(initial=0)), bags @ self._widths
        if not longest * self.width:
            return flat.new_empty(longest, self.width)
        starts = starts_of(sizes) if begins is None else begins
        if len(self._widths) == 1:
            if flat.numel() > longest * self.width:
                edges = np.column_stack([starts, starts + sizes]).reshape(-1)
                flat = torch.cat(flat.split(np.diff(edges, prepend=0, append=flat.numel()).tolist())[1::2])
            return flat.view(longest, self.width)
        key = starts.tobytes(), bags.tobytes(), flat.device
        indices = self._memo.get(key, lambda: self._compute(starts, bags, flat.device))
        return gather(flat, self._chunk, indices).view(longest, self.width)

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


class Transposed:
    """Kernels of sequences, whose rows are flat: by shard feature, then source.

    Args:
        widths: columns of each shard feature.
        sources: W.
    """

    def __init__(self, widths: Sequence[int], sources: int) -> None:
        self.features = count = len(widths)
        areas, turned = [width for width in widths for _ in range(sources)], [*widths] * sources
        pairs = [(n * sources + source, source * count + n) for n in range(count) for source in range(sources)]
        runs = [Run(area, 0, 0, areas[area], place) for area, place in pairs]
        self._there = ColumnMap(runs, areas, turned, keep=1)
        self._back = ColumnMap([run.reversed() for run in runs], turned, areas, keep=1)

    def by_source(self, flat: Tensor, counts: Ints) -> Tensor:
        """Rows of the kernel, in the order of the wire; ``counts [W, features]``."""
        return self._there(flat, counts.T.reshape(-1), counts.reshape(-1))

    def by_kernel(self, flat: Tensor, counts: Ints) -> Tensor:
        """The other way."""
        return self._back(flat, counts.reshape(-1), counts.T.reshape(-1))
