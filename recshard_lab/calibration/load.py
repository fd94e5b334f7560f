"""The load of other programs on the cores during a measurement."""

from __future__ import annotations

import time
from typing import Any

BUSY_SHARE = 0.1  # share of the cores above which measured figures are wrong
LOOK_S = 0.3  # length of `load_before`


class OtherLoad:
    """The share of the cores that other processes than this one and its ranks use, since construction.

    Args:
        ranks: launched ranks, whose CPU time does not count. None: no ranks.

    >>> 0 <= OtherLoad(None).share() <= 1
    True
    """

    def __init__(self, ranks: Any) -> None:
        self._ranks = ranks
        self._begun = self._read()

    def share(self) -> float:
        """The share since construction, 0 to 1."""
        import psutil

        wall_s, busy_s, own_s = (now - then for now, then in zip(self._read(), self._begun, strict=True))
        cores_s = wall_s * (psutil.cpu_count() or 1)
        return min(1.0, max(0.0, (busy_s - own_s) / cores_s)) if cores_s > 0 else 0.0

    def _read(self) -> tuple[float, float, float]:
        """Seconds of the clock, of all programs on the cores, and of this process and its ranks."""
        import psutil

        own = time.process_time() + (sum(self._ranks.run(time.process_time)) if self._ranks is not None else 0.0)
        used = psutil.cpu_times()  # user contains guest
        names = ("user", "nice", "system", "irq", "softirq", "steal")
        return time.perf_counter(), sum(getattr(used, name, 0.0) for name in names), own


def load_before(ranks: Any) -> float:
    """The share of the cores that other programs use now, 0 to 1. Takes `LOOK_S` seconds."""
    found = OtherLoad(ranks)
    time.sleep(LOOK_S)
    return found.share()


def load_warning(share: float) -> str:
    """A warning if the share is above `BUSY_SHARE`, otherwise "".

    >>> load_warning(0.8), load_warning(0.02)
    ('Other programs use 80% of the cores: these figures will be off. Fix: end them and calibrate again.', '')
    """
    if share <= BUSY_SHARE:
        return ""
    return f"Other programs use {share:.0%} of the cores: these figures will be off. Fix: end them and calibrate again."
