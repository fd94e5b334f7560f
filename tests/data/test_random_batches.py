"""Random batches: types, distributions, sizes, ranges and repetition."""

from itertools import islice
from typing import Any

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
    assert isinstance(batch, Pipelineable)


def test_dense_features_are_normal_and_labels_and_lengths_are_integers() -> None:
    batch = next(iter(RandomRecDataset(["f"], 500, num_dense=40, manual_seed=0, num_generated_batches=1)))
    dense, labels, ids = batch.dense_features, batch.labels, batch.sparse_features
    assert [part.dtype for part in (dense, labels, ids.values(), ids.lengths())] == [
        torch.float32, torch.int64, torch.int64, torch.int32,
    ]  # fmt: skip
    scores = ((dense <= 0).double().mean(), (dense.abs() <= 1).double().mean(), dense.square().mean())
    assert [float(score) for score in scores] == pytest.approx([0.5, 0.6827, 1.0], abs=0.03)
    assert set(labels.tolist()) == {0, 1}


@pytest.mark.parametrize(("settings", "fewest"), [({}, 0), ({"ids_per_features": [2]}, 0), ({"ids_per_feature": 2}, 2)])
def test_samples_have_from_no_ids_to_two_unless_one_number_is_passed(settings: Any, fewest: int) -> None:
    batch = next(iter(RandomRecDataset(["f"], 100, manual_seed=0, **settings)))
    assert set(batch.sparse_features.lengths().tolist()) == set(range(fewest, 3))


def test_drawn_batches_come_again_in_turn_and_the_same_seed_draws_the_same() -> None:
    data = RandomRecDataset(["f"], 4, manual_seed=3, num_generated_batches=2, num_batches=5)
    found = [batch.sparse_features.values() for batch in data]
    assert len(found) == len(data) == 5
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])
    anew = iter(RandomRecDataset(["f"], 40, num_generated_batches=0))
    assert not torch.equal(next(anew).dense_features, next(anew).dense_features)
    again = RandomRecDataset(["f"], 4, manual_seed=3, num_generated_batches=2)
    assert all(torch.equal(a.sparse_features.values(), b) for a, b in zip(islice(again, 5), found, strict=True))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"hash_size": 3, "hash_sizes": [3]}, r"hash_size=3 and hash_sizes=\[3\] exclude each other. Fix: pass one"),
        ({"hash_sizes": [3, 4]}, "2 entries for 1 keys"),
        ({"hash_size": 0}, "hash_size of 'f' must be an integer from 1"),
        ({"batch_size": 0}, "batch_size must be an integer from 1"),
        ({"ids_per_feature": 1, "min_ids_per_feature": 2}, "'f': min_ids_per_feature 2 is more than ids_per_feature 1"),
    ],
)
def test_sizes_that_cannot_be_are_refused(settings: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        RandomRecDataset(**{"keys": ["f"], "batch_size": 2, **settings})  # type: ignore[arg-type]
