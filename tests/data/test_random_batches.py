"""Random batches: sizes, ranges and repetition as asked."""

from itertools import islice

import pytest
import torch

from recshard_lab.data import RandomRecDataset
from recshard_lab.sparse import Pipelineable


def test_ids_lie_in_the_range_of_their_feature_and_bags_have_the_lengths_asked_for() -> None:
    data = RandomRecDataset(
        ["f", "g"], 64, hash_sizes=[3, 50], ids_per_features=[4, 2], min_ids_per_features=[0, 2], num_dense=5
    )
    batch = next(iter(data))
    first, second = batch.sparse_features["f"], batch.sparse_features["g"]
    assert first.values().max() < 3
    assert second.values().max() < 50
    assert set(first.lengths().tolist()) == {0, 1, 2, 3, 4}
    assert set(second.lengths().tolist()) == {2}
    assert batch.dense_features.shape == (64, 5)
    assert set(batch.labels.tolist()) == {0.0, 1.0}
    assert isinstance(batch, Pipelineable)


def test_drawn_batches_come_again_in_turn_and_the_same_seed_draws_the_same() -> None:
    data = RandomRecDataset(["f"], 4, manual_seed=3, num_generated_batches=2, num_batches=5)
    found = [batch.sparse_features.values() for batch in data]
    assert len(found) == len(data) == 5
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])
    again = RandomRecDataset(["f"], 4, manual_seed=3, num_generated_batches=2)
    assert all(torch.equal(a.sparse_features.values(), b) for a, b in zip(islice(again, 5), found, strict=True))


def test_batches_can_be_drawn_anew_each_time() -> None:
    data = iter(RandomRecDataset(["f"], 40, num_generated_batches=0))
    assert not torch.equal(next(data).dense_features, next(data).dense_features)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"hash_size": 3, "hash_sizes": [3]}, "hash_size or hash_sizes, not both"),
        ({"hash_sizes": [3, 4]}, "2 entries for 1 keys"),
        ({"hash_size": 0}, "hash_size of 'f' must be an integer from 1"),
        ({"batch_size": 0}, "batch_size must be an integer from 1"),
        ({"ids_per_feature": 1, "min_ids_per_feature": 2}, "'f': min_ids_per_feature 2 is more than"),
    ],
)
def test_sizes_that_cannot_be_are_refused(settings: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        RandomRecDataset(**{"keys": ["f"], "batch_size": 2, **settings})  # type: ignore[arg-type]
