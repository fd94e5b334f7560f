"""The prose of notebook 07 is what its cells print."""

import numpy as np

from recshard_lab.planner import AccessProfile
from tests.notebooks.claims import stored

SKEW = stored("07")
ROWS = 8_000


def profile() -> AccessProfile:
    """That of the notebook's drawn ids."""
    law = np.arange(1, ROWS + 1) ** -1.2
    return AccessProfile.of_ids([np.random.default_rng(0).choice(ROWS, 60_000, p=law / law.sum())])


def test_the_hottest_rows_get_most_lookups() -> None:
    guess = SKEW.cell("zipf.hottest(ROWS / 100)")
    assert guess.number("%") == round(100 * profile().hottest(80)) == 74
    assert guess.number(after="The hottest row:") == round(100 * profile().hottest(1)) > 20
    assert guess.number(after="The hottest 1% of the movies:") < 10
    assert "The single hottest row gets more than 20% of the lookups." in SKEW.prose("**c.**")
    assert 100 / 16 == 6.25


def busiest(words: str) -> float:
    """Times the mean that the busiest rank looks up."""
    return SKEW.cell("busiest rank:").number(after=rf"{words}".ljust(22) + " busiest rank:")


def test_equal_rows_are_unequal_work_and_each_cure_helps() -> None:
    equal = busiest("equal rows")
    assert equal == round(3.78, 2)
    assert SKEW.cell("lab.guess(mine, round(max").number("times") == round(equal, 1)
    assert 1 <= busiest("hot rows on each rank") < busiest("equal lookups") < busiest("scattered rows") < equal / 2
    times = SKEW.cell("on the fullest rank")
    assert times.row("equal rows")[0] > times.row("equal lookups")[0] > times.row("hot rows on each rank")[0]


def test_a_cache_answers_most_lookups_of_the_hot_rank() -> None:
    caches = SKEW.cell("last.table")
    assert caches.row("rank 0:")[0] > 50 > 10 > caches.row("rank 3:")[0]


def test_the_answers_of_the_exercises() -> None:
    shares = profile().row_shares(ROWS)
    assert shares.rows_for(0.5) == 11
    sizes = np.array(shares.sizes(4))
    ends = sizes.cumsum()
    assert max(shares.share(ends - sizes, ends)) <= 0.3
    assert "only copies split the lookups of one row" in SKEW.output_of("mine_c")
