"""The order in which one pass visits the samples, as a function of seed and epoch: any stretch of it at any time.

    samples     0 ........................................................ n      on disk
    blocks     [ 0 ][ 1 ][ 2 ][ 3 ][ 4 ][ 5 ]...[ last, shorter ]                 neighbours, read in one piece
    windows    [  4    0    7  ][  2    9    1  ]...                              blocks in a drawn order
    positions  each window's samples mixed                                        what training sees

A sample can be visited at any time of the pass, for its block can fall into any window; at no time more than one
window's numbers are in memory, and its reads fall into that window's blocks. A set of up to one window is mixed
as a whole: then every order of the samples is as likely as any other.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from recshard_lab.data.batch import Samples

WINDOW = 1 << 20
_BLOCK = 1 << 12


class SampleOrder:
    """Which sample stands at each position of a pass.

    Args:
        size: n, the samples.
        seed, epoch: what the order is drawn from; each epoch has another.
        shuffle: False for the samples' own order.
        window: how many samples are mixed at a time.

    >>> order = SampleOrder(10, seed=1, epoch=0)
    >>> sorted(order.stretch(0, 10).tolist()) == list(range(10))
    True
    >>> order.stretch(0, 10)[4:7].tolist() == order.stretch(4, 7).tolist()
    True
    """

    def __init__(self, size: int, seed: int, epoch: int, shuffle: bool = True, window: int = WINDOW) -> None:
        self.size, self.shuffle, self.window = size, shuffle, window
        self.drawn_from = (seed, epoch)
        self.block = max(1, min(_BLOCK, window // 16)) if size > window else max(1, size)
        self.per_window = max(1, window // self.block)
        blocks = -(-size // self.block)
        self.blocks = np.random.default_rng([*self.drawn_from, 0]).permutation(blocks) if shuffle else None
        if self.blocks is not None and size:
            sizes = np.full(blocks, self.block)
            sizes[self.blocks == blocks - 1] = size - (blocks - 1) * self.block
            ends = sizes.cumsum()[self.per_window - 1 :: self.per_window]
            self.ends = ends if len(ends) and ends[-1] == size else np.append(ends, size)  # of each window
        self._window = lru_cache(2)(self._mixed)

    def stretch(self, begin: int, end: int) -> Samples:
        """The samples at the positions from `begin` to before `end`."""
        if self.blocks is None or begin >= end:
            return range(begin, end)
        pieces = []
        at = begin
        while at < end:
            window = int(np.searchsorted(self.ends, at, side="right"))
            start = int(self.ends[window - 1]) if window else 0
            pieces.append(self._window(window)[at - start : end - start])
            at += len(pieces[-1])
        return np.concatenate(pieces)

    def _mixed(self, window: int) -> NDArray[np.int64]:
        """A window's samples, mixed."""
        assert self.blocks is not None
        first = self.blocks[window * self.per_window : (window + 1) * self.per_window].astype(np.int64) * self.block
        samples = (first[:, None] + np.arange(self.block)).reshape(-1)
        samples = samples[samples < self.size]
        np.random.default_rng([*self.drawn_from, 1 + window]).shuffle(samples)
        return samples
