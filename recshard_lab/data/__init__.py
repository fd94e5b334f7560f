"""Ratings to train on: MovieLens as published, a generator where there is none, and batches by rank."""

from recshard_lab.data.movielens import MovieLens as MovieLens
from recshard_lab.data.movielens import MovieLensNotFoundError as MovieLensNotFoundError
from recshard_lab.data.movielens import load_ratings as load_ratings
from recshard_lab.data.random_batches import RandomRecDataset as RandomRecDataset
from recshard_lab.data.ratings import Batch as Batch
from recshard_lab.data.ratings import RatingsDataset as RatingsDataset
from recshard_lab.data.ratings import rank_slice as rank_slice
from recshard_lab.data.synthetic import SyntheticRatings as SyntheticRatings

__all__ = [
    "Batch",
    "MovieLens",
    "MovieLensNotFoundError",
    "RandomRecDataset",
    "RatingsDataset",
    "SyntheticRatings",
    "load_ratings",
    "rank_slice",
]
