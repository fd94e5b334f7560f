"""The generator's ratings look like ratings: popular and rare movies, five stars, a taste that can be learned."""

import pytest
import torch
from sklearn.metrics import roc_auc_score

from recshard_lab.data import SyntheticRatings


def test_shaped_like_movielens_100k() -> None:
    data = SyntheticRatings()
    sizes = {"user": 943, "movie": 1682, "age": 7, "gender": 2, "occupation": 21, "genres": 19}
    assert data.features == sizes
    assert len(data) == 100_000
    assert 0.54 < float(data.label.mean()) < 0.56
    pairs = data.columns["user"] * 1682 + data.columns["movie"]
    assert len(torch.unique(pairs)) == 100_000
    genres = data.columns["genres"].lengths()
    assert (int(genres.min()), int(genres.max())) == (1, 4)
    assert float((genres > 1).float().mean()) > 0.7


def test_the_first_batch_of_a_split_is_jagged() -> None:
    """The first notebook shows it: bags of one id each would show nothing."""
    train, _ = SyntheticRatings().split("random", test_fraction=0.2, seed=0)
    lengths = next(train.batches(4)).sparse_features["genres"].lengths()
    assert len(lengths.unique()) > 1
    assert int(lengths.max()) > 1


def test_a_tenth_of_the_movies_gets_a_third_of_the_ratings() -> None:
    counts = torch.bincount(SyntheticRatings().columns["movie"], minlength=1682).sort(descending=True).values
    assert int(counts[:168].sum()) > 33_000
    assert int(counts[-840:].sum()) < 40_000


def test_what_is_planted_tells_clicks_apart() -> None:
    data = SyntheticRatings(20_000)
    assert 0.78 < roc_auc_score(data.label.numpy(), data.planted.numpy()) < 0.88


def test_every_feature_carries_signal() -> None:
    data = SyntheticRatings()
    for name in ("user", "movie", "age", "occupation"):
        ids = data.columns[name]
        clicks = torch.zeros(data.features[name]).index_add_(0, ids, data.label)
        seen = torch.bincount(ids, minlength=data.features[name])
        rate = clicks / seen.clamp(min=1)
        expected_noise = (0.25 / seen.clamp(min=1)).sqrt()
        spread = (rate - data.label.mean()).abs()[seen > 100]
        assert float((spread / expected_noise[seen > 100]).mean()) > 1.5, name


def test_the_seed_decides() -> None:
    first, again, other = (SyntheticRatings(500, 40, 60, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first.columns["movie"], again.columns["movie"])
    assert torch.equal(first.label, again.label)
    assert not torch.equal(first.columns["movie"], other.columns["movie"])


def test_more_ratings_than_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match="at most half of all 100 pairs"):
        SyntheticRatings(51, num_users=10, num_movies=10)
