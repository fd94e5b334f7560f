"""An even cut: rows in blocks, columns in widths, spelled out only where somebody reads it.

Thousands of ranks make thousands of rectangles of two or three sizes, for every table and every way to cut it. Those
who choose among them need the sizes alone.

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
"""The c sizes (rows, columns) that occur, and ``[n]`` the size of each rectangle."""


class EvenTiling(Sequence[Rect]):
    """Stripes of `block` rows (the last may be shorter) in each of the column pieces, piece after piece.

    >>> cut = EvenTiling(10, 4, [2, 3])
    >>> list(cut)[:3], cut[3] == ((0, 4), (2, 5)), len(cut)
    ([((0, 4), (0, 2)), ((4, 8), (0, 2)), ((8, 10), (0, 2))], True, 6)
    >>> cut.sizes()[0]
    [(4, 2), (2, 2), (4, 3), (2, 3)]
    """

    def __init__(self, num_rows: int, block: int, widths: Sequence[int]) -> None:
        self.num_rows, self.block, self.widths = num_rows, block, tuple(widths)
        self.num_stripes = -(-num_rows // block)
        self._starts = (0, *accumulate(self.widths))

    def __len__(self) -> int:
        return self.num_stripes * len(self.widths)

    @overload
    def __getitem__(self, at: int) -> Rect: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Rect, ...]: ...
    def __getitem__(self, at: int | slice) -> Rect | tuple[Rect, ...]:
        if isinstance(at, slice):
            return tuple(self[i] for i in range(*at.indices(len(self))))
        if not -len(self) <= at < len(self):
            raise IndexError(f"rectangle {at} of {len(self)}")
        piece, stripe = divmod(at % len(self), self.num_stripes)
        top = stripe * self.block
        return (top, min(top + self.block, self.num_rows)), (self._starts[piece], self._starts[piece + 1])

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
        """The sizes that occur, and the size of each rectangle."""
        last = self.num_rows - self.block * (self.num_stripes - 1)
        heights = list(dict.fromkeys([self.block] * (self.num_stripes > 1) + [last]))
        widths = list(dict.fromkeys(self.widths))
        of = _sizes_in_turn(self.num_stripes, len(heights), self.widths)
        return [(height, width) for width in widths for height in heights], of

    def pieces(self) -> NDArray[np.intp]:
        """``[n]`` the column piece of each rectangle."""
        return np.repeat(np.arange(len(self.widths)), self.num_stripes)


@lru_cache(maxsize=1024)
def _sizes_in_turn(num_stripes: int, num_heights: int, widths: tuple[int, ...]) -> NDArray[np.intp]:
    """The size of each rectangle of an even cut, whose last stripe may be lower; not to be written to."""
    stripe = np.zeros(num_stripes, dtype=np.intp)
    stripe[-1] = num_heights - 1
    kinds = list(dict.fromkeys(widths))
    piece = np.array([kinds.index(width) for width in widths], dtype=np.intp)
    of = (piece[:, None] * num_heights + stripe[None, :]).ravel()
    of.flags.writeable = False
    return of


def sizes_of(rects: Sequence[Rect]) -> Sizes:
    """The sizes that occur in any rectangles, and the size of each.

    >>> sizes_of([((0, 5), (0, 4)), ((5, 10), (0, 4)), ((10, 12), (0, 4))])
    ([(5, 4), (2, 4)], array([0, 0, 1]))
    """
    if isinstance(rects, EvenTiling):
        return rects.sizes()
    if rects and rects[0] == rects[-1]:  # replicas
        (r0, r1), (c0, c1) = rects[0]
        if rects.count(rects[0]) == len(rects):
            return [(r1 - r0, c1 - c0)], np.zeros(len(rects), dtype=np.intp)
    found: dict[tuple[int, int], int] = {}
    of = [found.setdefault((rows[1] - rows[0], cols[1] - cols[0]), len(found)) for rows, cols in rects]
    return list(found), np.array(of, dtype=np.intp)
