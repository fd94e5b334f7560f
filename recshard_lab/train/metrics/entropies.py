"""Variants of normalized entropy and calibration: of some samples, of groups, and after downsampling.

Normalized entropy is log loss over that of predicting the mean label (He et al. 2014, "Practical Lessons from
Predicting Clicks on Ads at Facebook", section 3).

Shape letters: k sums of a metric, G groups.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from recshard_lab.train.metrics.formulas import group_sums, ratio, recalibrated
from recshard_lab.train.metrics.rec_metric import RecMetric, Samples
from recshard_lab.train.metrics.sums import ETA, CalibrationMetric, NEMetric, cross_entropy, normalized


class UnweightedNEMetric(NEMetric):
    """Normalized entropy with weight 1 for each sample."""

    namespace = "unweighted_ne"

    def _sums(self, samples: Samples) -> Tensor:
        return super()._sums(replace(samples, weights=torch.ones_like(samples.weights)))


class NEPositiveMetric(NEMetric):
    """The log loss of the positive samples over the log loss of predicting the mean label for all samples.

    ``-sum(w y log p) / (-sum(w) (r log r + (1 - r) log(1 - r)))`` with the mean label r, as TorchRec defines it.
    """

    namespace = "ne_positive"

    def _sums(self, samples: Samples) -> Tensor:
        loss = -samples.weights * samples.labels * samples.predictions.clamp(ETA, 1 - ETA).log()
        return torch.cat([loss.sum(0, keepdim=True), super()._sums(samples)[1:]])


class CaliFreeNEMetric(NEMetric):
    """Log loss over the log loss of predicting the mean prediction: an error of the mean has no effect on it.

    ``sum(w CE(y, p)) / sum(w CE(y, mean p))``. TorchRec's metric of this name is this divided by
    ``-sum(w) (r log2 r + (1 - r) log2(1 - r))``, with the mean label r.
    """

    namespace = "cali_free_ne"
    num_sums = 4

    def _sums(self, samples: Samples) -> Tensor:
        return torch.cat([super()._sums(samples), (samples.weights * samples.predictions).sum(0, keepdim=True)])

    def _value(self, sums: Tensor) -> Tensor:
        loss, count, positive, predicted = sums
        mean = ratio(predicted, count).clamp(ETA, 1 - ETA)
        return ratio(loss, -(positive * mean.log() + (count - positive) * torch.log1p(-mean)))


class SegmentedNEMetric(NEMetric):
    """Normalized entropy of each group of samples.

    Args:
        num_groups: G. ``groups`` of ``update`` are integers in ``[0, num_groups)``.
        others: as of `RecMetric`.

    Raises:
        ValueError: no group, or a sample of another group.
    """

    namespace = "segmented_ne"
    grouped = True

    def __init__(self, *args: Any, num_groups: int = 1, **kwargs: Any) -> None:
        if isinstance(num_groups, bool) or not isinstance(num_groups, int) or num_groups < 1:
            raise ValueError(f"SegmentedNEMetric: num_groups must be an integer from 1, got {num_groups!r}")
        self.num_groups, self.num_sums = num_groups, 3 * num_groups
        super().__init__(*args, **kwargs)

    def _checked(
        self,
        task: str,
        predictions: Tensor | None,
        labels: Tensor | None,
        weights: Tensor | None,
        groups: Tensor | None,
    ) -> Samples:
        samples = super()._checked(task, predictions, labels, weights, groups)
        wrong = (samples.groups < 0) | (samples.groups >= self.num_groups)
        if bool(wrong.any()):
            raise ValueError(
                f"task {task!r}: group {int(samples.groups[wrong][0])} is not in [0, {self.num_groups}). "
                f"Fix: num_groups={int(samples.groups.max()) + 1}, and no negative groups"
            )
        return samples

    def _sums(self, samples: Samples) -> Tensor:
        weights = samples.weights
        columns = torch.stack([weights * cross_entropy(samples), weights, weights * samples.labels])
        return group_sums(columns, samples.groups, self.num_groups).flatten()

    def _value(self, sums: Tensor) -> dict[str, Tensor]:
        values = normalized(sums.view(3, self.num_groups))
        return {f"segmented_ne_{group}": value for group, value in enumerate(values)}


class _OfDownsampled(RecMetric):
    def __init__(self, *args: Any, recalibration_coefficient: float = 1.0, **kwargs: Any) -> None:
        if not recalibration_coefficient > 0:
            raise ValueError(f"recalibration_coefficient must be above 0, got {recalibration_coefficient!r}")
        self.recalibration_coefficient = recalibration_coefficient
        super().__init__(*args, **kwargs)

    def _predicted(self, given: Tensor) -> Tensor:
        return recalibrated(super()._predicted(given).double(), self.recalibration_coefficient)


class RecalibratedNEMetric(_OfDownsampled, NEMetric):
    """Normalized entropy after `formulas.recalibrated`, for a model that was trained on a share of the non-clicks.

    Args:
        recalibration_coefficient: the share.
        others: as of `RecMetric`.

    Raises:
        ValueError: a coefficient that is not above 0.
    """

    namespace = "recalibrated_ne"


class RecalibratedCalibrationMetric(_OfDownsampled, CalibrationMetric):
    """Calibration after `formulas.recalibrated`. Arguments are those of `RecalibratedNEMetric`."""

    namespace = "recalibrated_calibration"


class ServingNEMetric(NEMetric):
    """Normalized entropy, and the number of samples with a weight above 0, of all steps so far."""

    namespace = "serving_ne"
    num_sums = 4

    def _sums(self, samples: Samples) -> Tensor:
        return torch.cat([super()._sums(samples), (samples.weights > 0).double().sum(0, keepdim=True)])

    def _value(self, sums: Tensor) -> dict[str, Tensor]:
        return {"ne": normalized(sums), "total_examples": sums[3]}


class ServingCalibrationMetric(CalibrationMetric):
    """Calibration, and the number of samples with a weight above 0."""

    namespace = "serving_calibration"
    num_sums = 3

    def _sums(self, samples: Samples) -> Tensor:
        return torch.cat([super()._sums(samples), (samples.weights > 0).double().sum(0, keepdim=True)])

    def _value(self, sums: Tensor) -> dict[str, Tensor]:
        return {"calibration": ratio(sums[0], sums[1]), "total_examples": sums[2]}
