"""Worker: everything that a widget does in the background, in daemon threads that end with the widget."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, TypeVar

Result = TypeVar("Result")


@dataclass
class _Lane:
    """Work that runs one after the other: ``(due, work)``, the number of the newest request, and the thread."""

    tasks: list[tuple[float, Callable[[], Any]]] = field(default_factory=list)
    number: int = 0
    thread: threading.Thread | None = None


class Worker:
    """Runs the background work of one widget.

    Work is put into lanes, which have names. Each lane runs one piece of work at a time, in the order in which it is
    due, in one thread that ends when the lane is empty. Work must not raise.

    Args:
        name: of the widget, part of the names of the threads.

    >>> lines, worker = [], Worker("an-example")
    >>> worker.newest(lambda is_current: lines.append(is_current()))
    >>> worker.wait(), lines
    (True, [True])
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._lanes: dict[str, _Lane] = {}
        self.closed = False

    def queue(self, work: Callable[[], Any], lane: str = "", delay_s: float = 0.0) -> None:
        """Runs `work` after the work that is in the lane, and not before `delay_s` seconds. Ignored once closed."""
        with self._changed:
            if not self.closed:
                self._put(self._lane(lane), lane, work, delay_s)

    def newest(self, work: Callable[[Callable[[], bool]], Any], lane: str = "", delay_s: float = 0.0) -> None:
        """Replaces the work of the lane by `work`.

        Waiting work is dropped. Running work ends when it likes: it receives a function that returns whether it is
        still current, calls it from time to time and returns early if not.
        """
        with self._changed:
            if self.closed:
                return
            found = self._lane(lane)
            found.number += 1
            number = found.number
            found.tasks.clear()
            self._put(found, lane, lambda: work(lambda: number == found.number), delay_s)

    def cancel(self, lane: str = "") -> None:
        """Drops the waiting work of the lane. Running work is no longer current."""
        with self._changed:
            found = self._lane(lane)
            found.number += 1
            found.tasks.clear()
            self._changed.notify_all()

    def every(self, seconds: float, work: Callable[[], Any], lane: str = "") -> None:
        """Runs `work` every `seconds` until the widget is closed."""

        def again() -> None:
            work()
            self.queue(again, lane, seconds)

        self.queue(again, lane, seconds)

    def call(self, work: Callable[[], Result], lane: str = "") -> Result:
        """Runs `work` in the lane, waits, and returns its result or raises its error.

        Raises:
            RuntimeError: the widget is closed.
        """
        done, outcome, errors = threading.Event(), list[Result](), list[BaseException]()

        def task() -> None:
            try:
                outcome.append(work())
            except BaseException as error:
                errors.append(error)
            done.set()

        with self._changed:
            if self.closed:
                raise RuntimeError("the widget is closed. Fix: make it again")
            self._put(self._lane(lane), lane, task, 0.0)
        done.wait()
        if errors:
            raise errors[0]
        return outcome[0]

    def busy(self, lane: str = "") -> bool:
        """Whether work of the lane runs or waits."""
        with self._changed:
            return self._lane(lane).thread is not None

    def wait(self, *lanes: str, timeout_s: float = 60.0) -> bool:
        """Waits until the lanes are empty, all of them if none is named. Returns whether that happened in time."""
        end = monotonic() + timeout_s
        with self._changed:
            while any(self._lane(lane).thread is not None for lane in lanes or [*self._lanes]):
                if not self._changed.wait(max(0.0, end - monotonic())) and monotonic() >= end:
                    return False
        return True

    def close(self) -> None:
        """Drops the work that is not due and accepts no more. Running work is no longer current."""
        with self._changed:
            self.closed = True
            for lane in self._lanes.values():
                lane.number += 1
                lane.tasks = [task for task in lane.tasks if task[0] <= monotonic()]
            self._changed.notify_all()

    def _lane(self, name: str) -> _Lane:
        return self._lanes.setdefault(name, _Lane())

    def _put(self, lane: _Lane, name: str, work: Callable[[], Any], delay_s: float) -> None:
        lane.tasks.append((monotonic() + delay_s, work))
        if lane.thread is None:
            label = "-".join(filter(None, ["recshard", self._name, name]))
            lane.thread = threading.Thread(target=self._serve, args=(lane,), name=label, daemon=True)
            lane.thread.start()
        self._changed.notify_all()

    def _serve(self, lane: _Lane) -> None:
        while True:
            with self._changed:
                while lane.tasks and (left := min(lane.tasks, key=_due)[0] - monotonic()) > 0:
                    self._changed.wait(left)
                if not lane.tasks:
                    lane.thread = None
                    self._changed.notify_all()
                    return
                task = min(lane.tasks, key=_due)
                lane.tasks.remove(task)
            task[1]()


def _due(task: tuple[float, Any]) -> float:
    return task[0]
