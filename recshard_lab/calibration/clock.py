"""Times functions on one device: CUDA events on a GPU, the wall clock on a CPU.

The method on a GPU, that of Triton's ``triton.testing.do_bench`` and of ``nvbench`` (cold mode):

- 25 ms of warm-up, synchronised, so that kernels are compiled and clocks have risen; of collectives a fixed number of
  calls, because all ranks must make equally many;
- before each repeat, 256 MB are overwritten, so that the L2 cache holds nothing of the repeat before. They are
  overwritten several times if the host needs longer to enqueue the work: the interval then contains no launch;
- an event before and after each repeat on the current stream, all repeats enqueued before one synchronisation. The
  events' resolution is about 0.5 us (CUDA runtime API, ``cudaEventElapsedTime``).

The reported time is the mean of the faster half of the repeats. Clocks are not locked: that takes administrator rights,
and training runs without. A drift of the clocks is a drift of the figures (`drift.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

WARM_UP, REPEATS = 2, 9
WARM_UP_S = 0.025  # on a GPU
COLLECTIVE_WARM_UP = 20  # calls on a GPU
LEAD = 2  # times that the host needs to enqueue a call
FLUSH_BYTES = 256 << 20  # more than any L2 cache: 50 MB on an H200, 126 MB on a B200


@dataclass(frozen=True)
class TimedOperator:
    """One operator at one size.

    Attributes:
        op: name of the operator.
        sizes: as the function that times it documents them.
        ms: milliseconds of one call; of the slowest rank, if ranks run it together.
    """

    op: str
    sizes: tuple[int, ...]
    ms: float


class Clock:
    """Times functions on ``device``.

    Args:
        device: of the tensors that the functions use.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._flush: torch.Tensor | None = None
        self._flush_ms = 0.0

    def synchronize(self) -> None:
        """Waits for the device; returns at once on a CPU."""
        import torch

        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize()

    def times(
        self, op: str, sizes: tuple[int, ...], run: Callable[[], object], before: Callable[[], object] | None = None
    ) -> list[float]:
        """Milliseconds of each of `REPEATS` calls of ``run``.

        Args:
            op, sizes: the work, as in `TimedOperator`. A clock with simulated times reads them.
            run: the work.
            before: for collectives, their barrier. It is called before each repeat on a CPU, outside the interval. On a
                GPU collectives follow each other on the stream without one, as in nccl-tests.
        """
        if self.device.type == "cpu":
            return self.host_times(op, sizes, run, before=before)
        import torch

        if self._flush is None:
            self._flush = torch.empty(FLUSH_BYTES // 4, device=self.device)
            self._flush_ms = min(self._device_times(self._flush.zero_))
        begun, host_ms = perf_counter(), list[float]()
        while (
            len(host_ms) < COLLECTIVE_WARM_UP
            if before
            else (len(host_ms) < WARM_UP or perf_counter() - begun < WARM_UP_S)
        ):
            called = perf_counter()
            run()
            host_ms.append(1000 * (perf_counter() - called))
            self.synchronize()
        return self._device_times(run, 1 + ceil(LEAD * min(host_ms) / self._flush_ms))

    def _device_times(self, run: Callable[[], object], flushes: int = 1) -> list[float]:
        import torch

        assert self._flush is not None
        pairs = [[torch.Event(device=self.device, enable_timing=True) for _ in range(2)] for _ in range(REPEATS)]
        for start, end in pairs:
            for _ in range(flushes):
                self._flush.zero_()
            start.record()
            run()
            end.record()
        self.synchronize()
        return [start.elapsed_time(end) for start, end in pairs]

    def host_times(
        self,
        op: str,
        sizes: tuple[int, ...],
        run: Callable[[], object],
        count: int = 1,
        before: Callable[[], object] | None = None,
    ) -> list[float]:
        """Milliseconds of the wall clock for one of ``count`` calls of ``run``, `REPEATS` times.

        The device is idle at the start, and calls only enqueue work on it. ``count`` must stay below the 1,024 launches
        that CUDA enqueues before it blocks the host.
        """
        found = []
        for _ in range(WARM_UP + REPEATS):
            (before or self.synchronize)()
            begun = perf_counter()
            for _ in range(count):
                run()
            found.append(1000 * (perf_counter() - begun) / count)
        self.synchronize()
        return found[WARM_UP:]

    def time(self, op: str, sizes: tuple[int, ...], run: Callable[[], object], calls: int = 0) -> TimedOperator:
        """`times`, or with ``calls`` `host_times` of so many, as one number."""
        ms = self.host_times(op, sizes, run, calls) if calls else self.times(op, sizes, run)
        return TimedOperator(op, sizes, faster_half(np.array(ms)))


def faster_half(ms: np.ndarray) -> float:
    """The mean of the faster half.

    >>> faster_half(np.array([3.0, 1.0, 9.0]))
    2.0
    """
    return float(np.sort(ms)[: len(ms) // 2 + 1].mean())


def by_op(timed: Sequence[TimedOperator]) -> dict[str, list[TimedOperator]]:
    """Operators by name, in order."""
    found: dict[str, list[TimedOperator]] = {}
    for one in timed:
        found.setdefault(one.op, []).append(one)
    return found


def line_through(sizes: Sequence[Sequence[float]], ms: Sequence[float]) -> list[float]:
    """Non-negative factors of ``ms = sizes @ factors``, by least squares of relative errors.

    >>> line_through([[1, 10], [1, 1000]], [1.2, 3.18])  # doctest: +ELLIPSIS
    [1.18, 0.002...]
    """
    from scipy.optimize import nnls

    rows = np.array(sizes, dtype=float) / np.array(ms)[:, None]
    scale = np.where(rows.max(axis=0) > 0, rows.max(axis=0), 1.0)
    return [float(factor) for factor in nnls(rows / scale, np.ones(len(rows)))[0] / scale]


def as_dicts(timed: Sequence[TimedOperator]) -> list[dict[str, Any]]:
    """For a device profile."""
    return [{**asdict(one), "sizes": list(one.sizes)} for one in timed]
