"""Shared by the steps of preprocessing: settings, threads, progress."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

_In = TypeVar("_In")
_Out = TypeVar("_Out")
FREQUENCY_THRESHOLD = 3


@dataclass(frozen=True)
class Settings:
    """Settings that determine the output; see `preprocess_criteo`."""

    threshold: int = FREQUENCY_THRESHOLD
    hash_size: int = 0
    max_ind_range: int = 0
    format: str = "npy"
    skip_bad: bool = False

    @property
    def numbers_ids(self) -> bool:
        """Whether ids get contiguous numbers; they are hashed otherwise."""
        return self.hash_size == 0

    @property
    def one_step(self) -> bool:
        """Whether parsing writes the final files directly."""
        return self.format == "npy" and not self.numbers_ids

    @property
    def modulo(self) -> int:
        """The modulus of raw ids while they are read; 0 for none."""
        return self.hash_size or self.max_ind_range


@dataclass(frozen=True)
class Progress:
    """Progress of a step: `done` of `total` bytes of text of all files."""

    step: str
    doing: str
    done: int
    total: int


OnProgress = Callable[[Progress], object]


@dataclass(frozen=True)
class Work:
    """Folder, settings and threads of the steps."""

    folder: Path
    settings: Settings
    pool: ThreadPoolExecutor
    threads: int
    memory_bytes: int
    on_progress: OnProgress

    def tell(self, step: str, doing: str, done: float, total: int) -> None:
        """Reports the progress of a step."""
        self.on_progress(Progress(step, doing, round(done), total))


def in_order(work: Work, function: Callable[[_In], _Out], items: Iterable[_In]) -> Iterator[_Out]:
    """``map`` on the threads, a few items ahead, so that memory does not grow with their number."""
    waiting: collections.deque[Future[_Out]] = collections.deque()
    try:
        for item in items:
            waiting.append(work.pool.submit(function, item))
            if len(waiting) > work.threads + 1:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
