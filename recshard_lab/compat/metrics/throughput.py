"""Samples per second: ``torchrec.metrics.throughput``."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from time import monotonic

import torch
from torch import Tensor, nn

from recshard_lab.compat.metrics.config import BatchSizeStage, validate_batch_size_stages
from recshard_lab.compat.metrics.names import MetricName, MetricNamespace, MetricPrefix, compose_metric_key

MAX_WINDOW_TS = 7200
"""The longest window, in seconds."""


class ThroughputMetric(nn.Module):
    """Samples of all ranks per second, over all steps after the warm-up and over a window.

    Args:
        batch_size: samples of one rank in a step.
        world_size: the number of ranks.
        window_seconds: length of the window, at most `MAX_WINDOW_TS`.
        warmup_steps: first steps, which are not timed.
        batch_size_stages: batch sizes that replace `batch_size` until their last iteration.

    Raises:
        ValueError: a window or a warm-up below 1, or a last stage that ends.
    """

    total_examples: Tensor
    warmup_examples: Tensor
    time_lapse_after_warmup: Tensor

    def __init__(
        self,
        *,
        batch_size: int,
        world_size: int,
        window_seconds: int,
        warmup_steps: int = 100,
        batch_size_stages: Sequence[BatchSizeStage] | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("window_seconds", window_seconds), ("warmup_steps", warmup_steps)):
            if value < 1:
                raise ValueError(
                    f"{name}={value} is below 1: throughput needs a time to measure. Fix: {name}=1 or more"
                )
        validate_batch_size_stages(batch_size_stages)
        self._batch_size, self._world_size = batch_size, world_size
        self._window_seconds, self._warmup_steps = min(window_seconds, MAX_WINDOW_TS), warmup_steps
        self._stages = list(batch_size_stages or ())
        self.register_buffer("total_examples", torch.tensor(0, dtype=torch.long))
        self.register_buffer("warmup_examples", torch.tensor(0, dtype=torch.long))
        self.register_buffer("time_lapse_after_warmup", torch.tensor(0, dtype=torch.double))
        self.register_buffer("attempt_examples", torch.tensor(0, dtype=torch.long), persistent=False)
        self._steps, self._last = 0, 0.0
        self._attempt_seconds, self._attempt_warmup = 0.0, 0
        self._window: deque[tuple[float, int]] = deque()  # seconds and samples of a step

    attempt_examples: Tensor

    def _examples(self) -> int:
        """Samples of all ranks in the current step."""
        stages = (s for s in self._stages if s.max_iters is None or self._steps <= s.max_iters)
        stage = next(stages, None)
        return (self._batch_size if stage is None else stage.batch_size) * self._world_size

    def update(self) -> None:
        """Counts one step."""
        self._steps += 1
        now, examples = monotonic(), self._examples()
        self.total_examples += examples
        self.attempt_examples += examples
        if self._steps <= self._warmup_steps:
            self.warmup_examples += examples
            self._attempt_warmup += examples
        else:
            self.time_lapse_after_warmup += now - self._last
            self._attempt_seconds += now - self._last
            self._window.append((now - self._last, examples))
            while sum(seconds for seconds, _ in self._window) - self._window[0][0] >= self._window_seconds:
                self._window.popleft()
        self._last = now

    def compute(self) -> dict[str, Tensor]:
        """Samples so far, and after the warm-up samples per second. Not collective.

        The attempt is what this process measured since it started; a state dict does not have it.
        """
        values = {
            (MetricName.TOTAL_EXAMPLES, MetricPrefix.DEFAULT): self.total_examples.clone(),
            (MetricName.ATTEMPT_EXAMPLES, MetricPrefix.DEFAULT): self.attempt_examples.clone(),
        }
        if self._window:
            timed = self.total_examples - self.warmup_examples
            seconds = sum(seconds for seconds, _ in self._window)
            rates = {
                MetricPrefix.LIFETIME: float(timed) / float(self.time_lapse_after_warmup),
                MetricPrefix.WINDOW: sum(examples for _, examples in self._window) / seconds,
                MetricPrefix.ATTEMPT: (int(self.attempt_examples) - self._attempt_warmup) / self._attempt_seconds,
            }
            values |= {
                (MetricName.THROUGHPUT, prefix): torch.tensor(rate, dtype=torch.double)
                for prefix, rate in rates.items()
            }
        space = MetricNamespace.THROUGHPUT
        return {compose_metric_key(space, str(space), *key): value for key, value in values.items()}
