"""Threads of a pipeline's stages, one per stage, and the error of a stage."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from contextlib import nullcontext
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

_Work = tuple[Callable[[], Any], "Future[Any]"] | None

JOIN_S = 10.0


class StageError(RuntimeError):
    """A stage of a pipeline failed. On the rank where it happened, the error itself is its ``__cause__``.

    Attributes:
        stage: the stage.
        batch: the number of the batch, from 0.
        rank: the rank.

    >>> print(StageError("copy", 7, 1, "ValueError: bad device"))
    stage 'copy' of batch 7 failed on rank 1: ValueError: bad device
    """

    def __init__(self, stage: str, batch: int, rank: int, why: str) -> None:
        super().__init__(f"stage {stage!r} of batch {batch} failed on rank {rank}: {why}")
        self.stage, self.batch, self.rank, self.why = stage, batch, rank, why

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.stage, self.batch, self.rank, self.why)


class Lane:
    """One thread that runs submitted work in order.

    Work may be a generator, which yields where it would wait for other ranks. A thread waits there. Without a thread,
    the work continues when `advance` or `wait` is called; its messages travel meanwhile.

    On a GPU it has a separate stream.

    Args:
        name: name of the thread.
        device: device of its work.
        threaded: False runs the work in the calling thread.

    >>> lane = Lane("sum", torch.device("cpu"))
    >>> lane.submit(lambda: 1 + 1).result(), lane.close()
    (2, True)
    """

    def __init__(self, name: str, device: torch.device, threaded: bool = True) -> None:
        self.name, self.stream = name, torch.cuda.Stream(device) if device.type == "cuda" else None
        self._work: SimpleQueue[_Work] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Future[Any] | None = None
        self._begun: tuple[Generator[None, None, Any], Future[Any]] | None = None
        if threaded:
            self._thread = threading.Thread(
                target=_serve, args=(self._work, self.stream), name=f"recshard-{name}", daemon=True
            )
            self._thread.start()

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Adds work to the queue."""
        future: Future[Any] = Future()
        if self._thread is None:
            self.drain()
            with _on(self.stream):
                begun = _do(work, future)
            self._begun = None if begun is None else (begun, future)
            self.advance()
        else:
            self._work.put((work, future))
        self._last = future
        return future

    def advance(self) -> None:
        """Without a thread: continues to the next point where the work would wait."""
        if self._begun is not None:
            with _on(self.stream):
                if _advance(*self._begun):
                    self._begun = None

    def wait(self, future: Future[Any]) -> None:
        """Waits until the future is done or has failed."""
        while self._begun is not None and not future.done():
            self.advance()
        future.exception()

    def mark(self) -> Any:
        """An event on the lane's stream after the work so far; None on a CPU."""
        return None if self.stream is None else self.stream.record_event()

    def drain(self) -> None:
        """Waits until all submitted work is done or has failed."""
        if self._last is not None:
            self.wait(self._last)

    def close(self, timeout: float = JOIN_S) -> bool:
        """Ends the thread after the submitted work. Returns whether it has ended."""
        if self._thread is not None:
            self._work.put(None)
            if threading.current_thread() is not self._thread:
                self._thread.join(timeout)
            return not self._thread.is_alive()
        return True


def _serve(work: SimpleQueue[_Work], stream: Any) -> None:
    with _on(stream):
        while (item := work.get()) is not None:
            begun = _do(*item)
            while begun is not None and not _advance(begun, item[1]):
                pass
            del item, begun


def _do(work: Callable[[], Any], future: Future[Any]) -> Generator[None, None, Any] | None:
    """Runs plain work. Returns a generator if the work is one."""
    try:
        with torch.no_grad():
            found = work()
    except BaseException as error:
        future.set_exception(error)
        return None
    if isinstance(found, Generator):
        return found
    future.set_result(found)
    return None


def _advance(work: Generator[None, None, Any], future: Future[Any]) -> bool:
    """Continues to the next yield. Returns whether the work has ended."""
    try:
        with torch.no_grad():
            next(work)
    except StopIteration as end:
        future.set_result(end.value)
    except BaseException as error:
        future.set_exception(error)
    else:
        return False
    return True


def _on(stream: Any) -> Any:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def arrive(event: Any, *used: Any) -> None:
    """On a GPU: this thread's stream waits for ``event``, and the memory of ``used`` stays allocated for it."""
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
