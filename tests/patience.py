"""Limits of waiting that grow with a slow or busy machine. They turn a hang into a failure, and promise nothing.

One measurement at the start of a test process compares fixed work with the time that it takes on a fast core.
"""

import time
from collections.abc import Callable
from functools import cache
from itertools import count

FAST_S = 0.008
"""The work below on a core of 2026, without load."""


@cache
def slowness() -> float:
    """How many times as long as on a fast core the work takes here, at least 1."""
    begun = time.perf_counter()
    total = 0
    for number in range(200_000):
        total += number
    return max(1.0, (time.perf_counter() - begun) / FAST_S)


def scaled(seconds: float) -> float:
    """A limit for this machine.

    >>> scaled(20) >= 20
    True
    """
    return seconds * slowness()


def wait_until(condition: Callable[[], object], seconds: float = 20, every_s: float = 0.01) -> None:
    """Waits until a condition holds.

    Raises:
        TimeoutError: it does not hold within that time, scaled to this machine.

    >>> numbers = iter([0, 0, 1])
    >>> wait_until(lambda: next(numbers))
    """
    end = time.monotonic() + scaled(seconds)
    for _ in count():
        if condition():
            return
        if time.monotonic() > end:
            raise TimeoutError(f"{condition} did not hold within {scaled(seconds):.0f} s")
        time.sleep(every_s)
