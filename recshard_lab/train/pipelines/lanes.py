"""Threads on which the stages of a pipeline run, one a stage, and what is said when one fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import nullcontext
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
_Work = tuple[Callable[[], Any], "Future[Any]"] | None

JOIN_S = 10.0


class StageError(RuntimeError):
    """A stage of a pipeline failed; the error itself is its ``__cause__``, where it happened on this rank.

    Attributes:
        stage: which.
        batch: the number of the batch, from 0.
        rank: where.

    >>> print(StageError("copy", 7, 1, "ValueError: no such device"))
    stage 'copy' of batch 7 failed on rank 1: ValueError: no such device
    """

    def __init__(self, stage: str, batch: int, rank: int, why: str) -> None:
        super().__init__(f"stage {stage!r} of batch {batch} failed on rank {rank}: {why}")
        self.stage, self.batch, self.rank, self.why = stage, batch, rank, why

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.stage, self.batch, self.rank, self.why)


class Lane:
    """One thread that does one thing after the other, in the order of `submit`.

    On a GPU it has a stream of its own.

    Args:
        name: of the thread.
        device: where its work runs.
        threaded: False does the work at once in the thread that submits it: the same results, and no overlap.

    >>> lane = Lane("sum", torch.device("cpu"))
    >>> lane.submit(lambda: 1 + 1).result(), lane.close()
    (2, True)
    """

    def __init__(self, name: str, device: torch.device, threaded: bool = True) -> None:
        self.name, self.stream = name, torch.cuda.Stream(device) if device.type == "cuda" else None
        self._work: SimpleQueue[_Work] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Future[Any] | None = None
        if threaded:
            self._thread = threading.Thread(
                target=_serve, args=(self._work, self.stream), name=f"recshard-{name}", daemon=True
            )
            self._thread.start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Puts work behind what was submitted before."""
        future: Future[T] = Future()
        self._last = future
        if self._thread is None:
            with _on(self.stream):
                _do(work, future)
        else:
            self._work.put((work, future))
        return future

    def mark(self) -> Any:
        """An event on the lane's stream after what was done so far; None on a CPU."""
        return None if self.stream is None else self.stream.record_event()

    def drain(self) -> None:
        """Returns when all that was submitted is done, well or not."""
        if self._last is not None and not self._last.cancelled():
            self._last.exception()

    def close(self, timeout: float = JOIN_S) -> bool:
        """Ends the thread after the work that it is at; whether it has ended."""
        if self._thread is not None:
            self._work.put(None)
            if threading.current_thread() is not self._thread:
                self._thread.join(timeout)
            return not self._thread.is_alive()
        return True


def _serve(work: SimpleQueue[_Work], stream: Any) -> None:
    with _on(stream):
        while (item := work.get()) is not None:
            _do(*item)
            del item


def _do(work: Callable[[], Any], future: Future[Any]) -> None:
    try:
        with torch.no_grad():
            future.set_result(work())
    except BaseException as error:
        future.set_exception(error)


def _on(stream: Any) -> Any:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def arrive(event: Any, *used: Any) -> None:
    """On a GPU: this thread's stream goes on after ``event``, and what is ``used`` here stays alive for it."""
    if event is None:
        return
    stream = torch.cuda.current_stream()
    stream.wait_event(event)
    for thing in used:
        if hasattr(thing, "record_stream"):
            thing.record_stream(stream)
        else:
            for tensor in tensors_in(thing):
                tensor.record_stream(stream)


def tensors_in(thing: Any) -> Iterable[Tensor]:
    """The tensors of nested slots, lists and dicts."""
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, dict):
        for value in thing.values():
            yield from tensors_in(value)
    elif isinstance(thing, list | tuple):
        for value in thing:
            yield from tensors_in(value)
    elif hasattr(thing, "__slots__"):
        for name in thing.__slots__:
            yield from tensors_in(getattr(thing, name))
