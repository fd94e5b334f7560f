"""Samples per second of each task: ``torchrec.metrics.tower_qps``.

Shape letters: T tasks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recshard_lab.compat.metrics.config import BatchSizeStage
from recshard_lab.compat.metrics.names import MetricName, MetricNamespace, MetricPrefix
from recshard_lab.compat.metrics.rec_metric import (
    MetricComputationReport,
    RecMetric,
    RecMetricComputation,
    RecMetricException,
)

WARMUP_STEPS = 100
NUM_EXAMPLES, WARMUP_EXAMPLES, TIME_LAPSE = "num_examples", "warmup_examples", "time_lapse"


class TowerQPSMetricComputation(RecMetricComputation):
    """Samples of all ranks over the time of the slowest rank. The first step and warm-up steps are not timed.

    Args:
        warmup_steps: first steps that are not timed.
        others: as of `RecMetricComputation`.
    """

    num_examples: Tensor
    warmup_examples: Tensor
    time_lapse: Tensor

    def __init__(self, *args: Any, warmup_steps: int = WARMUP_STEPS, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._warmup_steps, self._steps, self._last = warmup_steps, 0, 0.0
        counts, seconds = (torch.zeros(self._n_tasks, dtype=dtype) for dtype in (torch.long, torch.double))
        self._add_state(NUM_EXAMPLES, counts, True, dist_reduce_fx="sum", persistent=True)
        self._add_state(WARMUP_EXAMPLES, counts, False, dist_reduce_fx="sum", persistent=True)
        self._add_state(TIME_LAPSE, seconds, True, dist_reduce_fx="max", persistent=True)

    def update(self, *, predictions: Tensor | None, labels: Tensor, weights: Tensor | None, **kwargs: Any) -> None:
        """Counts the samples of a step, and the time since the step before."""
        now, self._steps = time.perf_counter(), self._steps + 1
        count = torch.full_like(self.num_examples, labels.shape[-1])
        self.num_examples += count
        if self._steps <= max(self._warmup_steps, 1):
            self.warmup_examples += count
        else:
            seconds = torch.full_like(self.time_lapse, now - self._last)
            self.time_lapse += seconds
            self._aggregate_window_state(NUM_EXAMPLES, count, labels.shape[-1])
            self._aggregate_window_state(TIME_LAPSE, seconds, labels.shape[-1])
        self._last = now

    def _compute(self) -> list[MetricComputationReport]:
        lifetime = _rate(self.num_examples - self.warmup_examples, self.time_lapse)
        window = _rate(self.get_window_state(NUM_EXAMPLES), self.get_window_state(TIME_LAPSE))
        return [
            MetricComputationReport(MetricName.TOWER_QPS, MetricPrefix.LIFETIME, lifetime),
            MetricComputationReport(MetricName.TOWER_QPS, MetricPrefix.WINDOW, window),
            MetricComputationReport(MetricName.TOTAL_EXAMPLES, MetricPrefix.DEFAULT, self.num_examples.clone()),
        ]


def _rate(samples: Tensor, seconds: Tensor) -> Tensor:
    return torch.where(seconds > 0, samples / seconds, 0.0).double()


class TowerQPSMetric(RecMetric):
    """Samples per second of each task, for tasks of different numbers of samples.

    Args:
        warmup_steps: first steps that are not timed.
        batch_size_stages: accepted as in TorchRec, which divides samples by it. Here they are counted as they are.
        others: as of `RecMetric`.

    Raises:
        RecMetricException: ``fused_update_limit`` is above 0.
    """

    _namespace = MetricNamespace.TOWER_QPS
    _computation_class = TowerQPSMetricComputation

    def __init__(self, *args: Any, batch_size_stages: Sequence[BatchSizeStage] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self._fused_update_limit > 0:
            raise RecMetricException("steps of a timed metric are not joined. Fix: fused_update_limit=0")
