"""Geometry: does a set of rectangles tile a table, and if not, where is the hole or the overlap?

A rectangle is ``((r0, r1), (c0, c1))``, half open. This file knows neither ranks nor tables nor tensors. Every tiling
is valid, including those that no sequence of straight cuts produces (a pinwheel).

Shape letters: E rows, D columns, n rectangles.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

Span: TypeAlias = tuple[int, int]
Rect: TypeAlias = tuple[Span, Span]


@dataclass(frozen=True)
class Fault:
    """Why rectangles are not a tiling.

    Attributes:
        kind: "empty" (no rows or no columns), "outside" (partly outside the table), "overlap" or "hole".
        rect: the empty or outside rectangle itself, the area covered twice, or the uncovered area.
        positions: positions of the rectangles involved; for a hole, of one that can be extended over it, if any.
        fix: for a hole or an overlap, the required value of rectangle ``positions[0]``; None if no single change
            suffices.
    """

    kind: Literal["empty", "outside", "overlap", "hole"]
    rect: Rect
    positions: tuple[int, ...] = ()
    fix: Rect | None = None


def intersect(a: Rect, b: Rect) -> Rect | None:
    """The intersection of two rectangles, or None.

    >>> intersect(((0, 10), (0, 4)), ((5, 20), (2, 8)))
    ((5, 10), (2, 4))
    """
    rows = (max(a[0][0], b[0][0]), min(a[0][1], b[0][1]))
    cols = (max(a[1][0], b[1][0]), min(a[1][1], b[1][1]))
    return (rows, cols) if rows[0] < rows[1] and cols[0] < cols[1] else None


def area(rect: Rect) -> int:
    """Elements of a rectangle."""
    return (rect[0][1] - rect[0][0]) * (rect[1][1] - rect[1][0])


def find_fault(rects: Sequence[Rect], num_rows: int, num_cols: int) -> Fault | None:
    """The first fault of ``rects`` as a tiling of ``[num_rows, num_cols]``, or None if they tile it.

    Coordinates are compressed to the edges that occur. A two-dimensional difference array counts how often each cell
    is covered, so the cost depends on n and never on E or D.

    >>> find_fault([((0, 5), (0, 4)), ((7, 10), (0, 4))], 10, 4)
    Fault(kind='hole', rect=((5, 7), (0, 4)), positions=(0,), fix=((0, 7), (0, 4)))
    """
    table: Rect = ((0, num_rows), (0, num_cols))
    for i, rect in enumerate(rects):
        if rect[0][0] >= rect[0][1] or rect[1][0] >= rect[1][1]:
            return Fault("empty", rect, (i,))
        if intersect(rect, table) != rect:
            return Fault("outside", rect, (i,), intersect(rect, table))
    if _are_slices(rects, num_rows, num_cols):
        return None
    row_edges = np.unique([0, num_rows, *(r for rect in rects for r in rect[0])])
    col_edges = np.unique([0, num_cols, *(c for rect in rects for c in rect[1])])
    cover = _cover_counts(rects, row_edges, col_edges)
    if (cover > 1).any():
        i, j = np.argwhere(cover > 1)[0]
        corner: Rect = ((int(row_edges[i]), int(row_edges[i]) + 1), (int(col_edges[j]), int(col_edges[j]) + 1))
        first, second = [k for k, rect in enumerate(rects) if intersect(rect, corner)][:2]
        shared = intersect(rects[first], rects[second])
        assert shared is not None
        return _overlap(rects, first, second, shared)
    if (cover == 0).any():
        return _hole(rects, cover == 0, row_edges, col_edges)
    return None


def _are_slices(rects: Sequence[Rect], num_rows: int, num_cols: int) -> bool:
    """The common case, without numpy: full-width or full-height slices end to end."""
    for axis, end, across in ((0, num_rows, (0, num_cols)), (1, num_cols, (0, num_rows))):
        at = 0
        for rect in sorted(rects, key=lambda rect: rect[axis]):
            if rect[1 - axis] != across or rect[axis][0] != at:
                break
            at = rect[axis][1]
        else:
            if at == end:
                return True
    return False


def _cover_counts(
    rects: Sequence[Rect], row_edges: np.ndarray, col_edges: np.ndarray
) -> "np.ndarray[tuple[int, int], np.dtype[np.int64]]":
    """How many rectangles cover each cell between neighbouring edges."""
    steps = np.zeros((len(row_edges), len(col_edges)), dtype=np.int64)
    if rects:
        corners = np.asarray(rects, dtype=np.int64)  # [n, 2 (rows, cols), 2 (from, to)]
        rows, cols = np.searchsorted(row_edges, corners[:, 0]), np.searchsorted(col_edges, corners[:, 1])
        for at_row, at_col, sign in ((0, 0, 1), (0, 1, -1), (1, 0, -1), (1, 1, 1)):
            np.add.at(steps, (rows[:, at_row], cols[:, at_col]), sign)
    return steps.cumsum(0).cumsum(1)[:-1, :-1]


def _hole(rects: Sequence[Rect], empty: np.ndarray, row_edges: np.ndarray, col_edges: np.ndarray) -> Fault:
    """The largest hole at the first uncovered cell, and a rectangle that can be extended over it."""
    i, j = (int(k) for k in np.argwhere(empty)[0])

    def grown(rows_first: bool) -> Rect:
        i_end, j_end = i + 1, j + 1
        for down in (rows_first, not rows_first):
            if down:
                while i_end < empty.shape[0] and empty[i_end, j:j_end].all():
                    i_end += 1
            else:
                while j_end < empty.shape[1] and empty[i:i_end, j_end].all():
                    j_end += 1
        return (int(row_edges[i]), int(row_edges[i_end])), (int(col_edges[j]), int(col_edges[j_end]))

    hole = max(grown(True), grown(False), key=area)
    for k, (rows, cols) in enumerate(rects):
        for side, hole_side, aligned in ((rows, hole[0], cols == hole[1]), (cols, hole[1], rows == hole[0])):
            if aligned and (side[1] == hole_side[0] or hole_side[1] == side[0]):
                span = (min(side[0], hole_side[0]), max(side[1], hole_side[1]))
                return Fault("hole", hole, (k,), (span, cols) if side is rows else (rows, span))
    return Fault("hole", hole)


def _overlap(rects: Sequence[Rect], first: int, second: int, shared: Rect) -> Fault:
    """An overlap, and the rectangle that becomes disjoint by moving one of its sides, if any."""
    for k, other in ((second, first), (first, second)):
        for axis in (0, 1):
            span, overlap, across = rects[k][axis], shared[axis], shared[1 - axis] == rects[k][1 - axis]
            if not across or span == overlap or (span[0] != overlap[0] and span[1] != overlap[1]):
                continue
            rest = (overlap[1], span[1]) if span[0] == overlap[0] else (span[0], overlap[0])
            fix: Rect = (rest, rects[k][1]) if axis == 0 else (rects[k][0], rest)
            return Fault("overlap", shared, (k, other), fix)
    return Fault("overlap", shared, (first, second))
