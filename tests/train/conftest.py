"""Real ratings, where there are some."""

import os

import pytest

from recshard_lab.data import MovieLens, RatingsDataset


@pytest.fixture(scope="session")
def movielens_100k() -> RatingsDataset:
    """MovieLens 100K from the path in RECSHARD_MOVIELENS; skips without it."""
    if not os.environ.get("RECSHARD_MOVIELENS"):
        pytest.skip("RECSHARD_MOVIELENS is not set to the MovieLens 100K files (folder, zip or wheel)")
    return MovieLens.load(variant="100k")
