"""A file of blocks of raw ids, between parsing and numbering. In a block, the ids of each category are contiguous.

A block is the count of its samples (int64) and the ids, uint32 ``[F, n]``; one category can be read without
the rest.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recshard_lab.data.criteo import CAT_FEATURE_COUNT

_COUNT_BYTES, _ID_BYTES = 8, 4


class Blocks:
    """Reads such a file. Several threads may use it.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = os.open(path, os.O_RDONLY)
        self.begins: list[tuple[int, int]] = []  # of each block's ids: byte, samples
        size, at = os.fstat(self.file).st_size, 0
        while at < size:
            rows = int.from_bytes(os.pread(self.file, _COUNT_BYTES, at), "little")
            self.begins.append((at + _COUNT_BYTES, rows))
            at += _COUNT_BYTES + CAT_FEATURE_COUNT * rows * _ID_BYTES
        assert at == size, f"{path} is cut off"

    def close(self) -> None:
        os.close(self.file)

    def __enter__(self) -> Blocks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def block(self, number: int) -> NDArray[np.uint32]:
        """All ids of a block, ``[F, n]``."""
        begin, rows = self.begins[number]
        return self._read(begin, (CAT_FEATURE_COUNT, rows))

    def column(self, column: int) -> Iterator[NDArray[np.uint32]]:
        """One category's ids, block by block."""
        for begin, rows in self.begins:
            yield self._read(begin + column * rows * _ID_BYTES, (rows,))

    def _read(self, at: int, shape: tuple[int, ...]) -> NDArray[np.uint32]:
        ids = np.empty(shape, np.uint32)
        view = memoryview(ids.reshape(-1).data).cast("B") if ids.size else memoryview(b"")
        while len(view):
            got = os.preadv(self.file, [view], at)
            if not got:
                raise OSError(f"{self.path} is shorter than it was")
            view, at = view[got:], at + got
        return ids


def head_of(ids: NDArray[Any]) -> NDArray[np.int64]:
    """Header of a block of ids ``[F, n]``."""
    return np.array([ids.shape[1]], np.int64)
