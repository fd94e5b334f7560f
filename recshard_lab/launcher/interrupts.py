"""The notebook's stop button while ranks are at work: a request to them, never an exception in our own books."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["stop_button"]


@contextmanager
def stop_button(pressed: Callable[[], object]) -> Iterator[None]:
    """Inside, SIGINT calls `pressed`; elsewhere it stays what it was. (Other threads never get it.)"""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: pressed())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
