"""What SIGINT does to this process: the notebook's interrupt button, or Ctrl-C.

Python removes a package whose import was interrupted, but not the modules of it that were complete. torch 2.13 does not
survive this: its next import raises an error, or ends the process. Imports on behalf of the user therefore end before
an interrupt takes effect.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["stop_button", "uninterrupted"]


@contextmanager
def stop_button(pressed: Callable[[], object]) -> Iterator[None]:
    """Within this context SIGINT calls `pressed`. No effect outside the main thread, which alone gets signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: pressed())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delays SIGINT until this context ends. Its handler is then called once, which raises KeyboardInterrupt."""
    presses: list[None] = []
    with stop_button(lambda: presses.append(None)):
        yield
    if presses:
        signal.raise_signal(signal.SIGINT)
