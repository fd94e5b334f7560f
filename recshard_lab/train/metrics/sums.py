"""Metrics that are functions of sums over samples: a few numbers per step, added over steps and ranks.

Shape letters: k sums of a metric, K steps of the window.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from recshard_lab.comm import all_reduce
from recshard_lab.train.metrics.rec_metric import RecMetric, Samples

ETA = 1e-12
"""Predictions are clamped to at least this distance from 0 and 1, so that logarithms are finite."""


class SumMetric(RecMetric):
    """A metric of k sums; has a value for the window and one for all steps so far (lifetime)."""

    probabilities = True
    num_sums: ClassVar[int]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._forget()

    def _forget(self) -> None:
        self._lifetime: dict[str, Tensor] = {
            task: torch.zeros(self.num_sums, dtype=torch.float64, device=self.device) for task in self.tasks
        }
        self._window: dict[str, deque[Tensor]] = defaultdict(lambda: deque(maxlen=self.window_steps))

    @abstractmethod
    def _sums(self, samples: Samples) -> Tensor:
        """``[k]`` of some samples."""

    @abstractmethod
    def _value(self, sums: Tensor) -> Tensor:
        """The metric of ``[k]``; NaN if it is undefined."""

    def _take(self, task: str, samples: Samples) -> None:
        sums = self._sums(samples)
        self._lifetime[task] = self._lifetime[task] + sums
        self._window[task].append(sums)

    def _values(self, task: str) -> dict[str, Tensor]:
        both = torch.stack([self._lifetime[task], self._steps(task).sum(0)])
        lifetime, window = all_reduce(both, self.env, f"metrics/{self.namespace}")
        name = self.namespace
        return {f"lifetime_{name}": self._value(lifetime), f"window_{name}": self._value(window)}

    def _steps(self, task: str) -> Tensor:
        none = self._lifetime[task].new_zeros(0, self.num_sums)
        return torch.stack(list(self._window[task])) if self._window[task] else none

    def _state(self, task: str) -> dict[str, Any]:
        every = torch.cat([self._lifetime[task].unsqueeze(0), self._steps(task)])
        summed = all_reduce(every.clone(), self.env, "metrics/state")
        return {"lifetime": summed[0].cpu(), "window": summed[1:].cpu()}

    def _load(self, task: str, state: Mapping[str, Any]) -> None:
        mine = 1.0 if self.env.rank == 0 else 0.0  # sums of all ranks are rank 0's from here on
        self._lifetime[task] = _share(state["lifetime"].to(self.device), mine)
        self._window[task].extend(_share(step.to(self.device), mine) for step in state["window"])


def _share(sums: Tensor, mine: float) -> Tensor:
    return sums.double().clone() if mine else torch.zeros_like(sums, dtype=torch.float64)


def _cross_entropy(samples: Samples) -> Tensor:
    chance = samples.predictions.clamp(ETA, 1 - ETA)
    return -(samples.labels * chance.log() + (1 - samples.labels) * torch.log1p(-chance))


class LogLossMetric(SumMetric):
    """Mean cross entropy in nats."""

    namespace = "logloss"
    num_sums = 2

    def _sums(self, samples: Samples) -> Tensor:
        return torch.stack([(samples.weights * _cross_entropy(samples)).sum(), samples.weights.sum()])

    def _value(self, sums: Tensor) -> Tensor:
        return sums[0] / sums[1]


class NEMetric(SumMetric):
    """Normalized entropy: log loss over that of predicting the mean label (He et al. 2014, section 3).

    >>> metric = NEMetric(batch_size=4)
    >>> metric.update(predictions=torch.full((4,), 0.25), labels=torch.tensor([0., 1., 0., 0.]))
    >>> metric.compute()["ne-DefaultTask|lifetime_ne"].item()
    1.0
    """

    namespace = "ne"
    num_sums = 3

    def _sums(self, samples: Samples) -> Tensor:
        loss = (samples.weights * _cross_entropy(samples)).sum()
        return torch.stack([loss, samples.weights.sum(), (samples.weights * samples.labels).sum()])

    def _value(self, sums: Tensor) -> Tensor:
        rate = sums[2] / sums[1]
        entropy = -(torch.xlogy(rate, rate) + torch.xlogy(1 - rate, 1 - rate))
        return sums[0] / sums[1] / torch.where(entropy > 0, entropy, torch.nan)


class CalibrationMetric(SumMetric):
    """Predicted clicks over clicks; NaN without a click."""

    namespace = "calibration"
    num_sums = 2

    def _sums(self, samples: Samples) -> Tensor:
        weights = samples.weights
        return torch.stack([(weights * samples.predictions).sum(), (weights * samples.labels).sum()])

    def _value(self, sums: Tensor) -> Tensor:
        return sums[0] / torch.where(sums[1] > 0, sums[1], torch.nan)


class CTRMetric(SumMetric):
    """The mean label."""

    namespace = "ctr"
    num_sums = 2

    def _sums(self, samples: Samples) -> Tensor:
        return torch.stack([(samples.weights * samples.labels).sum(), samples.weights.sum()])

    def _value(self, sums: Tensor) -> Tensor:
        return sums[0] / sums[1]
