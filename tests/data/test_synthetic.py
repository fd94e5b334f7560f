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


def test_what_is_planted_tells_clicks_apart() -> None:
    data = SyntheticRatings(20_000)
    assert 0.78 < roc_auc_score(data.label.numpy(), data.planted.numpy()) < 0.88


def test_more_ratings_than_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match="at most half of all 100 pairs"):
        SyntheticRatings(51, num_users=10, num_movies=10)
