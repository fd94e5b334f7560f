"""Four ranks: seconds to their first all_reduce, cells, stops and losses in a real kernel, what 100 launches leave."""

from __future__ import annotations

import os
import time
from statistics import median

from recshard_lab.bench import Figure, launch_cycles, launch_kernel, median_ms, seconds_in_new_python

RANKS = 4
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
    from recshard_lab.launcher.forkserver import forkserver

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
        Figure(f"launch of {RANKS} ranks to first all_reduce, warm", median(warm), "s", target=0.10),
        Figure(f"launch of {RANKS} ranks to first all_reduce, cold", cold, "s", target=2.0),
        Figure(f"empty cell on {RANKS} ranks, there and back", median(cell), "ms", target=5.0),
        *launch_kernel.figures(),
        *launch_cycles.figures(),
    ]
