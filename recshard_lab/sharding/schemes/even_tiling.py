"""An even tiling: equal row slices times column slices, stored as sizes and expanded on demand.

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

Sizes = tuple[list[tuple[int, int]], NDArray[np.intp]]
"""The c distinct sizes (rows, columns), and ``[n]`` the index of each rectangle's size."""


class EvenTiling(Sequence[Rect]):
    """Row slices of `block` rows (the last may be shorter) in each column slice, one column slice after the other.

    >>> tiles = EvenTiling(10, 4, [2, 3])
    >>> list(tiles)[:3], tiles[3] == ((0, 4), (2, 5)), len(tiles)
    ([((0, 4), (0, 2)), ((4, 8), (0, 2)), ((8, 10), (0, 2))], True, 6)
    >>> tiles.sizes()[0]
    [(4, 2), (2, 2), (4, 3), (2, 3)]
    """

    def __init__(self, num_rows: int, block: int, widths: Sequence[int]) -> None:
        self.num_rows, self.block, self.widths = num_rows, block, tuple(widths)
        self.num_row_slices = -(-num_rows // block)
        self._starts = (0, *accumulate(self.widths))

    def __len__(self) -> int:
        return self.num_row_slices * len(self.widths)

    @overload
    def __getitem__(self, at: int) -> Rect: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Rect, ...]: ...
    def __getitem__(self, at: int | slice) -> Rect | tuple[Rect, ...]:
        if isinstance(at, slice):
            return tuple(self[i] for i in range(*at.indices(len(self))))
        if not -len(self) <= at < len(self):
            raise IndexError(f"rectangle {at} of {len(self)}")
        col, row = divmod(at % len(self), self.num_row_slices)
        top = row * self.block
        return (top, min(top + self.block, self.num_rows)), (self._starts[col], self._starts[col + 1])

    def __iter__(self) -> Iterator[Rect]:
        tops = range(0, self.num_rows, self.block)
        rows = [(top, min(top + self.block, self.num_rows)) for top in tops]
        for start, end in zip(self._starts, self._starts[1:], strict=False):
            cols = (start, end)
            for span in rows:
                yield span, cols

    def __eq__(self, other: object) -> bool:
        if isinstance(other, EvenTiling):
            same = (self.num_rows, self.block, self.widths) == (other.num_rows, other.block, other.widths)
            return same or tuple(self) == tuple(other)
        return isinstance(other, tuple) and tuple(self) == other

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"EvenTiling({self.num_rows}, {self.block}, {list(self.widths)})"

    def sizes(self) -> Sizes:
        """The distinct sizes, and the index of each rectangle's size."""
        last = self.num_rows - self.block * (self.num_row_slices - 1)
        heights = list(dict.fromkeys([self.block] * (self.num_row_slices > 1) + [last]))
        widths = list(dict.fromkeys(self.widths))
        of = _sizes_in_order(self.num_row_slices, len(heights), self.widths)
        return [(height, width) for width in widths for height in heights], of

    def column_slices(self) -> NDArray[np.intp]:
        """``[n]`` the index of each rectangle's column slice."""
        return np.repeat(np.arange(len(self.widths)), self.num_row_slices)


@lru_cache(maxsize=1024)
def _sizes_in_order(num_row_slices: int, num_heights: int, widths: tuple[int, ...]) -> NDArray[np.intp]:
    """Index of each rectangle's size; the last row slice may be lower. Read-only."""
    rows = np.zeros(num_row_slices, dtype=np.intp)
    rows[-1] = num_heights - 1
    distinct = list(dict.fromkeys(widths))
    cols = np.array([distinct.index(width) for width in widths], dtype=np.intp)
    of = (cols[:, None] * num_heights + rows[None, :]).ravel()
    of.flags.writeable = False
    return of


def sizes_of(rects: Sequence[Rect]) -> Sizes:
    """The distinct sizes of any rectangles, and the index of each rectangle's size.

    >>> sizes_of([((0, 5), (0, 4)), ((5, 10), (0, 4)), ((10, 12), (0, 4))])
    ([(5, 4), (2, 4)], array([0, 0, 1]))
    """
    if isinstance(rects, EvenTiling):
        return rects.sizes()
    if rects and rects[0] == rects[-1]:  # replicas
        (r0, r1), (c0, c1) = rects[0]
        if rects.count(rects[0]) == len(rects):
            return [(r1 - r0, c1 - c0)], np.zeros(len(rects), dtype=np.intp)
    numbers: dict[tuple[int, int], int] = {}
    of = [numbers.setdefault((rows[1] - rows[0], cols[1] - cols[0]), len(numbers)) for rows, cols in rects]
    return list(numbers), np.array(of, dtype=np.intp)
