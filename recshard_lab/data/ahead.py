"""Items that a thread prepares while others are in use."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


@dataclass
class _Made(Generic[_Item]):
    item: _Item


def ahead(items: Iterator[_Item], count: int) -> Iterator[_Item]:
    """The same items; what making one raises is raised here, in its place. The thread ends with the iteration.

    >>> list(ahead(iter("abc"), 2))
    ['a', 'b', 'c']
    """
    ready: queue.Queue[_Made[_Item] | BaseException | None] = queue.Queue(count)
    left = threading.Event()

    def put(item: _Made[_Item] | BaseException | None) -> None:
        while not left.is_set():
            try:
                ready.put(item, timeout=0.1)
            except queue.Full:
                continue
            return

    def prepare() -> None:
        try:
            for item in items:
                put(_Made(item))
                if left.is_set():
                    return
            put(None)
        except BaseException as error:
            put(error)

    thread = threading.Thread(target=prepare, name="recshard-ahead", daemon=True)
    thread.start()
    try:
        while (made := ready.get()) is not None:
            if isinstance(made, BaseException):
                raise made
            yield made.item
    finally:
        left.set()
        thread.join()
