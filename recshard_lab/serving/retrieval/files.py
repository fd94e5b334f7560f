"""Arrays in files of a saved index."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


def write_array(path: Path, array: npt.NDArray[Any]) -> None:
    """Writes a .npy file to the disk (fsync)."""
    with path.open("wb") as file:
        np.save(file, np.ascontiguousarray(array), allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())


def read_array(path: Path, dtype: npt.DTypeLike, dims: int, memory_map: bool) -> npt.NDArray[Any]:
    """Reads a .npy file. A memory-mapped array is private: writing to it does not change the file.

    Raises:
        ValueError: another dtype or number of dimensions.
    """
    array: npt.NDArray[Any] = np.load(path, mmap_mode="c" if memory_map else None, allow_pickle=False)
    if array.dtype != np.dtype(dtype) or array.ndim != dims:
        raise ValueError(f"{path} has {array.dtype} {list(array.shape)}, expected {np.dtype(dtype)} with {dims} dims")
    return array


def sync_file(path: Path) -> None:
    """Flushes a file that another library wrote to the disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
