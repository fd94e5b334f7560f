"""Four ranks: seconds to the first all_reduce, cold and warm, and milliseconds of an empty cell."""

from __future__ import annotations

import os
import time
from statistics import median

from benchmarks import Figure, median_ms, seconds_in_new_python

RANKS = 4
_WARM_S = f"launch of {RANKS} ranks to first all_reduce, warm"
_COLD_S = f"launch of {RANKS} ranks to first all_reduce, cold"
_CELL_MS = f"empty cell on {RANKS} ranks, there and back"
TARGETS = {_WARM_S: 0.10, _COLD_S: 2.0, _CELL_MS: 5.0}
_COLD = f"""
import time, torch
from recshard_lab.launcher import launch
begun = time.perf_counter()
with launch({RANKS}):
    print(time.perf_counter() - begun)
"""


def figures() -> list[Figure]:
    """A launch returns when its handshake, which ends in a real all_reduce, is through on every rank.

    Cold: torch is imported here, the forkserver is not there yet. Warm: it has imported all it means to, as some
    seconds after ``%load_ext recshard_lab``.
    """
    from recshard_lab.launcher import launch
    from recshard_lab.launcher.engines.fork import forkserver

    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    cold = median(seconds_in_new_python(_COLD) for _ in range(3))
    forkserver().warmed.wait(60)
    with launch(RANKS):
        pass
    warm, cell = [], []
    for _ in range(11):
        begun = time.perf_counter()
        with launch(RANKS) as ranks:
            warm.append(time.perf_counter() - begun)
            cell.append(median_ms(lambda ranks=ranks: ranks.exec(""), repeat=50))  # type: ignore[misc]
    return [
        Figure("other work on this machine when this began", load, "running processes a core"),
        Figure(_WARM_S, median(warm), "s"),
        Figure(_COLD_S, cold, "s"),
        Figure(_CELL_MS, median(cell), "ms"),
    ]
