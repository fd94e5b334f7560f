"""Arrays in files of a saved index."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt


def write_array(path: Path, array: npt.NDArray[Any]) -> None:
    """Writes a .npy file to the disk (fsync)."""
    with path.open("wb") as file:
        array = np.ascontiguousarray(array)
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        file.write(array.data)  # np.save raises an error without a number where the disk is full
        sync_file(file)


def read_array(path: Path, dtype: npt.DTypeLike, dims: int, memory_map: bool) -> npt.NDArray[Any]:
    """Reads a .npy file. A memory-mapped array is private: writing to it does not change the file.

    Raises:
        ValueError: another dtype or number of dimensions.
    """
    array: npt.NDArray[Any] = np.load(path, mmap_mode="c" if memory_map else None, allow_pickle=False)
    if array.dtype != np.dtype(dtype) or array.ndim != dims:
        raise ValueError(f"{path} has {array.dtype} {list(array.shape)}, expected {np.dtype(dtype)} with {dims} dims")
    return array


def sync_file(file: BinaryIO) -> None:
    """Flushes a file to the disk (fsync)."""
    file.flush()
    os.fsync(file.fileno())
