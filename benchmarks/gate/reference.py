"""A fixed step of plain torch and Python, which no change of this library makes slower or faster.

A slow machine slows this step and a benchmark alike. The ratio of both shows slower code, not a slower machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

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
    """Three training steps of an EmbeddingBag, then Python and numpy work of about the same time."""
    import numpy as np
    import torch

    draw = torch.Generator().manual_seed(0)
    bags = torch.nn.EmbeddingBag(20_000, 64, mode="sum")
    optimizer = torch.optim.SGD(bags.parameters(), lr=0.01)
    ids, offsets = torch.randint(0, 20_000, (4096,), generator=draw), torch.arange(0, 4096, 8)
    numbers = np.random.default_rng(0).random(1000)

    def step() -> None:
        for _ in range(3):
            optimizer.zero_grad()
            loss: Any = bags(ids, offsets).square().sum()
            loss.backward()
            optimizer.step()
        counts: dict[int, int] = {}
        for number in range(20_000):
            counts[number % 977] = counts.get(number % 977, 0) + number
        for _ in range(200):
            np.sort(numbers[::-1])

    return step
