"""Preprocessed Criteo days as a source of samples: memory-mapped, in memory, or Parquet.

Shape letters: n samples, b of a batch, I = 13 dense features, F = 26 features.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recshard_lab.arguments import checks_arguments
from recshard_lab.data.batch import Batch, Samples, check_samples
from recshard_lab.data.criteo import DEFAULT_CAT_NAMES, INT_FEATURE_COUNT
from recshard_lab.data.criteo.folder import Day, Manifest, check_sizes, check_sums
from recshard_lab.data.source import SamplePart, SampleSource, one_id_each

_GROUPS_KEPT = 66  # of Parquet: two for each block of a window of a million samples
_ROWS_CHECKED = 1 << 18

Columns = tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.int32]]  # dense [b, I], ids [b, F], labels [b]


class _MappedDay:
    """A day in npy files."""

    def __init__(self, folder: Path, day: Day, in_memory: bool) -> None:
        kinds = (("dense", np.float32), ("sparse", np.int32), ("labels", np.int32))
        self.arrays = [_opened(folder / day.files[kind].name, day.rows, dtype, in_memory) for kind, dtype in kinds]

    def take(self, at: slice | NDArray[np.int64]) -> Columns:
        dense, ids, labels = (np.array(array[at]) for array in self.arrays)
        return dense, ids, labels[:, 0]


class _ParquetDay:
    """A day in Parquet: row groups are decoded when they are asked for, and kept for a while."""

    def __init__(self, folder: Path, day: Day, in_memory: bool) -> None:
        from recshard_lab.data.criteo.parquet import pyarrow_parquet, read_group

        try:
            file = pyarrow_parquet().ParquetFile(folder / day.files["parquet"].name)
        except (OSError, ArithmeticError) as error:
            raise ValueError(f"{folder / day.files['parquet'].name} is not a complete Parquet file: {error}") from error
        rows = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        if sum(rows) != day.rows:
            raise ValueError(f"{day.files['parquet'].name} has {sum(rows):,} rows, the manifest says {day.rows:,}")
        self.begins = np.cumsum([0, *rows])
        self.group = lru_cache(None if in_memory else _GROUPS_KEPT)(lambda group: read_group(file, group))

    def take(self, at: slice | NDArray[np.int64]) -> Columns:
        rows = np.arange(at.start, at.stop) if isinstance(at, slice) else at
        groups = np.searchsorted(self.begins, rows, side="right") - 1
        found: list[Any] = [np.empty((len(rows), *array.shape[1:]), array.dtype) for array in self.group(0)]
        for group in np.unique(groups):
            mine = groups == group
            for target, array in zip(found, self.group(int(group)), strict=True):
                target[mine] = array[rows[mine] - self.begins[group]]
        dense, ids, labels = found
        return dense, ids, labels


def _opened(path: Path, rows: int, dtype: type, in_memory: bool) -> NDArray[Any]:
    """An npy file, checked against the manifest."""
    try:
        array: NDArray[Any] = np.load(path, mmap_mode=None if in_memory else "r")
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"{path} is not a complete npy file: {error}") from error
    if array.ndim != 2 or len(array) != rows or array.dtype != dtype:
        raise ValueError(f"{path} holds {array.dtype} {list(array.shape)}, the manifest says {rows:,} rows of {dtype}")
    return array


class CriteoClicks:
    """A folder that ``recshard data criteo`` or `preprocess_criteo` filled; make it with `CriteoClicks.open`."""

    def __init__(self, folder: Path, manifest: Manifest, days: Sequence[int], in_memory: bool) -> None:
        self.folder, self.manifest = folder, manifest
        self.days = [manifest.days[number] for number in days]
        self.features = {column.name: column.num_embeddings for column in manifest.columns}
        rows = [day.rows for day in self.days]
        self.begins = np.cumsum([0, *rows])
        kind = _ParquetDay if manifest.settings["format"] == "parquet" else _MappedDay
        self.read = [kind(folder, day, in_memory) for day in self.days]
        self.source = f"Criteo clicks in {folder}, {len(self.days)} days, {len(self):,} samples"

    @staticmethod
    @checks_arguments
    def open(
        path: str | os.PathLike[str],
        days: Sequence[int] | None = None,
        *,
        in_memory: bool = False,
        check: str = "sizes",
    ) -> CriteoClicks:
        """Opens a folder; files are mapped into memory, so that any size opens at once.

        Args:
            path: the folder.
            days: which of its days, counted from 0; all when left out.
            in_memory: read the files whole instead; Parquet's row groups stay once they are decoded.
            check: "sizes" compares every file's length with the manifest; "sums" reads every file and compares its
                checksum, and looks at every id and label.

        Raises:
            FileNotFoundError: the folder does not exist, or has no manifest.
            ValueError: preprocessing did not finish, a file that is missing, cut off or damaged, days that do
                not exist.
        """
        folder = Path(path)
        manifest = Manifest.load(folder)
        if not manifest.complete:
            raise ValueError(f"{folder} is not finished: run `recshard data criteo` on it again with --resume")
        if check not in ("sizes", "sums"):
            raise ValueError(f"check must be 'sizes' or 'sums', got {check!r}")
        numbers = range(len(manifest.days)) if days is None else days
        for number in numbers:
            if not isinstance(number, int) or not 0 <= number < len(manifest.days):
                raise ValueError(f"days must be numbers from 0 to {len(manifest.days) - 1}, got {number!r}")
        entries = [entry for number in numbers for entry in manifest.days[number].files.values()]
        (check_sums if check == "sums" else check_sizes)(folder, entries)
        data = CriteoClicks(folder, manifest, numbers, in_memory)
        if check == "sums":
            data.check_numbers()
        return data

    def __len__(self) -> int:
        return int(self.begins[-1])

    def __repr__(self) -> str:
        return f"CriteoClicks({self.source})"

    @property
    def num_dense_features(self) -> int:
        """I = 13."""
        return INT_FEATURE_COUNT

    def stage(self, stage: str) -> SampleSource:
        """TorchRec's parts: "train" is all days but the last, "val" the first half of the last day, "test" the second.

        Raises:
            ValueError: another name, or a single day.
        """
        if stage not in ("train", "val", "test"):
            raise ValueError(f"stage must be 'train', 'val' or 'test', got {stage!r}")
        if len(self.days) < 2:
            raise ValueError(f"{self.folder} has one day: stages need two; take a SamplePart of it")
        last = int(self.begins[-2])
        half = last + -(-self.days[-1].rows // 2)
        begin, end = {"train": (0, last), "val": (last, half), "test": (half, len(self))}[stage]
        return SamplePart(self, begin, end)

    def batch(self, samples: Samples) -> Batch:
        """These samples, in this order."""
        check_samples(samples, len(self))
        dense, ids, labels = self._columns(samples)
        return one_id_each(dense, ids, labels, DEFAULT_CAT_NAMES)

    def _columns(self, samples: Samples) -> Columns:
        if isinstance(samples, range) and not samples:
            samples = np.empty(0, np.int64)
        if isinstance(samples, range):
            days = range(*(int(at) for at in np.searchsorted(self.begins, (samples.start, samples.stop), side="right")))
            first = max(0, days.start - 1)
            pieces: list[Columns] = []
            for number in range(first, min(days.stop, len(self.days))):
                begin = int(self.begins[number])
                own = slice(max(0, samples.start - begin), min(samples.stop - begin, self.days[number].rows))
                if own.start < own.stop:
                    pieces.append(self.read[number].take(own))
            dense, ids, labels = (np.concatenate(own) if len(own) > 1 else own[0] for own in zip(*pieces, strict=True))
            return dense, ids, labels
        of_day = np.searchsorted(self.begins, samples, side="right") - 1
        if not len(samples) or of_day.min() == of_day.max():
            number = int(of_day[0]) if len(samples) else 0
            return self.read[number].take(samples - self.begins[number])
        mixed: list[Any] = [
            np.empty((len(samples), *own.shape[1:]), own.dtype) for own in self.read[0].take(slice(0, 1))
        ]
        for number in np.unique(of_day):
            mine = of_day == number
            for target, own in zip(mixed, self.read[number].take(samples[mine] - self.begins[number]), strict=True):
                target[mine] = own
        return mixed[0], mixed[1], mixed[2]

    def check_numbers(self) -> None:
        """Looks at every id and label.

        Raises:
            ValueError: an id outside its table or a label outside {0, 1}, by day, sample and feature.
        """
        rows = np.array(list(self.features.values()))
        for begin in range(0, len(self), _ROWS_CHECKED):
            _, ids, labels = self._columns(range(begin, min(begin + _ROWS_CHECKED, len(self))))
            wrong = np.argwhere((ids < 0) | (ids >= rows))
            if len(wrong):
                sample, feature = map(int, wrong[0])
                raise ValueError(
                    f"{self.folder}, sample {begin + sample:,}: {DEFAULT_CAT_NAMES[feature]} is "
                    f"{ids[sample, feature]}, its table has {rows[feature]:,} rows"
                )
            odd = np.flatnonzero((labels != 0) & (labels != 1))
            if len(odd):
                raise ValueError(f"{self.folder}, sample {begin + odd[0]:,}: the label is {labels[odd[0]]}, not 0 or 1")
