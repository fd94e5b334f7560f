"""Samples to train on: ratings and clicks, as published, out of a generator or a formula, and batches by rank."""

from recshard_lab.data.batch import Batch as Batch
from recshard_lab.data.churn import ChurningClicks as ChurningClicks
from recshard_lab.data.click_files import CriteoClicks as CriteoClicks
from recshard_lab.data.clicks import SyntheticClicks as SyntheticClicks
from recshard_lab.data.clicks import scaled_rows as scaled_rows
from recshard_lab.data.criteo.preprocess import preprocess_criteo as preprocess_criteo
from recshard_lab.data.frequency import FrequencyOrder as FrequencyOrder
from recshard_lab.data.loader import BatchLoader as BatchLoader
from recshard_lab.data.movielens import MovieLens as MovieLens
from recshard_lab.data.movielens import MovieLensNotFoundError as MovieLensNotFoundError
from recshard_lab.data.movielens import load_ratings as load_ratings
from recshard_lab.data.multi_hot import MultiHot as MultiHot
from recshard_lab.data.random_batches import RandomRecDataset as RandomRecDataset
from recshard_lab.data.ratings import RatingsDataset as RatingsDataset
from recshard_lab.data.ratings import rank_slice as rank_slice
from recshard_lab.data.registry import Splits as Splits
from recshard_lab.data.registry import build_dataset as build_dataset
from recshard_lab.data.registry import dataset_names as dataset_names
from recshard_lab.data.registry import register_dataset as register_dataset
from recshard_lab.data.sequences import SequenceDataset as SequenceDataset
from recshard_lab.data.source import SamplePart as SamplePart
from recshard_lab.data.source import SampleSource as SampleSource
from recshard_lab.data.synthetic import SyntheticRatings as SyntheticRatings

__all__ = [
    "Batch",
    "BatchLoader",
    "ChurningClicks",
    "CriteoClicks",
    "FrequencyOrder",
    "MovieLens",
    "MovieLensNotFoundError",
    "MultiHot",
    "RandomRecDataset",
    "RatingsDataset",
    "SamplePart",
    "SampleSource",
    "SequenceDataset",
    "Splits",
    "SyntheticClicks",
    "SyntheticRatings",
    "build_dataset",
    "dataset_names",
    "load_ratings",
    "preprocess_criteo",
    "rank_slice",
    "register_dataset",
    "scaled_rows",
]
