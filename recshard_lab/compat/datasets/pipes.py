"""Pipes of files and of their lines: ``torchrec.datasets.utils``.

They are `torch.utils.data.IterDataPipe`: a `DataLoader` reads them, and pipes of torch take them as a source.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any, TypeVar

from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import Mapper as Mapper

T = TypeVar("T")
RowMapper = Callable[[list[str]], Any] | None
"""The columns of a line -> what a pipe yields."""

PATH_MANAGER_KEY = "torchrec"
"""The key of iopath's path manager that readers of scripts ask for. Readers here open local files without iopath."""


def safe_cast(val: T, dest_type: Callable[[T], T], default: T) -> T:
    """`val` as another type, or `default` if the conversion raises ValueError.

    >>> safe_cast("7", int, 0), safe_cast("", int, 0)
    (7, 0)
    """
    try:
        return dest_type(val)
    except ValueError:
        return default


class LoadFiles(IterDataPipe[tuple[str, IO[Any]]]):
    """Yields (path, open file) for each path.

    Args:
        datapipe: paths of local files.
        mode: as of `open`; ``"b"`` and ``"t"`` mean ``"rb"`` and ``"rt"``.
        length: what ``len()`` returns. Default: no length.
        path_manager_key: accepted as in TorchRec, whose path managers also read remote files.
        open_kw: further arguments of `open`.

    Raises:
        ValueError: another mode.
        NotImplementedError: ``len()`` without a length.
    """

    def __init__(
        self,
        datapipe: Iterable[str],
        mode: str = "b",
        length: int = -1,
        path_manager_key: str = "torchrec",
        **open_kw: Any,
    ) -> None:
        if mode not in ("b", "t", "r", "rb", "rt"):
            raise ValueError(f"mode {mode!r} does not read files. Fix: use 'b', 't', 'r', 'rb' or 'rt'")
        self.datapipe, self.length, self.open_kw = datapipe, length, open_kw
        self.mode = f"r{mode}" if mode in ("b", "t") else mode

    def __iter__(self) -> Iterator[tuple[str, IO[Any]]]:
        for path in self.datapipe:
            yield path, open(path, self.mode, **self.open_kw)  # noqa: SIM115 the reader closes it

    def __len__(self) -> int:
        if self.length < 0:
            raise NotImplementedError("this pipe of files has no length. Fix: LoadFiles(..., length=)")
        return self.length


class ReadLinesFromCSV(IterDataPipe[list[str]]):
    """Yields the columns of each line of text files.

    Args:
        datapipe: (path, open text file), as `LoadFiles` yields them. Each file is closed at its end.
        skip_first_line: whether files begin with a line of names.
        kw: arguments of `csv.reader`, such as ``delimiter``.
    """

    def __init__(self, datapipe: Iterable[tuple[str, IO[str]]], skip_first_line: bool = False, **kw: Any) -> None:
        self.datapipe, self.skip_first_line, self.kw = datapipe, skip_first_line, kw

    def __iter__(self) -> Iterator[list[str]]:
        for _, file in self.datapipe:
            with file:
                lines = csv.reader(file, **self.kw)
                if self.skip_first_line:
                    next(lines, None)
                yield from lines
