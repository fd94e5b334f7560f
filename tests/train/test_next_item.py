"""A sequence model trained on ranks and by its plain twin: losses, NDCG@10, and evaluation against a loop."""

from typing import Any

import pytest
import torch

from benchmarks.apparatus.sequence_runs import Course, PlainSASRec, plain, plain_ndcg, sharded
from recshard_lab.train import evaluate_next_item, rank_held_out
from tests.launched import launched

SMALL = Course(ratings=2000, epochs=3, max_length=12)

two = launched(2)


@pytest.mark.gate
@pytest.mark.parametrize("scheme", ["row_wise", "column_wise", "data_parallel"])
def test_ranks_train_as_the_plain_twin_does(two: Any, scheme: str) -> None:
    course = Course(SMALL.ratings, scheme, SMALL.epochs, SMALL.max_length)
    truth = plain(course)
    for ours in two.run(sharded, course):
        assert ours.losses == pytest.approx(truth.losses, rel=1e-4)
        assert ours.losses[-1] < ours.losses[0]
        assert ours.ndcg == pytest.approx(truth.ndcg, abs=0.002)


def test_evaluation_is_that_of_a_loop_over_users() -> None:
    data = SMALL.data()
    model = SMALL.untrained(data.num_items)
    found = evaluate_next_item(model, data, k=30, batch_size=7)
    assert found.users == len(data)
    assert found.ndcg == pytest.approx(plain_ndcg(PlainSASRec(model), data, k=30), abs=1e-6)
    assert 0 < found.ndcg < found.hit_rate < 1
    assert model.training


def test_a_model_that_ranks_no_items_is_refused() -> None:
    with pytest.raises(ValueError, match="Linear contains no SASRec"):
        evaluate_next_item(torch.nn.Linear(1, 1), SMALL.data())


def test_seen_items_are_no_candidates() -> None:
    data = SMALL.data()
    everyone = next(data.held_out_batches(len(data)))
    scores = torch.zeros(len(data), data.num_items)
    for user, (seen, item) in enumerate(zip(everyone.seen.to_dense(), everyone.items, strict=True)):
        scores[user, item] = 1.0
        scores[user, seen[seen != item]] = 2.0
    assert rank_held_out(scores, everyone, k=1).ndcg == 1.0
    assert rank_held_out(-scores, everyone, k=1).hit_rate == 0.0
    with pytest.raises(ValueError, match="scores has 1 rows"):
        rank_held_out(scores[:1], everyone)
