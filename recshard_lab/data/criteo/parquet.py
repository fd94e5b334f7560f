"""Days as Parquet: one row per sample, with TorchRec's names of Criteo's columns; written and read by pyarrow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recshard_lab.data.criteo import DEFAULT_CAT_NAMES, DEFAULT_INT_NAMES, DEFAULT_LABEL_NAME
from recshard_lab.data.criteo.folder import Day, FileEntry, FileWriter

GROUP_ROWS = 1 << 15


def pyarrow_parquet() -> Any:
    """The library.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ValueError(f"Parquet needs pyarrow ({error}): pip install 'recshard-lab[data]'") from error
    return parquet


class _Counted:
    """A file object for pyarrow, whose bytes go to the writer that counts, checks and renames."""

    closed = False

    def __init__(self, writer: FileWriter) -> None:
        self.writer = writer

    def write(self, data: Any) -> int:
        self.writer.write(np.frombuffer(data, np.uint8))
        return len(data)

    def tell(self) -> int:
        return self.writer.size

    def flush(self) -> None: ...

    def close(self) -> None:
        self.closed = True

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False


class ParquetDayWriter:
    """Joins a day's parsed labels and dense features with numbered ids."""

    def __init__(self, folder: Path, day: Day) -> None:
        import pyarrow as arrow

        self.labels = np.load(folder / day.files["labels"].name, mmap_mode="r")
        self.dense = np.load(folder / day.files["dense"].name, mmap_mode="r")
        self.at = 0
        fields = [(DEFAULT_LABEL_NAME, arrow.int8())]
        fields += [(name, arrow.float32()) for name in DEFAULT_INT_NAMES]
        fields += [(name, arrow.int32()) for name in DEFAULT_CAT_NAMES]
        self.schema = arrow.schema(fields)
        self.out = FileWriter(folder / f"{day.name}.parquet")
        self.rest: list[NDArray[np.int32]] = []
        self.parquet = pyarrow_parquet().ParquetWriter(
            _Counted(self.out), self.schema, compression="lz4", use_dictionary=False
        )

    def write(self, numbers: NDArray[np.int32]) -> None:
        """Adds the ids of the next samples, ``[n, F]``. Writes complete row groups."""
        self.rest.append(numbers)
        while sum(map(len, self.rest)) >= GROUP_ROWS:
            joined = np.concatenate(self.rest)
            self._group(joined[:GROUP_ROWS])
            self.rest = [joined[GROUP_ROWS:]]

    def _group(self, numbers: NDArray[np.int32]) -> None:
        import pyarrow as arrow

        end = self.at + len(numbers)
        labels, dense = self.labels[self.at : end, 0].astype(np.int8), self.dense[self.at : end].T.copy()
        columns = [arrow.array(own) for own in (labels, *dense, *numbers.T.copy())]
        self.parquet.write_batch(arrow.record_batch(columns, schema=self.schema))
        self.at = end

    def finish(self) -> FileEntry:
        """Writes the rest and the file's end."""
        rest = np.concatenate(self.rest)
        if len(rest):
            self._group(rest)
        self.parquet.close()
        return self.out.finish()

    def abandon(self) -> None:
        """Removes the incomplete file."""
        self.out.abandon()


def read_group(file: Any, group: int) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.int32]]:
    """Dense ``[n, I]``, ids ``[n, F]`` and labels ``[n]`` of a row group."""
    table = file.read_row_group(group)
    dense = np.stack([table[name].to_numpy() for name in DEFAULT_INT_NAMES], 1)
    ids = np.stack([table[name].to_numpy() for name in DEFAULT_CAT_NAMES], 1)
    return dense, ids, table[DEFAULT_LABEL_NAME].to_numpy().astype(np.int32)
