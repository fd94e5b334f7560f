"""Tilings: what covers a table exactly once passes, everything else is named."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recshard_lab.sharding.plan.tiling import Rect, area, find_fault, intersect

PINWHEEL: list[Rect] = [  # no straight cut goes through it
    ((0, 1), (0, 2)),
    ((0, 2), (2, 3)),
    ((2, 3), (1, 3)),
    ((1, 3), (0, 1)),
    ((1, 2), (1, 2)),
]


def painted(rects: list[Rect], num_rows: int, num_cols: int) -> np.ndarray:
    """Independent truth: how often each element is covered."""
    cover = np.zeros((num_rows, num_cols), dtype=int)
    for (r0, r1), (c0, c1) in rects:
        cover[r0:r1, c0:c1] += 1
    return cover


def cut(draw: st.DrawFn, rect: Rect, depth: int) -> list[Rect]:
    (r0, r1), (c0, c1) = rect
    if depth and r1 - r0 > 1 and draw(st.booleans()):
        at = draw(st.integers(r0 + 1, r1 - 1))
        return cut(draw, ((r0, at), (c0, c1)), depth - 1) + cut(draw, ((at, r1), (c0, c1)), depth - 1)
    if depth and c1 - c0 > 1:
        at = draw(st.integers(c0 + 1, c1 - 1))
        return cut(draw, ((r0, r1), (c0, at)), depth - 1) + cut(draw, ((r0, r1), (at, c1)), depth - 1)
    return [rect]


@st.composite
def tilings(draw: st.DrawFn) -> tuple[list[Rect], int, int]:
    rows, cols = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    return draw(st.permutations(cut(draw, ((0, rows), (0, cols)), 4))), rows, cols


rects_in_9 = st.tuples(*[st.tuples(st.integers(0, 9), st.integers(0, 9))] * 2)


def test_a_pinwheel_is_a_tiling() -> None:
    assert find_fault(PINWHEEL, 3, 3) is None


@pytest.mark.parametrize("missing", range(5))
def test_a_pinwheel_without_one_piece_has_that_hole(missing: int) -> None:
    fault = find_fault(PINWHEEL[:missing] + PINWHEEL[missing + 1 :], 3, 3)
    assert fault.kind == "hole"
    assert fault.rect == PINWHEEL[missing]


@given(tilings())
def test_cutting_at_random_gives_a_tiling(tiling: tuple[list[Rect], int, int]) -> None:
    assert find_fault(*tiling) is None


@given(st.lists(rects_in_9, max_size=6))
def test_any_rectangles_are_judged_as_by_painting_them(rects: list[Rect]) -> None:
    fault = find_fault(rects, 8, 8)
    if fault is None:
        assert (painted(rects, 8, 8) == 1).all()
        return
    (r0, r1), (c0, c1) = fault.rect
    if fault.kind in ("hole", "overlap"):
        inside = painted(rects, 8, 8)[r0:r1, c0:c1]
        assert inside.size > 0
        assert (inside == 0).all() if fault.kind == "hole" else (inside > 1).all()
    elif fault.kind == "empty":
        assert r0 >= r1 or c0 >= c1
    else:
        assert r1 > 8 or c1 > 8


@given(st.lists(rects_in_9, max_size=4))
def test_the_suggested_fix_removes_the_fault(rects: list[Rect]) -> None:
    fault = find_fault(rects, 8, 8)
    if fault is None or fault.fix is None or fault.kind == "outside":
        return
    before = painted(rects, 8, 8)
    rects[fault.positions[0]] = fault.fix
    after = painted(rects, 8, 8)
    (r0, r1), (c0, c1) = fault.rect
    if fault.kind == "hole":
        assert (after[r0:r1, c0:c1] == 1).all()
    else:
        assert (after[r0:r1, c0:c1] == before[r0:r1, c0:c1] - 1).all()


def test_no_rectangles_leave_the_whole_table_as_hole() -> None:
    fault = find_fault([], 5, 4)
    assert fault.rect == ((0, 5), (0, 4))


@given(rects_in_9, rects_in_9)
def test_intersections_are_what_both_paint(a: Rect, b: Rect) -> None:
    both = (painted([a], 9, 9) * painted([b], 9, 9)).sum()
    shared = intersect(a, b)
    assert both == (0 if shared is None else area(shared))


def test_a_table_of_many_small_pieces_is_checked_quickly() -> None:
    pieces: list[Rect] = [((r, r + 1), (c, c + 1)) for r in range(64) for c in range(64)]
    assert find_fault(pieces, 64, 64) is None
    del pieces[100]
    fault = find_fault(pieces, 64, 64)
    assert fault.rect == ((1, 2), (36, 37))
