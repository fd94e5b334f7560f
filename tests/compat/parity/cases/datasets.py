"""Readers of Criteo and MovieLens files, pipes of lines, and splits. Files are written by the cases."""

import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchrec.datasets.criteo import (
    BinaryCriteoUtils,
    InMemoryBinaryCriteoIterDataPipe,
)
from torchrec.datasets.movielens import movielens_20m, movielens_25m
from torchrec.datasets.random import RandomRecDataset
from torchrec.datasets.utils import (
    PATH_MANAGER_KEY,
    Batch,
)

from tests.compat.parity.case import case

CRITEO = "torchrec.datasets.criteo"
MOVIES = "torchrec.datasets.movielens"
UTILS = "torchrec.datasets.utils"
RANDOM = "torchrec.datasets.random.RandomRecDataset"
FOLDER = Path(tempfile.mkdtemp())


def written(name: str, text: str) -> str:
    path = FOLDER / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return str(path)


def ratings(folder: str, movies: str = '10,"A, The",Drama|War\n11,B,\n') -> str:
    written(f"{folder}/movies.csv", "movieId,title,genres\n" + movies)
    return str(
        Path(written(f"{folder}/ratings.csv", "userId,movieId,rating,timestamp\n1,10,3.5,100\n2,11,4,x\n")).parent
    )


def arrays(name: str, rows: list[int], sparse: Any = np.int32) -> list[list[str]]:
    """npy files whose first column is the number of the row, plus 100 for each file before."""
    paths: list[list[str]] = [[], [], []]
    for number, count in enumerate(rows):
        base = np.arange(count)[:, None] + 100 * number
        parts = (
            (base + np.zeros((1, 13))).astype(np.float32),
            (base + np.arange(26)).astype(sparse),
            (base % 2).astype(np.int32),
        )
        for part, array in enumerate(parts):
            path = FOLDER / f"{name}_{number}_{part}.npy"
            np.save(path, array)
            paths[part].append(str(path))
    return paths


def rows_of(rows: list[int], stage: str, size: int, world: int, **settings: Any) -> Any:
    """The rows of every batch of every rank."""
    paths = arrays(f"rows{rows}", rows)
    found = []
    for rank in range(world):
        pipe = InMemoryBinaryCriteoIterDataPipe(stage, *paths, size, rank, world, **settings)
        batches = [batch.dense_features[:, 0].int().tolist() for batch in pipe]
        assert len(batches) == len(pipe)
        found.append(batches)
    return found


@case(f"{CRITEO}.BinaryCriteoUtils")
def row_ranges_of_ranks() -> Any:
    found = []
    for lengths, world, more in (
        ([5, 3, 7], 4, {}),
        ([10], 3, {}),
        ([5, 3, 7], 2, {"start_row": 2, "last_row": 10}),
        ([5, 5], 4, {"start_row": 3}),
    ):
        for rank in range(world):
            ranges, remainder = BinaryCriteoUtils.get_file_row_ranges_and_remainder(lengths, rank, world, **more)
            found.append(({file: [int(row) for row in rows] for file, rows in ranges.items()}, int(remainder)))
    return found


@case(f"{CRITEO}.BinaryCriteoUtils")
def categories_become_contiguous() -> Any:
    folder = FOLDER / "contiguous"
    folder.mkdir(exist_ok=True)
    paths = [str(folder / f"day_{day}_sparse.npy") for day in range(2)]
    np.save(paths[0], np.array([[5, 9], [6, 9], [6, 8]], dtype=np.int32))
    np.save(paths[1], np.array([[5, 8], [9, 9], [9, 7]], dtype=np.int32))
    found = {}
    for threshold in (0, 2, 3):
        BinaryCriteoUtils.sparse_to_contiguous(paths, str(folder), threshold, 2, output_file_suffix=f"_{threshold}.npy")
        results = [np.load(folder / f"day_{day}_sparse_{threshold}.npy") for day in range(2)]
        found[threshold] = [(str(array.dtype), array.tolist()) for array in results]
    return found


@case(f"{CRITEO}.InMemoryBinaryCriteoIterDataPipe", f"{UTILS}.Batch")
def a_batch_from_arrays() -> Any:
    pipe = InMemoryBinaryCriteoIterDataPipe("train", *arrays("batch", [3, 2]), 2, 0, 1)
    batch = next(iter(pipe))
    assert isinstance(batch, Batch)
    kjt = batch.sparse_features
    return {
        "dense": batch.dense_features[:, :2],
        "labels": batch.labels,
        "keys": kjt.keys()[:2],
        "values": kjt.values()[:6],
        "lengths": kjt.lengths()[:3],
        "offsets": kjt.offsets()[:3],
        "stride": kjt.stride(),
        "length_per_key": kjt.length_per_key()[:3],
        "last": kjt["cat_25"].values(),
    }


@case(f"{CRITEO}.InMemoryBinaryCriteoIterDataPipe")
def rows_of_training() -> Any:
    return [
        rows_of([7, 5], "train", 3, 2),
        rows_of([13], "train", 3, 2),
        rows_of([13], "train", 3, 2, drop_last=True),
        rows_of([15], "train", 2, 3),
        rows_of([5], "train", 4, 4),
        rows_of([1], "train", 3, 2),
    ]


@case(f"{CRITEO}.InMemoryBinaryCriteoIterDataPipe")
def rows_of_validation_and_test() -> Any:
    return [
        rows_of([7, 5], "val", 3, 2),
        rows_of([7, 5], "test", 3, 2),
        rows_of([20], "test", 3, 3),
        rows_of([20], "val", 4, 2, drop_last=True),
        rows_of([5, 7, 4], "test", 3, 1),
        rows_of([1], "val", 1, 1),
        rows_of([1], "test", 1, 1),
    ]


@case(f"{CRITEO}.InMemoryBinaryCriteoIterDataPipe")
def rows_of_a_shuffled_training_set() -> Any:
    return [
        rows_of([14, 9], "train", 2, 2, shuffle_training_set=True),
        rows_of([14], "train", 2, 2, shuffle_training_set=True, shuffle_training_set_random_seed=3),
        rows_of([9], "train", 2, 2, shuffle_training_set=True, drop_last=True),
        rows_of([9], "val", 2, 2, shuffle_training_set=True),
    ]


@case(
    f"{CRITEO}.InMemoryBinaryCriteoIterDataPipe",
    differs="TorchRec gives rank 0 a batch more than the others, on which training waits forever",
)
def a_shuffled_set_that_ranks_cannot_share_equally() -> Any:
    return [len(batches) for batches in rows_of([13], "train", 2, 3, shuffle_training_set=True)]


@case(f"{CRITEO}.InMemoryBinaryCriteoIterDataPipe")
def rows_of_shuffled_batches() -> Any:
    pipe = InMemoryBinaryCriteoIterDataPipe("train", *arrays("shuffle", [12]), 4, 0, 1, shuffle_batches=True)
    return [[batch.labels for batch in pipe] for _ in range(2)]


@case(f"{CRITEO}.InMemoryBinaryCriteoIterDataPipe")
def hashed_and_mapped_files() -> Any:
    found = {}
    for name, more in (("hashed", {"hashes": list(range(3, 29))}), ("mapped", {"mmap_mode": True})):
        for kind in (np.int32, np.int64):
            pipe = InMemoryBinaryCriteoIterDataPipe(
                "train", *arrays(f"{name}{kind.__name__}", [2, 2], kind), 3, 0, 1, **more
            )
            found[f"{name} {kind.__name__}"] = [batch.sparse_features.values()[:9] for batch in pipe]
    return found


@case(f"{MOVIES}.movielens_20m", f"{MOVIES}.movielens_25m")
def ratings_line_by_line() -> Any:
    folder = ratings("ratings")
    return list(movielens_20m(folder)), list(movielens_25m(folder, row_mapper=None))


@case(RANDOM)
def shapes_of_random_batches() -> Any:
    data = RandomRecDataset(
        keys=["a", "b"], batch_size=4, hash_sizes=[10, 20], ids_per_features=[2, 1], num_dense=3, num_batches=2
    )
    batches = list(data)
    return [
        len(batches),
        [list(batch.dense_features.shape) for batch in batches],
        [len(batch.sparse_features.lengths()) for batch in batches],
        [list(batch.labels.shape) for batch in batches],
        [bool(batch.sparse_features["a"].values().max() < 10) for batch in batches],
    ]


def numbers(count: int, **settings: Any) -> Any:
    """Every tensor of the first batches."""
    batches = islice(RandomRecDataset(keys=["a", "b"], batch_size=3, num_dense=2, **settings), count)
    return [[batch.dense_features, batch.sparse_features, batch.labels] for batch in batches]


@case(RANDOM)
def random_batches_of_a_seed() -> Any:
    several = {"hash_sizes": [10, 200_000], "ids_per_features": [4, 2]}
    return {
        "defaults": numbers(2, manual_seed=3),
        "one number": numbers(1, manual_seed=3, hash_size=50, ids_per_feature=3),
        "both bounds": numbers(1, manual_seed=3, ids_per_feature=5, min_ids_per_feature=2),
        "most alone": numbers(1, manual_seed=3, **several),
        "least alone": numbers(1, manual_seed=3, min_ids_per_feature=1),
        "lists": numbers(1, manual_seed=3, **several, min_ids_per_features=[1, 2]),
        "repeated": numbers(5, manual_seed=3, num_generated_batches=2),
        "drawn anew": numbers(3, manual_seed=3, num_generated_batches=-1),
    }


@case(RANDOM)
def random_batches_without_a_seed() -> Any:
    """They are drawn in advance from torch's global generator, whose next number follows them."""
    torch.manual_seed(5)
    return numbers(2), torch.rand(2)


@case(f"{UTILS}.Batch", RANDOM)
def fields_of_a_batch_are_assigned() -> Any:
    (batch,) = RandomRecDataset(keys=["a"], batch_size=3, num_dense=2, manual_seed=1, num_batches=1)
    batch.labels = 1 - batch.labels
    batch.dense_features = batch.dense_features.abs().log1p()
    moved = batch.to(torch.device("cpu"))
    return batch.labels, moved.labels, moved.dense_features, moved.sparse_features


@case(f"{UTILS}.PATH_MANAGER_KEY")
def the_key_of_a_path_manager() -> Any:
    return PATH_MANAGER_KEY
