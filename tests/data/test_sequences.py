"""Histories in the order of time: what is held out, what a batch holds, and that ranks share one batch."""

from typing import Any

import pytest
import torch

from recshard_lab.data import RatingsDataset, SequenceDataset, SyntheticRatings
from recshard_lab.sparse import JaggedTensor
from tests.refusals import not_refused


def ratings() -> RatingsDataset:
    """User 0: items 5, 3, 1, 4 by time. User 1: two items. User 2: items 7, 8, 9, 2, 6."""
    rows = [(0, 3, 20), (2, 8, 2), (0, 5, 10), (1, 1, 5), (2, 7, 1), (0, 1, 30), (2, 9, 3), (1, 2, 6), (0, 4, 40)]
    user, item, time = (torch.tensor(column) for column in zip(*[*rows, (2, 2, 4), (2, 6, 5)], strict=True))
    columns = {"user": user, "movie": item}
    return RatingsDataset(columns, {"user": 3, "movie": 10}, torch.ones(len(user)), source="by hand", timestamps=time)


def test_the_last_item_is_held_out_and_each_place_predicts_the_next() -> None:
    data = SequenceDataset(ratings(), max_length=10)
    assert repr(data) == "SequenceDataset(by hand; 2 users, 9 items of 10)"
    assert data.held_out.tolist() == [4, 6]  # user 1 has too few items
    (batch,) = data.batches(8)
    features = {key: [bag.tolist() for bag in jt.to_dense()] for key, jt in batch.sparse_features.to_dict().items()}
    assert features["history"] == [[5, 3], [7, 8, 9]]
    assert features["next"] == [[3, 1], [8, 9, 2]]
    assert [len(bag) for bag in features["negative"]] == [2, 3]
    assert batch.labels.tolist() == [1.0] * 5 + [0.0] * 5
    assert batch.global_size == 10
    (held_out,) = data.held_out_batches(8)
    assert [bag.tolist() for bag in held_out.seen.to_dense()] == [[5, 3, 1], [7, 8, 9, 2]]
    assert [bag.tolist() for bag in held_out.histories["history"].to_dense()] == [[5, 3, 1], [7, 8, 9, 2]]
    assert held_out.items.tolist() == [4, 6]
    short = SequenceDataset(ratings(), max_length=2)  # keeps the last items
    (batch,) = short.batches(8)
    assert [bag.tolist() for bag in batch.sparse_features["history"].to_dense()] == [[5, 3], [8, 9]]
    (held_out,) = short.held_out_batches(8)
    assert [bag.tolist() for bag in held_out.histories["history"].to_dense()] == [[3, 1], [9, 2]]


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_shares_of_the_ranks_are_the_batch_of_one_process(world_size: int) -> None:
    data = SequenceDataset(SyntheticRatings(1000, num_users=50, num_movies=80), max_length=8)
    whole = list(data.batches(16, shuffle=True, seed=3))
    shares = [list(data.batches(16, rank, world_size, shuffle=True, seed=3)) for rank in range(world_size)]
    assert len(whole) == data.num_batches(16)
    for step, batch in enumerate(whole):
        own = [share[step] for share in shares]
        assert {part.global_size for part in own} == {batch.global_size} == {len(batch)}
        for key, bags in batch.sparse_features.to_dict().items():
            assert torch.equal(torch.cat([part.sparse_features[key].values() for part in own]), bags.values())
            assert torch.equal(torch.cat([part.sparse_features[key].lengths() for part in own]), bags.lengths())
    held_out = [data.held_out_batches(16, rank, world_size) for rank in range(world_size)]
    items = torch.cat([part.items for parts in zip(*held_out, strict=True) for part in parts])
    assert torch.equal(items, data.held_out)
    assert len(list(data.batches(16, drop_last=True))) == len(data) // 16


def test_wrong_arguments_are_named() -> None:
    bags = ratings()
    bags.columns["movie"] = JaggedTensor(torch.ones(11).long(), lengths=torch.ones(11).int())
    timeless = RatingsDataset({"u": torch.tensor([0])}, {"u": 1}, torch.ones(1), source="one")
    refusals: list[tuple[Any, str]] = [
        (lambda: SequenceDataset(ratings(), item="film"), "column 'film' does not exist"),
        (lambda: SequenceDataset(ratings(), max_length=0), "max_length is 0"),
        (lambda: SequenceDataset(bags), "column 'movie' has several ids per sample"),
        (lambda: SequenceDataset(timeless), "no timestamps"),
        (lambda: SequenceDataset(ratings().select(torch.tensor([0, 1, 3]))), "no user has 3 items"),
        (lambda: SequenceDataset(ratings()).num_batches(0), "batch_size is 0"),
        (lambda: next(SequenceDataset(ratings()).batches(4, 2, 2)), "rank is 2, but ranks are 0 to 1"),
    ]
    assert not_refused(refusals) == []
