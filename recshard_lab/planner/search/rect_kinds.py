"""The rectangles of a proposal by kind: those of one kind put the same loads on their rank.

Shape letters: n rectangles, c kinds.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recshard_lab.planner.workload import Array
from recshard_lab.sharding import Rect
from recshard_lab.sharding.plan.types import DDR
from recshard_lab.sharding.plan.validate import replica_flags
from recshard_lab.sharding.schemes.even_tiling import EvenTiling


class RectKinds(NamedTuple):
    """The kinds that occur.

    Attributes:
        kinds: of each, its first row where that matters (else 0), rows, columns, 1 for replicas, 1 in host memory.
        of: ``[n]`` the kind of each rectangle.
        counts: ``[c]`` the rectangles of each kind.
    """

    kinds: list[tuple[int, int, int, int, int]]
    of: NDArray[np.intp]
    counts: Array


def rect_kinds(
    rects: Sequence[Rect], replicated: bool, by_place: bool, tiers: Sequence[str] | None = None
) -> RectKinds:
    """Kinds of a proposal's rectangles.

    Args:
        replicated: all are replicas; else those are of which there are several.
        tiers: the memory of each; all in the rank's own when left out.
        by_place: rows are looked up at different rates, so that shards of equal size have unequal loads.

    >>> kinds = rect_kinds([((0, 2), (0, 4)), ((0, 2), (0, 4)), ((2, 6), (0, 4)), ((6, 10), (0, 4))], False, False)
    >>> kinds.kinds, kinds.of.tolist(), kinds.counts.tolist()
    ([(0, 2, 4, 1, 0), (0, 4, 4, 0, 0)], [0, 0, 1, 1], [2.0, 2.0])
    """
    if isinstance(rects, EvenTiling) and not by_place and not tiers:
        sizes, of, counts = rects.sizes()
        copied = [int(rects.copies > 1), *[0] * (len(sizes) - 1)]
        return RectKinds([(0, *size, copy, 0) for size, copy in zip(sizes, copied, strict=True)], of, counts)
    if replicated:
        ((r0, r1), (c0, c1)) = rects[0]
        return RectKinds([(0, r1 - r0, c1 - c0, 1, 0)], _all_alike(len(rects)), np.array([float(len(rects))]))
    copies = replica_flags(list(rects))
    slow = [tier == DDR for tier in tiers or ()] or [False] * len(rects)
    found: dict[tuple[int, int, int, int, int], int] = {}
    of = np.array(
        [
            found.setdefault((r0 if by_place else 0, r1 - r0, c1 - c0, int(copy), int(there)), len(found))
            for ((r0, r1), (c0, c1)), copy, there in zip(rects, copies, slow, strict=True)
        ],
        dtype=np.intp,
    )
    return RectKinds(list(found), of, np.bincount(of).astype(float))


@lru_cache(maxsize=64)
def _all_alike(count: int) -> NDArray[np.intp]:
    return np.zeros(count, dtype=np.intp)


def summed_rows(rects: Sequence[Rect], num_rows: int) -> float:
    """The share of a table's rows that is not replicated: what a reduce-scatter adds up."""
    if isinstance(rects, EvenTiling):
        return 1.0 - (rects.copies > 1) * rects.hot_rows / num_rows
    hot = {rows for (rows, _), copy in zip(rects, replica_flags(rects), strict=True) if copy}
    return 1.0 - sum(end - start for start, end in hot) / num_rows
