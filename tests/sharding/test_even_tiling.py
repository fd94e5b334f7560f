"""An even tiling equals the tuple of its rectangles."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from recshard_lab.sharding.plan.tiling import find_fault
from recshard_lab.sharding.schemes.even_tiling import EvenTiling


@given(st.integers(1, 40), st.integers(1, 40), st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_a_cut_is_a_tiling_and_a_sequence(num_rows: int, block: int, widths: list[int]) -> None:
    cut = EvenTiling(num_rows, block, widths)
    rects = tuple(cut)
    assert find_fault(rects, num_rows, sum(widths)) is None
    assert rects == tuple(cut[i] for i in range(len(cut)))
    assert cut == rects
    assert rects == cut
    assert hash(cut) == hash(rects)
    assert cut[-1] == rects[-1]
    assert cut[1:] == rects[1:]
    sizes, of, counts = cut.sizes()
    assert [sizes[k] for k in of] == [(r[1] - r[0], c[1] - c[0]) for r, c in rects]
    assert len(set(sizes)) == len(sizes)
    assert [rects[i][1] for i in range(len(cut))] == [cut[int(p) * cut.num_row_slices][1] for p in cut.column_slices()]
    assert counts.tolist() == np.bincount(of, minlength=len(sizes)).tolist()


@given(st.integers(2, 40), st.integers(1, 40), st.integers(1, 4), st.data())
def test_replicated_rows_stand_before_the_row_slices(
    num_rows: int, block: int, copies: int, data: st.DataObject
) -> None:
    hot = data.draw(st.integers(1, num_rows - 1))
    cut, below = EvenTiling(num_rows, block, [8], hot, copies), EvenTiling(num_rows - hot, block, [8])
    rects = [((0, hot), (0, 8))] * copies + [((a + hot, b + hot), cols) for (a, b), cols in below]
    assert list(cut) == rects == [cut[i] for i in range(len(cut))] == [cut[i - len(cut)] for i in range(len(cut))]
    sizes, of, counts = cut.sizes()
    assert [sizes[k] for k in of] == [(r[1] - r[0], c[1] - c[0]) for r, c in rects]
    assert (of[:copies] == 0).all()
    assert counts[0] == copies
