"""A fixed step of plain torch and Python, which no change of this library makes slower or faster.

A slow machine slows this step and a benchmark alike. The ratio of both shows slower code, not a slower machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from benchmarks import torch_threads

ROUNDS = 15


@dataclass(frozen=True)
class Reference:
    """Milliseconds of one reference step, medians.

    Args:
        wall: by the clock.
        cpu: CPU time of this process.
    """

    wall: float
    cpu: float


def time_reference(rounds: int = ROUNDS) -> Reference:
    """Times the step, on one thread."""
    step = _step()
    with torch_threads(1):
        for _ in range(2):
            step()
        wall, cpu = [], []
        for _ in range(rounds):
            begun, begun_cpu = time.perf_counter(), time.process_time()
            step()
            wall.append(1e3 * (time.perf_counter() - begun))
            cpu.append(1e3 * (time.process_time() - begun_cpu))
    return Reference(median(wall), median(cpu))


def _step() -> Callable[[], None]:
    """Gathers and adds of rows in torch, then Python and numpy work of about the same time.

    All data fits into a core's cache, and torch allocates nothing. A step that allocates megabytes took 3.5 to 7.6 ms
    on one machine, by where its pages came to be.
    """
    import numpy as np
    import torch

    draw = torch.Generator().manual_seed(0)
    rows, ids = torch.rand(1000, 64, generator=draw), torch.randint(0, 1000, (2048,), generator=draw)
    gathered = torch.empty(2048, 64)
    numbers = np.random.default_rng(0).random(1000)

    def step() -> None:
        for _ in range(20):
            torch.index_select(rows, 0, ids, out=gathered)
            rows.index_add_(0, ids, gathered, alpha=1e-9)
        counts: dict[int, int] = {}
        for number in range(20_000):
            counts[number % 977] = counts.get(number % 977, 0) + number
        for _ in range(200):
            np.sort(numbers[::-1])

    return step
