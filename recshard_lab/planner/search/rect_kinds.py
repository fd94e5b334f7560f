"""The rectangles of a proposal by kind: those of one kind put the same loads on their rank.

Shape letters: n rectangles, c kinds.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recshard_lab.planner.workload import Array
from recshard_lab.sharding import Rect
from recshard_lab.sharding.plan.types import DDR
from recshard_lab.sharding.plan.validate import replica_flags
from recshard_lab.sharding.schemes.even_tiling import EvenTiling, sizes_of


class RectKinds(NamedTuple):
    """The kinds that occur.

    Attributes:
        first: ``[c]`` first row, where it matters; 0 else.
        rows, cols: ``[c]`` sizes.
        copies: ``[c]`` 1.0 for replicas.
        host: ``[c]`` 1.0 for those in the host's memory.
        of: ``[n]`` the kind of each rectangle.
    """

    first: Array
    rows: Array
    cols: Array
    copies: Array
    host: Array
    of: NDArray[np.intp]


def rect_kinds(
    rects: Sequence[Rect], replicated: bool, by_place: bool, tiers: Sequence[str] | None = None
) -> RectKinds:
    """Kinds of a proposal's rectangles.

    Args:
        replicated: all are replicas; else those are of which there are several.
        tiers: the memory of each; all in the rank's own when left out.
        by_place: rows are looked up at different rates, so that shards of equal size have unequal loads.

    >>> kinds = rect_kinds([((0, 2), (0, 4)), ((0, 2), (0, 4)), ((2, 6), (0, 4)), ((6, 10), (0, 4))], False, False)
    >>> kinds.rows.tolist(), kinds.copies.tolist(), kinds.of.tolist()
    ([2.0, 4.0], [1.0, 0.0], [0, 0, 1, 1])
    """
    even = isinstance(rects, EvenTiling) or (len(rects) == 1 and not tiers)
    if replicated or (even and not by_place):
        sizes, of = sizes_of(rects)
        rows, cols = np.array(sizes, dtype=float).T
        none = np.zeros(len(sizes))
        return RectKinds(none, rows, cols, none + 1.0 if replicated else none, none, of)
    listed = list(rects)
    copies = replica_flags(listed)
    slow = [tier == DDR for tier in tiers or ()] or [False] * len(listed)
    found: dict[tuple[int, int, int, bool, bool], int] = {}
    numbers = [
        found.setdefault((r0 if by_place else 0, r1 - r0, c1 - c0, copy, there), len(found))
        for ((r0, r1), (c0, c1)), copy, there in zip(listed, copies, slow, strict=True)
    ]
    first, rows, cols, flags, host = np.array(list(found), dtype=float).T
    return RectKinds(first, rows, cols, flags, host, np.array(numbers, dtype=np.intp))


def summed_rows(rects: Sequence[Rect], num_rows: int) -> float:
    """The share of a table's rows that is not replicated: what a reduce-scatter adds up."""
    if isinstance(rects, EvenTiling):
        return 1.0
    hot = {rows for (rows, _), copy in zip(rects, replica_flags(rects), strict=True) if copy}
    return 1.0 - sum(end - start for start, end in hot) / num_rows
