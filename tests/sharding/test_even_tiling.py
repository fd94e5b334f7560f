"""An even cut reads as the rectangles that it stands for."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from recshard_lab.sharding.plan.tiling import find_fault
from recshard_lab.sharding.schemes.even_tiling import EvenTiling, sizes_of


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
    sizes, of = cut.sizes()
    plain, plain_of = sizes_of(rects)
    assert [sizes[k] for k in of] == [plain[k] for k in plain_of] == [(r[1] - r[0], c[1] - c[0]) for r, c in rects]
    assert [rects[i][1] for i in range(len(cut))] == [cut[int(p) * cut.num_row_slices][1] for p in cut.column_slices()]
    assert np.bincount(of, minlength=len(sizes)).sum() == len(rects)
