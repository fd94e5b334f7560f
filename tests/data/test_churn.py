"""Churning ids: a known share of the live ids leaves in each stretch of samples, and clicks depend on the ids."""

import numpy as np
import pytest

from recshard_lab.data import ChurningClicks, SyntheticClicks

USERS, PER = 200, 2000
HALVES = slice(0, 20_000), slice(20_000, 40_000)


def live(clicks: ChurningClicks, begin: int) -> set[int]:
    """The ids that occur in `PER` samples."""
    return set(clicks.ids(range(begin, begin + PER))[:, 0].tolist())


@pytest.mark.parametrize("replaced", [0.1, 0.5, 1.0])
def test_the_share_of_live_ids_that_leave_is_the_one_that_was_asked_for(replaced: float) -> None:
    clicks = ChurningClicks(1 << 30, [USERS, 9], replaced=replaced, per=PER * 100, zipf=0.0)
    for begin in (0, 7 * PER, 1 << 29):  # a stretch of PER samples is short: the users in it are those of a moment
        before, after = live(clicks, begin), live(clicks, begin + 100 * PER)
        assert len(before - after) / len(before) == pytest.approx(replaced, abs=0.07)


def test_clicks_depend_on_the_new_id() -> None:
    """The planted chances know who came: they are true, and above chance on each stretch."""
    clicks = ChurningClicks(40_000, [30], replaced=1.0, per=20_000, num_dense=0)
    for half in HALVES:
        assert clicks.best(range(40_000)[half]).auc > 0.7
    places = SyntheticClicks(40_000, [30], num_dense=0).ids(range(40_000))[:, 0]
    chance = clicks.probability(range(40_000))
    first, later = ([chance[at][places[at] == place].mean() for place in range(5)] for at in HALVES)
    assert np.abs(np.array(first) - np.array(later)).max() > 0.1


def test_the_source_says_what_churns_and_wrong_arguments_are_refused() -> None:
    assert ChurningClicks(5, [3]).source.endswith("of cat_0 1% replaced per 100,000 samples")
    for wrong in ({"churning": ["cat_1"]}, {"replaced": 1.5}, {"per": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ChurningClicks(5, [3], **wrong)  # type: ignore[arg-type]
