"""Dynamic batching: requests that wait together are one call of the model.

The event loop puts requests into a bounded queue. Model threads take them, merge up to `max_batch` samples of the same
model, and hand the answers back to the event loop in one call. A request leaves the queue at once when its client
disconnects or its deadline passes.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from recshard_lab.serving.bundle import Batch
from recshard_lab.serving.server.errors import Refused
from recshard_lab.serving.server.metrics import Metrics

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from recshard_lab.serving.server.versions import Version

Answer = Mapping[str, "NDArray[Any]"]


class Disconnected(Exception):
    """The client closed its connection."""


class Entry:
    """One request in the queue."""

    __slots__ = ("answered", "arrived", "batch", "future", "samples", "version")

    def __init__(self, version: Version, batch: Batch, future: asyncio.Future[Answer]) -> None:
        self.version, self.batch, self.future = version, batch, future
        self.samples, self.arrived = len(batch.dense), time.perf_counter()


class Batcher:
    """The queue and its model threads. Create it inside the event loop.

    Args:
        metrics: counters to update.
        max_batch: samples of one call of the model. A request with more is a call by itself.
        delay_ms: how long the oldest request waits for others.
        queue: requests that wait, at most.
        threads: threads that call the model.
    """

    def __init__(
        self, metrics: Metrics, *, max_batch: int = 256, delay_ms: float = 0.0, queue: int = 1024, threads: int = 1
    ) -> None:
        self.metrics, self.max_batch, self.delay_s, self.limit = metrics, max_batch, delay_ms / 1e3, queue
        self._loop = asyncio.get_running_loop()
        self._queue: deque[Entry] = deque()
        self._ready = threading.Condition()
        self._samples = 0  # of all requests in the queue
        self._closed = False
        self._call_s = 0.0  # duration of the last calls, smoothed
        self._threads = [
            threading.Thread(target=self._work, name=f"model-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    async def predict(
        self, version: Version, batch: Batch, timeout_s: float, receive: Callable[[], Awaitable[Any]]
    ) -> Answer:
        """The outputs of the samples of one request.

        Args:
            version: the model that the batch was checked against.
            batch: B samples.
            timeout_s: seconds to the deadline.
            receive: the ASGI callable that reports a disconnect.

        Raises:
            Refused: 503 if the queue is full, 504 after the deadline, 500 if the model fails.
            Disconnected: the client has gone.
        """
        entry = Entry(version, batch, self._loop.create_future())
        with self._ready:
            if self._closed:
                raise Refused(503, "draining", "the server stops. Fix: send the request again.", retry_after_s=1)
            if len(self._queue) >= self.limit:
                raise self._full()
            self._queue.append(entry)
            self._samples += entry.samples
            self.metrics.queue.set(len(self._queue))
            if len(self._queue) == 1 or self._samples >= self.max_batch:
                self._ready.notify()
        timer = self._loop.call_later(timeout_s, self._expire, entry, timeout_s)
        watcher = self._loop.create_task(self._watch(receive, entry))
        try:
            return await entry.future
        finally:
            timer.cancel()
            watcher.cancel()

    def _full(self) -> Refused:
        batches = math.ceil(len(self._queue) / self.max_batch)
        return Refused(
            503,
            "queue_full",
            f"{len(self._queue):,} requests wait: the queue is full. Fix: send the request again later, or start the "
            f"server with a larger --queue or more --workers.",
            retry_after_s=max(1, math.ceil(batches * self._call_s)),
        )

    async def _watch(self, receive: Callable[[], Awaitable[Any]], entry: Entry) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._drop(entry, Disconnected())

    def _expire(self, entry: Entry, timeout_s: float) -> None:
        message = f"no answer after {timeout_s:g} s: the deadline has passed. Fix: send fewer requests at a time."
        self._drop(entry, Refused(504, "deadline", message))

    def _drop(self, entry: Entry, error: Exception) -> None:
        if entry.future.done():
            return
        with self._ready:
            try:
                self._queue.remove(entry)
                self._samples -= entry.samples
                self.metrics.dropped.labels("disconnected" if isinstance(error, Disconnected) else "deadline").inc()
            except ValueError:
                pass  # the model computes it now
            self.metrics.queue.set(len(self._queue))
        entry.future.set_exception(error)

    def _take(self) -> list[Entry]:
        """The next batch, or [] when the batcher is closed and its queue is empty."""
        with self._ready:
            while True:
                while not self._queue:
                    if self._closed:
                        return []
                    self._ready.wait()
                left = self._queue[0].arrived + self.delay_s - time.perf_counter()
                if left <= 0 or self._closed or self._samples >= self.max_batch:
                    break
                self._ready.wait(left)
            first = self._queue.popleft()
            taken, samples = [first], first.samples
            while self._queue:
                entry = self._queue[0]
                if samples + entry.samples > self.max_batch or entry.version is not first.version:
                    self._ready.notify()  # the rest is for another thread
                    break
                taken.append(self._queue.popleft())
                samples += entry.samples
            self._samples -= samples
            self.metrics.queue.set(len(self._queue))
            return taken

    def _work(self) -> None:
        with torch.inference_mode():
            while entries := self._take():
                self._compute(entries)
                entries.clear()  # the model and the requests are free while this thread waits

    def _compute(self, entries: list[Entry]) -> None:
        begun = time.perf_counter()
        version = entries[0].version
        results: Sequence[Answer | Exception]
        stages: Mapping[str, float] = {}
        try:
            results = list(version.predict([entry.batch for entry in entries]))
            stages = version.stage_seconds()
        except Exception as error:
            if len(entries) > 1:  # one request cannot fail the others
                for entry in entries:
                    if not entry.future.done():
                        self._compute([entry])
                return
            results = [error]
        ended = time.perf_counter()
        self._call_s += 0.1 * (ended - begun - self._call_s)
        self._loop.call_soon_threadsafe(self._deliver, list(entries), results, begun, ended, stages)

    def _deliver(
        self,
        entries: list[Entry],
        results: Sequence[Answer | Exception],
        begun: float,
        ended: float,
        stages: Mapping[str, float],
    ) -> None:
        """Runs in the event loop."""
        metrics = self.metrics
        metrics.model_seconds.observe(ended - begun)
        for stage, seconds in stages.items():
            metrics.stage_seconds.labels(stage).observe(seconds)
        metrics.batch_samples.observe(sum(entry.samples for entry in entries))
        for entry, result in zip(entries, results, strict=True):
            metrics.queue_seconds.observe(begun - entry.arrived)
            if entry.future.done():
                continue
            if isinstance(result, Exception):
                entry.future.set_exception(result)
            else:
                entry.future.set_result(result)

    def close(self, timeout_s: float = 10.0) -> bool:
        """Ends the model threads after the requests that wait. Returns whether they ended in time."""
        with self._ready:
            self._closed = True
            self._ready.notify_all()
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)
