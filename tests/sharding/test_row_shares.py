"""The curve of lookups over rows, against sums over single rows; and the row shards that follow from it."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recshard_lab.planner import AccessProfile
from recshard_lab.sharding import PlanError, RowShares


def chances(rows: int, alpha: float) -> np.ndarray:
    found = np.arange(1.0, rows + 1) ** -alpha
    return found / found.sum()


@pytest.mark.parametrize("rows", [1, 10, 16, 17, 1000, 100_000])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, 1.3])
def test_zipf_shares_and_distinct_rows_are_the_sums_over_rows(rows: int, alpha: float) -> None:
    curve, each = RowShares.zipf(rows, alpha), chances(rows, alpha)
    for end in {1, rows // 7 + 1, rows // 2 + 1, rows}:
        assert float(curve.share(0, end)) == pytest.approx(each[:end].sum(), abs=0.002)
        for ids in (10, 5000):
            truth = (1 - np.exp(-ids * each[:end])).sum()
            assert float(curve.distinct(0, end, ids)) == pytest.approx(truth, rel=0.02)


@given(
    rows=st.integers(1, 5000), alpha=st.floats(0, 2), count=st.integers(1, 9), evenness=st.floats(0, 1), data=st.data()
)
def test_row_shards_cover_the_rest_of_the_table_and_balance_lookups(
    rows: int, alpha: float, count: int, evenness: float, data: st.DataObject
) -> None:
    curve = RowShares.zipf(rows, alpha)
    first = data.draw(st.integers(0, rows - 1))
    sizes = curve.sizes(count, first_row=first, evenness=evenness)
    assert sum(sizes) == rows - first
    assert len(sizes) == count
    assert min(sizes) >= 0
    each = chances(rows, alpha)[first:]
    edges = np.cumsum([0, *curve.sizes(count, first_row=first)])
    served = [each[a:b].sum() / each.sum() for a, b in pairwise(edges)]
    hottest = each.max() / each.sum()  # rows are not cut
    assert max(served) <= 1 / count + hottest + 0.01


def test_what_was_counted_is_what_is_told_in_the_order_of_the_ids() -> None:
    draw = np.random.default_rng(2)
    ids = draw.integers(0, 3000, 20_000)
    curve = RowShares.of_ids([ids[:9000], ids[9000:]], 4000)
    for start, end in ((0, 100), (500, 2000), (3000, 4000)):
        truth = ((ids >= start) & (ids < end)).mean()
        assert float(curve.share(start, end)) == pytest.approx(truth, abs=0.01)


def test_a_profile_puts_its_most_used_rows_first() -> None:
    profile = AccessProfile(uses=(1.0, 5.0, 100.0), rows=(50.0, 10.0, 3.0))
    curve = profile.row_shares(63)
    assert [float(curve.share(0, rows)) for rows in (3, 13, 63)] == pytest.approx([0.75, 0.875, 1.0])
    wide = profile.row_shares(1000)  # 50 of 400 ids were of rows met once: so many may be of rows not met at all
    assert [float(wide.share(0, rows)) for rows in (3, 63, 1000)] == pytest.approx([0.75 * 0.875, 0.875, 1.0])
    assert profile.row_shares(5).num_rows == 5


def test_curves_that_cannot_be_are_refused() -> None:
    for edges, shares in (((0, 5), (0.0, 0.5)), ((1, 5), (0.0, 1.0)), ((0, 5, 5), (0.0, 0.5, 1.0)), ((0,), (0.0,))):
        with pytest.raises(ValueError, match="must"):
            RowShares(tuple(map(float, edges)), shares)
    with pytest.raises(PlanError, match="expected count >= 1"):
        RowShares.zipf(10, 1.0).sizes(0)
    with pytest.raises(ValueError, match="ids must be rows 0 to 9, got 3 to 10"):
        RowShares.of_ids([[3, 10]], 10)
