"""Samples per second, of all ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

import torch
from torch import Tensor


class ThroughputMetric:
    """Samples per second over the last seconds and over all steps; constructor as in TorchRec.

    A step lasts from the update before to its own update. The time before the first update is unknown and not counted.
    Warm-up steps do not count either: they include compilers and cold caches. Only this rank's clock is read, since
    ranks that exchange anything in a step take the same time.

    Args:
        batch_size: samples of one rank in a step.
        world_size: W.
        window_seconds: length of the window.
        warmup_steps: first updates that are not timed.
        clock: returns seconds.

    Raises:
        ValueError: sizes below 1, or a negative number of warm-up steps.

    >>> now = iter([0.0, 1.0, 3.0])
    >>> metric = ThroughputMetric(
    ...     batch_size=10, world_size=2, window_seconds=60, warmup_steps=1, clock=lambda: next(now)
    ... )
    >>> for _ in range(3):
    ...     metric.update()
    >>> {key.partition("|")[2]: value.item() for key, value in metric.compute().items()}
    {'total_examples': 60.0, 'lifetime_throughput': 13.333..., 'window_throughput': 13.333...}
    """

    namespace = "throughput"

    def __init__(
        self,
        *,
        batch_size: int,
        world_size: int,
        window_seconds: float,
        warmup_steps: int = 100,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("world_size", world_size, 1),
            ("warmup_steps", warmup_steps, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"ThroughputMetric: {name} must be an integer from {least}, got {value!r}")
        if isinstance(window_seconds, bool) or not isinstance(window_seconds, int | float) or not window_seconds > 0:
            raise ValueError(f"ThroughputMetric: window_seconds must be above 0, got {window_seconds!r}")
        self.batch_size, self.world_size = batch_size, world_size
        self.window_seconds, self.warmup_steps, self._clock = window_seconds, warmup_steps, clock
        self.total_examples = self._timed_examples = self._steps = 0
        self._seconds = 0.0
        self._last: float | None = None
        self._window: deque[tuple[float, int]] = deque()  # (seconds, samples) of a step
        self._window_time = 0.0

    def update(self, num_examples: int | None = None) -> None:
        """Counts one step of all ranks.

        Args:
            num_examples: its samples on all ranks. Default: ``batch_size * world_size``.
        """
        now = self._clock()
        last, self._last = self._last, now
        examples = self.batch_size * self.world_size if num_examples is None else num_examples
        self.total_examples += examples
        self._steps += 1
        if last is None or self._steps <= self.warmup_steps:
            return
        self._seconds += now - last
        self._timed_examples += examples
        self._window.append((now - last, examples))
        self._window_time += now - last
        while self._window_time - self._window[0][0] >= self.window_seconds:
            self._window_time -= self._window.popleft()[0]

    def compute(self) -> dict[str, Tensor]:
        """Samples so far, and samples per second; NaN before the first timed step. Not collective."""
        window = sum(examples for _, examples in self._window)
        values = {
            "total_examples": float(self.total_examples),
            "lifetime_throughput": self._timed_examples / self._seconds if self._seconds else torch.nan,
            "window_throughput": window / self._window_time if self._window_time > 0 else torch.nan,
        }
        prefix = f"{self.namespace}-{self.namespace}|"
        return {prefix + name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}

    def state_dict(self) -> dict[str, Any]:
        """Counts and seconds. The time until the state is loaded does not count."""
        return {
            "metric": self.namespace,
            "total_examples": self.total_examples,
            "timed_examples": self._timed_examples,
            "steps": self._steps,
            "seconds": self._seconds,
            "window": list(self._window),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state.

        Raises:
            ValueError: the state of another metric.
        """
        if state.get("metric") != self.namespace:
            raise ValueError(f"this is the state of metric {state.get('metric')!r}, not of {self.namespace!r}")
        self.total_examples, self._timed_examples = state["total_examples"], state["timed_examples"]
        self._steps, self._seconds, self._last = state["steps"], state["seconds"], None
        self._window = deque(tuple(step) for step in state["window"])
        self._window_time = sum(seconds for seconds, _ in self._window)
