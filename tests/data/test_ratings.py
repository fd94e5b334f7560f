"""Batches: the pieces of all ranks are the global batch; splits lose and repeat nothing."""

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recshard_lab.data import Batch, RatingsDataset, SyntheticRatings
from recshard_lab.sparse import JaggedTensor
from tests.grid import every


def jagged(bags: list[list[int]]) -> JaggedTensor:
    values = torch.tensor([identifier for bag in bags for identifier in bag], dtype=torch.int64)
    return JaggedTensor(values, lengths=torch.tensor([len(bag) for bag in bags], dtype=torch.int32))


@st.composite
def datasets(draw: st.DrawFn) -> tuple[RatingsDataset, list[tuple[float, int, list[int], list[int]]]]:
    """A dataset and, independently, its samples one by one."""
    size = draw(st.integers(1, 23))
    bag = st.lists(st.integers(0, 6), max_size=4)
    user = draw(st.lists(st.integers(0, 9), min_size=size, max_size=size))
    genres = draw(st.lists(bag, min_size=size, max_size=size))
    tags = draw(st.lists(bag, min_size=size, max_size=size))
    label = draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=size, max_size=size))
    data = RatingsDataset(
        {"genres": jagged(genres), "user": torch.tensor(user), "tags": jagged(tags)},
        {"genres": 7, "user": 10, "tags": 7},
        torch.tensor(label),
        source="drawn",
        dense=torch.arange(float(size)).unsqueeze(1),
        timestamps=torch.tensor(user),
    )
    return data, list(zip(label, user, genres, tags, strict=True))


def samples_of(batch: Batch) -> list[tuple[float, int, list[int], list[int]]]:
    bags = {key: batch.sparse_features[key].to_dense() for key in batch.sparse_features.keys()}  # noqa: SIM118
    columns = (batch.labels, bags["user"], bags["genres"], bags["tags"])
    return [
        (float(y), int(user), genres.tolist(), tags.tolist()) for y, user, genres, tags in zip(*columns, strict=True)
    ]


@given(datasets(), st.integers(1, 9), st.integers(1, 5), st.booleans(), st.booleans(), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_the_ranks_pieces_together_are_the_global_batch(
    drawn: Any, batch_size: int, world_size: int, shuffle: bool, drop_last: bool, seed: int
) -> None:
    data, samples = drawn
    options = {"shuffle": shuffle, "seed": seed, "drop_last": drop_last}
    alone = list(data.batches(batch_size, **options))
    ranks = [list(data.batches(batch_size, rank, world_size, **options)) for rank in range(world_size)]
    assert {len(batches) for batches in ranks} == {data.num_batches(batch_size, drop_last)}
    for step, whole in enumerate(alone):
        pieces = [batches[step] for batches in ranks]
        sizes = [len(piece) for piece in pieces]
        assert [sample for piece in pieces for sample in samples_of(piece)] == samples_of(whole)
        assert torch.equal(torch.cat([piece.dense_features for piece in pieces]), whole.dense_features)
        assert max(sizes) - min(sizes) <= 1
        assert sizes == sorted(sizes, reverse=True)
        assert {piece.global_size for piece in pieces} == {len(whole)}
        assert all(piece.sparse_features.stride() == len(piece) for piece in pieces)
        assert all(piece.sparse_features.keys() == ["genres", "user", "tags"] for piece in pieces)
    order = [int(row) for batch in alone for row in batch.dense_features[:, 0]]
    seen = [sample for batch in alone for sample in samples_of(batch)]
    assert seen == [samples[row] for row in order]
    kept = len(samples) - (len(samples) % batch_size if drop_last else 0)
    assert len(set(order)) == len(order) == kept
    if not shuffle:
        assert order == list(range(kept))


@given(datasets(), st.sampled_from(["random", "time"]), st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_a_split_is_a_partition(drawn: tuple[RatingsDataset, list[object]], by: str, seed: int) -> None:
    data, samples = drawn
    train, test = data.split(by, test_fraction=0.3, seed=seed)
    assert len(test) == round(0.3 * len(data))
    rows = [int(row) for part in (train, test) for row in part.dense[:, 0]]
    assert sorted(rows) == list(range(len(data)))
    got = [s for part in (train, test) for batch in part.batches(100) for s in samples_of(batch)]
    assert got == [samples[row] for row in rows]
    if by == "time" and len(train) and len(test):
        assert int(train.timestamps.max()) <= int(test.timestamps.min())


@every(
    [
        (lambda data: data.batches(0), "batch_size must be at least 1, got 0"),
        (lambda data: data.batches(8, rank=2, world_size=2), "rank must lie in [0, 2), got 2"),
        (lambda data: data.split(test_fraction=1.0), "test_fraction must be between 0 and 1"),
        (lambda data: data.split("user"), "split by 'random' or 'time', got 'user'"),
    ]
)
def test_wrong_arguments_are_refused_before_the_first_batch(case: tuple[Any, str]) -> None:
    wrong, says = case
    with pytest.raises(ValueError, match=re.escape(says)):
        wrong(SyntheticRatings(50, num_users=40, num_movies=60))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"features": {"user": 1}}, r"feature 'user': ids must lie in \[0, 1\), got 0 to 1"),
        ({"features": {"movie": 2}}, "same names"),
        ({"label": torch.tensor([1.0, 2.0])}, "labels must be 0 or 1"),
        ({"label": torch.tensor([1.0])}, "user has 2 samples, label has 1"),
        ({"timestamps": torch.tensor([1])}, "timestamps has 1 samples"),
        ({"dense": torch.zeros(3, 1)}, "dense has 3 samples"),
    ],
)
def test_a_dataset_that_does_not_fit_together_is_refused(change: dict[str, object], reason: str) -> None:
    good = {"columns": {"user": torch.tensor([0, 1])}, "features": {"user": 2}, "label": torch.tensor([1.0, 0.0])}
    with pytest.raises(ValueError, match=reason):
        RatingsDataset(**(good | change), source="by hand")  # type: ignore[arg-type]
