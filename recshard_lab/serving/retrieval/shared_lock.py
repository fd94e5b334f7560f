"""A lock that many readers or one writer hold."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class SharedLock:
    """Readers run together, a writer runs alone. New readers wait for a waiting writer. Not reentrant.

    >>> lock = SharedLock()
    >>> with lock.shared(), lock.shared():
    ...     pass
    >>> with lock.alone():
    ...     pass
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers = 0
        self._writers = 0  # running or waiting
        self._writing = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """For reading."""
        with self._changed:
            while self._writers:
                self._changed.wait()
            self._readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """For writing."""
        with self._changed:
            self._writers += 1
            try:
                while self._readers or self._writing:
                    self._changed.wait()
            except BaseException:  # interrupted while waiting
                self._writers -= 1
                self._changed.notify_all()
                raise
            self._writing = True
        try:
            yield
        finally:
            with self._changed:
                self._writers -= 1
                self._writing = False
                self._changed.notify_all()
