"""The loss curves' two sides train alike on small data, and would show it if they did not."""

from typing import Any

import pytest

from benchmarks.apparatus.model_runs import Course, plain, sharded
from benchmarks.apparatus.tower_runs import Likes, scores_alone, scores_sharded
from recshard_lab.models import model_names
from tests.launched import launched

RATINGS = {"name": "synthetic-ratings", "num_ratings": 3000}

two = launched(2)


@pytest.mark.nightly
@pytest.mark.parametrize("name", model_names())
def test_both_sides_walk_the_same_curve(two: Any, name: str) -> None:
    course = Course(name, RATINGS, batch_size=128, epochs=1)
    truth = plain(course)
    for ours in two.run(sharded, course):
        assert ours.losses == pytest.approx(truth.losses, rel=1e-3)
        assert ours.losses[-1] < ours.losses[0]
        assert ours.auc == pytest.approx(truth.auc, abs=2e-3)


@pytest.mark.nightly
def test_two_towers_on_ranks_propose_what_they_propose_on_one_process(two: Any) -> None:
    scores = scores_alone(True, RATINGS)
    assert float((scores - scores_alone(False, RATINGS)).abs().max()) > 0.1  # the correction shows
    likes = Likes(RATINGS)
    for ours in two.run(scores_sharded, True, RATINGS):
        assert float((ours - scores).abs().max()) < 0.01
        assert likes.recall(ours, 100) == pytest.approx(likes.recall(scores, 100), abs=0.02)
