"""The Criteo click logs as npy files: conversion, and batches of one rank.

Shape letters: n rows of a file, 13 counts, 26 categories, B rows of a rank's batch, W ranks.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from recshard_lab.compat.datasets.pipes import PATH_MANAGER_KEY, LoadFiles, ReadLinesFromCSV
from recshard_lab.data import Batch
from recshard_lab.data.criteo import CAT_FEATURE_COUNT, DAYS, DEFAULT_CAT_NAMES, INT_FEATURE_COUNT
from recshard_lab.sparse import KeyedJaggedTensor

_PARTS = ("dense", "sparse", "labels")
_TEST_COLUMNS = INT_FEATURE_COUNT + CAT_FEATURE_COUNT  # of a file without labels


def _written(path: str, array: np.ndarray) -> None:
    with open(path, "wb") as file:  # np.save would append .npy to the name
        np.save(file, array)


class BinaryCriteoUtils:
    """Converts Criteo files to npy arrays, and splits arrays over ranks. Paths are local files."""

    @staticmethod
    def tsv_to_npys(
        in_file: str,
        out_dense_file: str,
        out_sparse_file: str,
        out_labels_file: str,
        dataset_name: str = "criteo_1tb",
        path_manager_key: str = PATH_MANAGER_KEY,
    ) -> None:
        """Converts a text file to three arrays.

        Counts become ``log(count - m + 2)``, where m is the lowest count of the file: fp32 ``[n, 13]``. Categories are
        int64 ``[n, 26]``, 0 if empty. Labels are int32 ``[n, 1]``, -1 in a Kaggle test file, which has none.

        Args:
            in_file: the text file, columns separated by tabs.
            out_dense_file, out_sparse_file, out_labels_file: the files to write.
            dataset_name: "criteo_1tb", or "criteo_kaggle", whose test file has no labels.
            path_manager_key: accepted as in TorchRec.

        Raises:
            ValueError: a label or a count is not an integer, or a category is not a hexadecimal number.
        """
        dense, sparse, labels = [], [], []
        for columns in ReadLinesFromCSV(LoadFiles([in_file], mode="r"), delimiter="\t"):
            test = dataset_name == "criteo_kaggle" and len(columns) == _TEST_COLUMNS
            label, features = ("-1", columns) if test else (columns[0], columns[1:])
            labels.append(int(label))
            dense.append([int(text or 0) for text in features[:INT_FEATURE_COUNT]])
            sparse.append([int(text or "0", 16) for text in features[INT_FEATURE_COUNT:]])
        counts = np.array(dense, dtype=np.float32).reshape(len(dense), INT_FEATURE_COUNT)
        if len(counts):
            counts = np.log(counts - counts.min() + np.float32(2))
        _written(out_dense_file, counts)
        _written(out_sparse_file, np.array(sparse, dtype=np.int64).reshape(len(sparse), CAT_FEATURE_COUNT))
        _written(out_labels_file, np.array(labels, dtype=np.int32).reshape(-1, 1))

    @staticmethod
    def get_shape_from_npy(path: str, path_manager_key: str = PATH_MANAGER_KEY) -> tuple[int, ...]:
        """The shape of the array in a file, from its header."""
        shape: tuple[int, ...] = np.load(path, mmap_mode="r").shape
        return shape

    @staticmethod
    def get_file_row_ranges_and_remainder(
        lengths: Sequence[int], rank: int, world_size: int, start_row: int = 0, last_row: int | None = None
    ) -> tuple[dict[int, tuple[int, int]], int]:
        """The rows of a rank, which are consecutive. If shares cannot be equal, the first ranks have one row more.

        Args:
            lengths: rows of each file.
            rank, world_size: the rank, and W.
            start_row, last_row: the first and the last row that count. Default: all rows.

        Returns:
            Number of a file -> its first and last row for this rank; and the rows modulo W.
        """
        starts = np.cumsum([0, *lengths])
        last = int(starts[-1]) - 1 if last_row is None else last_row
        share, remainder = divmod(last - start_row + 1, world_size)
        first = start_row + rank * share + min(rank, remainder)
        end = first + share + (rank < remainder)
        ranges = {}
        for number, (begin, after) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
            if max(first, begin) < min(end, after):
                ranges[number] = (max(first, begin) - begin, min(end, after) - 1 - begin)
        return ranges, remainder

    @staticmethod
    def load_npy_range(
        fname: str, start_row: int, num_rows: int, path_manager_key: str = PATH_MANAGER_KEY, mmap_mode: bool = False
    ) -> np.ndarray:
        """Some rows of an array of two dimensions.

        Args:
            fname: the npy file.
            start_row, num_rows: the rows.
            path_manager_key: accepted as in TorchRec.
            mmap_mode: whether to map the file instead of reading it.

        Raises:
            ValueError: rows that the file lacks, or an array of other dimensions.
        """
        rows = np.load(fname, mmap_mode="r")
        if rows.ndim != 2:
            raise ValueError(f"{fname} has shape {rows.shape}, and only arrays [n, columns] have row ranges")
        if not 0 <= start_row < len(rows):
            raise ValueError(f"start_row {start_row} is not a row of {fname}. Fix: use 0 to {len(rows) - 1}")
        if start_row + num_rows > len(rows):
            raise ValueError(
                f"{fname} has {len(rows) - start_row} rows from row {start_row} on, fewer than num_rows={num_rows}"
            )
        selected: np.ndarray = rows[start_row : start_row + num_rows]
        return selected if mmap_mode else np.array(selected)

    @staticmethod
    def sparse_to_contiguous(
        in_files: Sequence[str],
        output_dir: str,
        frequency_threshold: int = 3,
        columns: int = CAT_FEATURE_COUNT,
        path_manager_key: str = PATH_MANAGER_KEY,
        output_file_suffix: str = "_contig_freq.npy",
    ) -> None:
        """Numbers the categories of each column from 2 in the order of their first occurrence, over all files.

        Categories that occur less than `frequency_threshold` times become 1. Numbers are int32, in
        ``{output_dir}/{name of the input}{output_file_suffix}``.

        Args:
            in_files: npy files of integers ``[n, columns]``.
            output_dir: the folder of the results.
            frequency_threshold: the lowest number of occurrences of a category with a separate number.
            columns: how many columns the files have.
            path_manager_key: accepted as in TorchRec.
            output_file_suffix: the end of the names of the results.
        """
        arrays = [np.load(path) for path in in_files]
        every = np.concatenate(arrays)[:, :columns]
        numbered = np.empty(every.shape, dtype=np.int32)
        for column in range(columns):
            _, first, places, counts = np.unique(
                every[:, column], return_index=True, return_inverse=True, return_counts=True
            )
            frequent = counts >= frequency_threshold
            order = np.argsort(first[frequent], kind="stable")
            numbers = np.ones(len(counts), dtype=np.int32)
            numbers[np.flatnonzero(frequent)[order]] = np.arange(2, 2 + len(order))
            numbered[:, column] = numbers[places.reshape(-1)]
        ends = np.cumsum([len(array) for array in arrays])[:-1]
        for path, part in zip(in_files, np.split(numbered, ends), strict=True):
            name = os.path.basename(path).removesuffix(".npy")
            _written(os.path.join(output_dir, name + output_file_suffix), part)

    @staticmethod
    def shuffle(
        input_dir_labels_and_dense: str,
        input_dir_sparse: str,
        output_dir_shuffled: str,
        rows_per_day: Mapping[int, int],
        output_dir_full_set: str | None = None,
        days: int = DAYS,
        int_columns: int = INT_FEATURE_COUNT,
        sparse_columns: int = CAT_FEATURE_COUNT,
        path_manager_key: str = PATH_MANAGER_KEY,
        random_seed: int = 0,
    ) -> None:
        """Shuffles the rows of all days but the last, which is copied: it is for validation and test.

        Args:
            input_dir_labels_and_dense, input_dir_sparse: folders with ``day_{day}_{dense|sparse|labels}.npy``.
            output_dir_shuffled: the folder of the results, of the same names: fp32, int32, int32.
            rows_per_day: day -> its rows. The last day does not count.
            output_dir_full_set: a folder for ``full.npy``, all columns of the days in order, before the shuffle.
            days: the number of days, the last included.
            int_columns, sparse_columns: columns of dense and sparse files.
            path_manager_key: accepted as in TorchRec.
            random_seed: determines the order.

        Raises:
            ValueError: a file whose rows are not `rows_per_day`, or with other columns.
        """
        folders = {
            "dense": input_dir_labels_and_dense,
            "sparse": input_dir_sparse,
            "labels": input_dir_labels_and_dense,
        }
        kinds = {"dense": np.float32, "sparse": np.int32, "labels": np.int32}
        widths = {"dense": int_columns, "sparse": sparse_columns, "labels": 1}
        rows = [rows_per_day[day] for day in range(days - 1)]
        whole = {}
        for part in _PARTS:
            loaded = [np.load(os.path.join(folders[part], f"day_{day}_{part}.npy")) for day in range(days - 1)]
            for day, (array, count) in enumerate(zip(loaded, rows, strict=True)):
                if array.shape != (count, widths[part]):
                    raise ValueError(
                        f"day_{day}_{part}.npy has shape {array.shape}, expected {(count, widths[part])}. "
                        f"Fix: correct rows_per_day or the numbers of columns"
                    )
            whole[part] = np.concatenate(loaded).astype(kinds[part])
        if output_dir_full_set is not None:
            every = np.concatenate([whole[part].astype(np.float32) for part in _PARTS], axis=1)
            _written(os.path.join(output_dir_full_set, "full.npy"), every)
        order = np.random.RandomState(random_seed).permutation(sum(rows))
        for part in _PARTS:
            for day, array in enumerate(np.split(whole[part][order], np.cumsum(rows)[:-1])):
                _written(os.path.join(output_dir_shuffled, f"day_{day}_{part}.npy"), array)
            last = f"day_{days - 1}_{part}.npy"
            shutil.copyfile(os.path.join(folders[part], last), os.path.join(output_dir_shuffled, last))


class InMemoryBinaryCriteoIterDataPipe(IterableDataset[Batch]):
    """Yields the batches of one rank from npy files, as `recshard_lab.data.Batch`.

    Step i has rows ``i * B * W`` to ``(i + 1) * B * W`` of all files, of which rank r takes the r-th B rows. All ranks
    have the same number of batches: remaining rows become one more batch if each rank gets one, otherwise they are
    added to the last batches.

    Args:
        stage: "train", "val" or "test". "val" ends, and "test" begins, in the middle of the rows of the first file;
            a middle row belongs to "val". Further files count whole.
        dense_paths, sparse_paths, labels_paths: npy files: fp32 ``[n, 13]``, integers ``[n, 26]``, integers ``[n, 1]``.
        batch_size: B.
        rank, world_size: the rank, and W.
        drop_last: whether remaining rows are dropped.
        shuffle_batches: whether the rows of each batch are in random order, which changes with each pass.
        shuffle_training_set: whether the rows of "train" are in random order; a rank then takes consecutive rows.
        shuffle_training_set_random_seed: determines both orders.
        mmap_mode: whether to map the files. Default: each rank reads its rows into memory.
        hashes: categories of each feature: ids are taken modulo these. Default: ids as in the files.
        path_manager_key: accepted as in TorchRec; paths are local files.

    Raises:
        ValueError: another stage, or numbers of files that differ.
    """

    def __init__(
        self,
        stage: str,
        dense_paths: Sequence[str],
        sparse_paths: Sequence[str],
        labels_paths: Sequence[str],
        batch_size: int,
        rank: int,
        world_size: int,
        drop_last: bool | None = False,
        shuffle_batches: bool = False,
        shuffle_training_set: bool = False,
        shuffle_training_set_random_seed: int = 0,
        mmap_mode: bool = False,
        hashes: Sequence[int] | None = None,
        path_manager_key: str = PATH_MANAGER_KEY,
    ) -> None:
        if stage not in ("train", "val", "test"):
            raise ValueError(f"stage {stage!r} does not exist. Fix: use 'train', 'val' or 'test'")
        self.stage, self.batch_size, self.rank, self.world_size = stage, batch_size, rank, world_size
        self.shuffle_batches, self.keys = shuffle_batches, list(DEFAULT_CAT_NAMES)
        self.hashes = None if hashes is None else np.array(hashes).reshape(1, CAT_FEATURE_COUNT)
        self._random = np.random.RandomState(shuffle_training_set_random_seed)
        paths = dict(zip(_PARTS, (dense_paths, sparse_paths, labels_paths), strict=True))
        if len({len(files) for files in paths.values()}) != 1:
            raise ValueError(
                f"files of dense, sparse and labels: {[len(files) for files in paths.values()]}, not equal"
            )
        files = {part: [np.load(path, mmap_mode="r") for path in names] for part, names in paths.items()}
        self._starts = np.cumsum([0, *(len(array) for array in files["labels"])])
        shuffled = shuffle_training_set and stage == "train"
        self._rows = self._rows_of_rank(bool(drop_last), shuffled)
        self._files = files if mmap_mode else None
        self._loaded = {} if mmap_mode else {part: self._read(files[part], self._rows) for part in _PARTS}

    def _rows_of_rank(self, drop_last: bool, shuffled: bool) -> np.ndarray:
        """The rows of all batches of this rank, ``[rows]``. Sets the ends of the batches."""
        first, end = 0, int(self._starts[-1])
        half = -(-int(self._starts[1]) // 2)
        if self.stage == "val":
            end -= int(self._starts[1]) - half
        elif self.stage == "test":
            first = half
        every = np.arange(first, end)
        if self.stage == "val":
            every[half:] += int(self._starts[1]) - half
        share, more = divmod(len(every), self.world_size)
        rank, size = self.rank, self.batch_size
        steps = share // size if drop_last else -(-share // size)
        before = rank * share + min(rank, more)
        if shuffled:
            every = np.argsort(self._random.permutation(len(every)), kind="stable")
            own = every[before : before + share + (rank < more)]
        else:
            whole = steps if drop_last else max(steps - 1, 0)
            starts = np.arange(whole) * size * self.world_size + rank * size
            last = before + (self.world_size - rank) * whole * size if steps > whole else 0
            count = share + (rank < more) - whole * size if steps > whole else 0
            places = [np.arange(start, start + size) for start in starts] + [np.arange(last, last + count)]
            own = every[np.concatenate(places)]
        own = own[: steps * size] if drop_last else own[: len(own) if steps else 0]
        self._ends = [(step + 1) * size for step in range(steps)]
        if steps and not drop_last:
            self._ends[-1] = len(own)
        return own

    def _read(self, files: Sequence[np.ndarray], rows: np.ndarray) -> np.ndarray:
        """Rows of all files, ``[len(rows), columns]``."""
        numbers = np.searchsorted(self._starts, rows, side="right") - 1
        found = np.empty((len(rows), files[0].shape[1]), dtype=files[0].dtype)
        for number, array in enumerate(files):
            here = numbers == number
            found[here] = array[rows[here] - self._starts[number]]
        return found

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[Batch]:
        start = 0
        for end in self._ends:
            parts = [
                self._loaded[part][start:end]
                if self._files is None
                else self._read(self._files[part], self._rows[start:end])
                for part in _PARTS
            ]
            yield self._batch(*parts)
            start = end

    def _batch(self, dense: np.ndarray, sparse: np.ndarray, labels: np.ndarray) -> Batch:
        if self.shuffle_batches:
            order = self._random.permutation(len(dense))
            dense, sparse, labels = dense[order], sparse[order], labels[order]
        if self.hashes is not None:
            sparse = (sparse % self.hashes).astype(sparse.dtype)
        size, ids = len(dense), len(dense) * CAT_FEATURE_COUNT
        values: Any = torch.from_numpy(np.ascontiguousarray(sparse.T).reshape(-1))
        return Batch(
            dense_features=torch.from_numpy(np.array(dense)),
            sparse_features=KeyedJaggedTensor(
                keys=self.keys,
                values=values,
                lengths=torch.ones(ids, dtype=torch.int32),
                offsets=torch.arange(ids + 1, dtype=torch.int32),
                stride=size,
                length_per_key=[size] * CAT_FEATURE_COUNT,
                offset_per_key=[size * number for number in range(CAT_FEATURE_COUNT + 1)],
            ),
            labels=torch.from_numpy(np.array(labels).reshape(-1)),
        )
