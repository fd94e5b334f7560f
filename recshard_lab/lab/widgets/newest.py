"""Long work of a widget: one thread, and of several wishes only the newest."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic


class Newest:
    """Runs work in a thread of its own; a wish that comes while another is worked on replaces the one that waits.

    The work is handed a function that tells whether it is still wanted: long work asks it from time to time and
    returns early where it is not.

    >>> done, newest = [], Newest("an example")
    >>> newest.ask(lambda wanted: done.append("first"))
    >>> newest.wait(), done
    (True, ['first'])
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._waiting: Callable[[Callable[[], bool]], None] | None = None
        self._asked = 0
        self._thread: threading.Thread | None = None

    def ask(self, work: Callable[[Callable[[], bool]], None]) -> None:
        """Wishes for `work`, in place of all that was wished for before. It must not raise."""
        with self._changed:
            self._asked += 1
            self._waiting = work
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=f"recshard-{self._name}", daemon=True)
                self._thread.start()

    def forget(self) -> None:
        """Takes back what was wished for: what runs is no longer wanted, what waits never runs."""
        with self._changed:
            self._asked += 1
            self._waiting = None

    @property
    def busy(self) -> bool:
        """Whether anything runs or waits."""
        with self._changed:
            return self._thread is not None

    def wait(self, timeout_s: float = 60.0) -> bool:
        """Waits until nothing runs and nothing waits; whether that came to be in time."""
        end = monotonic() + timeout_s
        with self._changed:
            while self._thread is not None:
                if not self._changed.wait(max(0.0, end - monotonic())) and monotonic() >= end:
                    return False
        return True

    def _serve(self) -> None:
        while True:
            with self._changed:
                work, number = self._waiting, self._asked
                self._waiting = None
                if work is None:
                    self._thread = None
                    self._changed.notify_all()
                    return
            work(lambda number=number: number == self._asked)  # type: ignore[misc]
