"""An even tiling: equal row slices times column slices, below replicated rows if there are any; expanded on demand.

With thousands of ranks a tiling has thousands of rectangles of two or three sizes. The planner, which compares many
tilings of each table, reads the sizes only.

Shape letters: n rectangles, c sizes.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import overload

import numpy as np
from numpy.typing import NDArray

from recshard_lab.sharding.plan.tiling import Rect

Sizes = tuple[list[tuple[int, int]], NDArray[np.intp], NDArray[np.float64]]
"""The c distinct sizes (rows, columns), ``[n]`` the index of each rectangle's size, ``[c]`` how often it occurs."""


class EvenTiling(Sequence[Rect]):
    """Row slices of `block` rows (the last may be shorter) in each column slice, one column slice after the other.

    Args:
        num_rows, block, widths: sizes of the table, of its row slices and of its column slices.
        hot_rows, copies: the first rows, stored so many times before the slices of the others.

    >>> tiles = EvenTiling(10, 4, [2, 3])
    >>> list(tiles)[:3], tiles[3] == ((0, 4), (2, 5)), len(tiles)
    ([((0, 4), (0, 2)), ((4, 8), (0, 2)), ((8, 10), (0, 2))], True, 6)
    >>> tiles.sizes()[0]
    [(4, 2), (2, 2), (4, 3), (2, 3)]
    >>> list(EvenTiling(10, 5, [2], hot_rows=1, copies=2))
    [((0, 1), (0, 2)), ((0, 1), (0, 2)), ((1, 6), (0, 2)), ((6, 10), (0, 2))]
    """

    def __init__(self, num_rows: int, block: int, widths: Sequence[int], hot_rows: int = 0, copies: int = 0) -> None:
        self.num_rows, self.block, self.widths = num_rows, block, tuple(widths)
        self.hot_rows, self.copies = hot_rows, copies
        self.num_row_slices = -(-(num_rows - hot_rows) // block)
        self._starts = (0, *accumulate(self.widths))
        self.key = num_rows, block, self.widths, hot_rows, copies  # equal for equal arguments

    def __len__(self) -> int:
        return self.copies + self.num_row_slices * len(self.widths)

    @overload
    def __getitem__(self, at: int) -> Rect: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Rect, ...]: ...
    def __getitem__(self, at: int | slice) -> Rect | tuple[Rect, ...]:
        if isinstance(at, slice):
            return tuple(self[i] for i in range(*at.indices(len(self))))
        if not -len(self) <= at < len(self):
            raise IndexError(f"rectangle {at} of {len(self)}")
        if (at := at % len(self)) < self.copies:
            return (0, self.hot_rows), (0, self._starts[-1])
        col, row = divmod(at - self.copies, self.num_row_slices)
        top = self.hot_rows + row * self.block
        return (top, min(top + self.block, self.num_rows)), (self._starts[col], self._starts[col + 1])

    def __iter__(self) -> Iterator[Rect]:
        for _ in range(self.copies):
            yield (0, self.hot_rows), (0, self._starts[-1])
        tops = range(self.hot_rows, self.num_rows, self.block)
        rows = [(top, min(top + self.block, self.num_rows)) for top in tops]
        for start, end in zip(self._starts, self._starts[1:], strict=False):
            cols = (start, end)
            for span in rows:
                yield span, cols

    def __eq__(self, other: object) -> bool:
        if isinstance(other, EvenTiling):
            return self.key == other.key or tuple(self) == tuple(other)
        return isinstance(other, tuple) and tuple(self) == other

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        hot = f", {self.hot_rows}, {self.copies}" if self.copies else ""
        return f"EvenTiling({self.num_rows}, {self.block}, {list(self.widths)}{hot})"

    def sizes(self) -> Sizes:
        """The distinct sizes, that of the replicas first, the index of each rectangle's size, and their counts."""
        last = self.num_rows - self.hot_rows - self.block * (self.num_row_slices - 1)
        heights = list(dict.fromkeys([self.block] * (self.num_row_slices > 1) + [last]))
        widths = list(dict.fromkeys(self.widths))
        of, counts = _sizes_in_order(self.num_row_slices, len(heights), self.widths, self.copies)
        hot = [(self.hot_rows, self._starts[-1])] if self.copies else []
        return hot + [(height, width) for width in widths for height in heights], of, counts

    def column_slices(self) -> NDArray[np.intp]:
        """The index of each row slice's column slice, without replicas."""
        return np.repeat(np.arange(len(self.widths)), self.num_row_slices)


@lru_cache(maxsize=1024)
def _sizes_in_order(
    num_row_slices: int, num_heights: int, widths: tuple[int, ...], copies: int
) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Index of each rectangle's size, and how often each occurs; the last row slice may be lower. Read-only."""
    rows = np.zeros(num_row_slices, dtype=np.intp)
    rows[-1] = num_heights - 1
    distinct = list(dict.fromkeys(widths))
    cols = np.array([distinct.index(width) for width in widths], dtype=np.intp)
    of = (cols[:, None] * num_heights + rows[None, :]).ravel()
    if copies:
        of = np.append(np.zeros(copies, dtype=np.intp), of + 1)
    counts = np.bincount(of).astype(float)
    of.flags.writeable = counts.flags.writeable = False
    return of, counts
