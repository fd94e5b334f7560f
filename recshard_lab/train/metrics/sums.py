"""Metrics that are functions of sums over samples: a few numbers per step, added over steps and ranks.

Shape letters: k sums of a metric, K steps of the window.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from recshard_lab.comm import all_reduce
from recshard_lab.train.metrics.formulas import ratio
from recshard_lab.train.metrics.rec_metric import RecMetric, Samples

ETA = 1e-12
"""Predictions are clamped to at least this distance from 0 and 1, so that logarithms are finite."""


class SumMetric(RecMetric):
    """A metric of k sums; has a value for the window and one for all steps so far (lifetime)."""

    probabilities = True
    num_sums: int

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
    def _value(self, sums: Tensor) -> Tensor | dict[str, Tensor]:
        """The metric of ``[k]``, or name -> value; NaN if it is undefined."""

    def _take(self, task: str, samples: Samples) -> None:
        sums = self._sums(samples)
        self._lifetime[task] = self._lifetime[task] + sums
        self._window[task].append(sums)

    def _values(self, task: str) -> dict[str, Tensor]:
        both = torch.stack([self._lifetime[task], self._steps(task).sum(0)])
        lifetime, window = all_reduce(both, self.env, f"metrics/{self.namespace}")
        named: dict[str, Tensor] = {}
        for view, sums in (("lifetime", lifetime), ("window", window)):
            value = self._value(sums)
            values = value if isinstance(value, dict) else {self.namespace: value}
            named |= {f"{view}_{name}": own for name, own in values.items()}
        return named

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


def cross_entropy(samples: Samples) -> Tensor:
    """Of each sample, in nats, without its weight."""
    chance = samples.predictions.clamp(ETA, 1 - ETA)
    return -(samples.labels * chance.log() + (1 - samples.labels) * torch.log1p(-chance))


def normalized(sums: Tensor) -> Tensor:
    """Normalized entropy of the sums of cross entropy, weights and positive labels, the first of ``[k]``."""
    rate = sums[2] / sums[1]
    entropy = -(torch.xlogy(rate, rate) + torch.xlogy(1 - rate, 1 - rate))
    return ratio(sums[0] / sums[1], entropy)


class LogLossMetric(SumMetric):
    """Mean cross entropy in nats."""

    namespace = "logloss"
    num_sums = 2

    def _sums(self, samples: Samples) -> Tensor:
        return torch.stack([(samples.weights * cross_entropy(samples)).sum(), samples.weights.sum()])

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
        loss = (samples.weights * cross_entropy(samples)).sum()
        return torch.stack([loss, samples.weights.sum(), (samples.weights * samples.labels).sum()])

    def _value(self, sums: Tensor) -> Tensor | dict[str, Tensor]:
        return normalized(sums)


class CalibrationMetric(SumMetric):
    """Predicted clicks over clicks; NaN without a click."""

    namespace = "calibration"
    num_sums = 2

    def _sums(self, samples: Samples) -> Tensor:
        weights = samples.weights
        return torch.stack([(weights * samples.predictions).sum(), (weights * samples.labels).sum()])

    def _value(self, sums: Tensor) -> Tensor | dict[str, Tensor]:
        return ratio(sums[0], sums[1])


class CTRMetric(SumMetric):
    """The mean label."""

    namespace = "ctr"
    num_sums = 2

    def _sums(self, samples: Samples) -> Tensor:
        return torch.stack([(samples.weights * samples.labels).sum(), samples.weights.sum()])

    def _value(self, sums: Tensor) -> Tensor:
        return sums[0] / sums[1]
