"""Pipes of files and lines, and splits into training and validation: ``torchrec.datasets.utils``.

They are `torch.utils.data.IterDataPipe`: a `DataLoader` reads them, and pipes of torch take them as a source.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import IO, Any, TypeVar

from torch.utils.data import IterDataPipe, get_worker_info
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


class Limit(IterDataPipe[T]):
    """Yields the first samples of a pipe.

    Args:
        datapipe: the samples.
        limit: their highest number.

    >>> list(Limit([5, 6, 7], 2))
    [5, 6]
    """

    def __init__(self, datapipe: Iterable[T], limit: int) -> None:
        self.datapipe, self.limit = datapipe, limit

    def __iter__(self) -> Iterator[T]:
        for number, sample in enumerate(self.datapipe):
            if number >= self.limit:
                return
            yield sample


def pipes_of_worker(datapipes: Sequence[Any]) -> Sequence[Any]:
    """The pipes that this worker of a `DataLoader` reads: neighbours, in almost equal numbers. All without workers.

    Raises:
        ValueError: fewer pipes than workers.
    """
    worker = get_worker_info()
    if worker is None:
        return datapipes
    if len(datapipes) < worker.num_workers:
        raise ValueError(
            f"{len(datapipes)} pipes cannot be split over {worker.num_workers} workers. "
            f"Fix: num_workers={len(datapipes)}"
        )
    least, more = divmod(len(datapipes), worker.num_workers)
    first = worker.id * least + min(worker.id, more)
    return datapipes[first : first + least + (worker.id < more)]


class ParallelReadConcat(IterDataPipe[Any]):
    """Yields all samples of several pipes, one pipe after the other. Workers of a `DataLoader` share the pipes.

    Args:
        datapipes: the pipes.
        dp_selector: all pipes -> those of this worker. Default: `pipes_of_worker`.

    >>> list(ParallelReadConcat([1, 2], [3]))
    [1, 2, 3]
    """

    def __init__(
        self, *datapipes: Iterable[Any], dp_selector: Callable[[Sequence[Any]], Sequence[Any]] = pipes_of_worker
    ) -> None:
        self.datapipes, self.dp_selector = datapipes, dp_selector

    def __iter__(self) -> Iterator[Any]:
        for pipe in self.dp_selector(self.datapipes):
            yield from pipe


def _check_share(train_perc: float) -> None:
    if not 0.0 < train_perc < 1.0:
        raise ValueError(f"train_perc must be in range (0.0, 1.0), got {train_perc}. Fix: pass a share such as 0.8")


class _RandomSplit(IterDataPipe[Any]):
    """The samples for which a number drawn from a seed is below `share`, or all others."""

    def __init__(self, datapipe: Iterable[Any], share: float, seed: int, below: bool) -> None:
        self.datapipe, self.share, self.seed, self.below = datapipe, share, seed, below

    def __iter__(self) -> Iterator[Any]:
        draws = random.Random(self.seed)
        for sample in self.datapipe:
            if (draws.random() < self.share) is self.below:
                yield sample


def rand_split_train_val(
    datapipe: Iterable[Any], train_perc: float, random_seed: int = 0
) -> tuple[IterDataPipe[Any], IterDataPipe[Any]]:
    """Splits the samples at random into training and validation. Each pass gives the same split.

    Args:
        datapipe: samples, in the same order in each pass. Both parts read it.
        train_perc: the share of training, above 0 and below 1.
        random_seed: determines the split.

    Raises:
        ValueError: another share.

    >>> train, val = rand_split_train_val(range(4), 0.5)
    >>> list(train), list(val)
    ([2, 3], [0, 1])
    """
    _check_share(train_perc)
    parts = (_RandomSplit(datapipe, train_perc, random_seed, below) for below in (True, False))
    return next(parts), next(parts)


def train_filter(key_fn: Callable[[int], int], train_perc: float, decimal_places: int, idx: int) -> bool:
    """Whether sample number `idx` is for training: the last decimals of its key are below the share.

    Args:
        key_fn: number of a sample -> its key.
        train_perc: the share.
        decimal_places: how many last decimals of a key count.
        idx: the number.

    >>> [train_filter(lambda number: number, 0.5, 1, idx) for idx in (4, 5, 12)]
    [True, False, True]
    """
    return key_fn(idx) % 10**decimal_places < train_perc * 10**decimal_places


def val_filter(key_fn: Callable[[int], int], train_perc: float, decimal_places: int, idx: int) -> bool:
    """Whether sample number `idx` is for validation; arguments as of `train_filter`.

    >>> val_filter(lambda number: number, 0.5, 1, 5)
    True
    """
    return not train_filter(key_fn, train_perc, decimal_places, idx)


class _NumberSplit(IterDataPipe[Any]):
    """The samples whose number a function selects."""

    def __init__(self, datapipe: Iterable[Any], selects: Callable[[int], bool]) -> None:
        self.datapipe, self.selects = datapipe, selects

    def __iter__(self) -> Iterator[Any]:
        return (sample for number, sample in enumerate(self.datapipe) if self.selects(number))


def _same(number: int) -> int:
    return number


def idx_split_train_val(
    datapipe: Iterable[Any],
    train_perc: float,
    decimal_places: int = 2,
    key_fn: Callable[[int], int] = _same,
) -> tuple[IterDataPipe[Any], IterDataPipe[Any]]:
    """Splits the samples by their numbers into training and validation.

    Args:
        datapipe: samples. Both parts read it.
        train_perc: the share of training, above 0 and below 1.
        decimal_places, key_fn: as of `train_filter`.

    Raises:
        ValueError: another share.

    >>> train, val = idx_split_train_val(range(12), 0.5, decimal_places=1)
    >>> list(val)
    [5, 6, 7, 8, 9]
    """
    _check_share(train_perc)
    parts = (partial(selects, key_fn, train_perc, decimal_places) for selects in (train_filter, val_filter))
    return _NumberSplit(datapipe, next(parts)), _NumberSplit(datapipe, next(parts))
