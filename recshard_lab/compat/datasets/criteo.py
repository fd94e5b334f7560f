"""``torchrec.datasets.criteo``: the text files of the Criteo click logs, line by line.

`criteo_arrays` converts them to npy files and reads those in batches. `recshard_lab.data.preprocess_criteo` does the
same for whole days with less memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from torch.utils.data import IterDataPipe, get_worker_info

from recshard_lab.compat.datasets.criteo_arrays import BinaryCriteoUtils as BinaryCriteoUtils
from recshard_lab.compat.datasets.criteo_arrays import (
    InMemoryBinaryCriteoIterDataPipe as InMemoryBinaryCriteoIterDataPipe,
)
from recshard_lab.compat.datasets.pipes import LoadFiles, Mapper, ReadLinesFromCSV, RowMapper, safe_cast
from recshard_lab.data.criteo import CAT_FEATURE_COUNT, DEFAULT_COLUMN_NAMES, INT_FEATURE_COUNT

FREQUENCY_THRESHOLD = 3
"""Categories that occur less often share one number in `BinaryCriteoUtils.sparse_to_contiguous`."""

TOTAL_TRAINING_SAMPLES = 4195197692
"""Lines of the first 23 days of the click logs of 1 TB."""


_INTEGER, _TEXT = partial(safe_cast, dest_type=int, default=0), partial(safe_cast, dest_type=str, default="")
COLUMN_TYPE_CASTERS: list[Callable[[str], Any]] = [
    *[_INTEGER] * (1 + INT_FEATURE_COUNT),
    *[_TEXT] * CAT_FEATURE_COUNT,
]
"""Text -> value for each of `DEFAULT_COLUMN_NAMES`. An empty count becomes 0."""


def _named(columns: list[str]) -> dict[str, Any]:
    """Column name -> value, from the last column on: the Kaggle test file has no label."""
    return {
        name: cast(text)
        for name, cast, text in zip(
            reversed(DEFAULT_COLUMN_NAMES), reversed(COLUMN_TYPE_CASTERS), reversed(columns), strict=False
        )
    }


class CriteoIterDataPipe(IterDataPipe[Any]):
    """Yields the lines of text files of the Criteo click logs. Workers of a `DataLoader` share the files.

    Args:
        paths: local files with columns separated by tabs: label (unless it is a test file), counts, categories.
        row_mapper: called with the columns of a line, list of str. Default: a dict of named values. None: no call.
        open_kw: arguments of `open`.
    """

    def __init__(self, paths: Iterable[str], *, row_mapper: RowMapper = _named, **open_kw: Any) -> None:
        self.paths, self.row_mapper, self.open_kw = list(paths), row_mapper, open_kw

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        paths = self.paths if worker is None else self.paths[worker.id :: worker.num_workers]
        lines: IterDataPipe[Any] = ReadLinesFromCSV(LoadFiles(paths, mode="r", **self.open_kw), delimiter="\t")
        yield from Mapper(lines, self.row_mapper) if self.row_mapper else lines


def criteo_terabyte(paths: Iterable[str], *, row_mapper: RowMapper = _named, **open_kw: Any) -> IterDataPipe[Any]:
    """The lines of the click logs of 1 TB. Arguments are those of `CriteoIterDataPipe`."""
    return CriteoIterDataPipe(paths, row_mapper=row_mapper, **open_kw)


def criteo_kaggle(path: str, *, row_mapper: RowMapper = _named, **open_kw: Any) -> IterDataPipe[Any]:
    """The lines of ``train.txt`` or ``test.txt`` of the Kaggle challenge.

    Args:
        path: the file.
        row_mapper, open_kw: as of `CriteoIterDataPipe`.
    """
    return CriteoIterDataPipe((path,), row_mapper=row_mapper, **open_kw)
