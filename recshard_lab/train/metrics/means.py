"""Means, counts and errors of predictions. Weights count unless a metric says otherwise.

Shape letters: k sums of a metric.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recshard_lab.train.metrics.formulas import pairs_in_order, ratio
from recshard_lab.train.metrics.rec_metric import Samples
from recshard_lab.train.metrics.sums import SumMetric


class _OfAnyLabel(SumMetric):
    labels_are = "finite"
    probabilities = False


class WeightedAvgMetric(_OfAnyLabel):
    """The mean prediction, ``sum(w p) / sum(w)``."""

    namespace = "weighted_avg"
    num_sums = 2

    def _sums(self, samples: Samples) -> Tensor:
        return torch.stack([(samples.weights * samples.predictions).sum(), samples.weights.sum()])

    def _value(self, sums: Tensor) -> Tensor:
        return ratio(sums[0], sums[1])


class AverageMetric(_OfAnyLabel):
    """The mean label and the mean prediction, ``sum(w y) / sum(w)`` and ``sum(w p) / sum(w)``."""

    namespace = "average"
    num_sums = 3

    def _sums(self, samples: Samples) -> Tensor:
        weights = samples.weights
        return torch.stack([(weights * samples.labels).sum(), (weights * samples.predictions).sum(), weights.sum()])

    def _value(self, sums: Tensor) -> dict[str, Tensor]:
        return {"label_average": ratio(sums[0], sums[2]), "prediction_average": ratio(sums[1], sums[2])}


class MSEMetric(_OfAnyLabel):
    """The mean squared error, its root, and the share of the variance of the labels that predictions explain.

    ``R^2 = 1 - sum(w (y - p)^2) / sum(w (y - mean y)^2)`` (Draper and Smith 1998, "Applied Regression Analysis").

    >>> metric = MSEMetric(batch_size=2)
    >>> metric.update(predictions=torch.tensor([1.0, 2.0]), labels=torch.tensor([1.0, 4.0]))
    >>> metric.compute()["mse-DefaultTask|lifetime_mse"].item()
    2.0
    """

    namespace = "mse"
    num_sums = 4

    def _sums(self, samples: Samples) -> Tensor:
        weights, labels = samples.weights, samples.labels
        columns = [(labels - samples.predictions) ** 2, torch.ones_like(labels), labels, labels**2]
        return torch.stack([(weights * column).sum() for column in columns])

    def _value(self, sums: Tensor) -> dict[str, Tensor]:
        error, count, label, squared = sums
        mse = ratio(error, count)
        return {"mse": mse, "rmse": mse.sqrt(), "r_squared": 1 - ratio(error, squared - ratio(label**2, count))}


class MAEMetric(_OfAnyLabel):
    """The mean absolute error, ``sum(w |y - p|) / sum(w)``."""

    namespace = "mae"
    num_sums = 2

    def _sums(self, samples: Samples) -> Tensor:
        error = (samples.labels - samples.predictions).abs()
        return torch.stack([(samples.weights * error).sum(), samples.weights.sum()])

    def _value(self, sums: Tensor) -> Tensor:
        return ratio(sums[0], sums[1])


class NMSEMetric(_OfAnyLabel):
    """The squared error over that of predicting 1 for each sample, and its root.

    ``sum(w (y - p)^2) / sum(w (y - 1)^2)``, as TorchRec defines it; NaN if all labels are 1.
    """

    namespace = "nmse"
    num_sums = 2

    def _sums(self, samples: Samples) -> Tensor:
        weights, labels = samples.weights, samples.labels
        return torch.stack([(weights * (labels - p) ** 2).sum() for p in (samples.predictions, 1.0)])

    def _value(self, sums: Tensor) -> dict[str, Tensor]:
        nmse = ratio(sums[0], sums[1])
        return {"nmse": nmse, "nrmse": nmse.sqrt()}


class XAUCMetric(_OfAnyLabel):
    """The share of the pairs of a rank's batch that predictions order as labels do (`formulas.pairs_in_order`)."""

    namespace = "xauc"
    num_sums = 2

    def _sums(self, samples: Samples) -> Tensor:
        return torch.stack(pairs_in_order(samples.labels, samples.predictions, samples.weights))

    def _value(self, sums: Tensor) -> Tensor:
        return ratio(sums[0], sums[1])


class ScalarMetric(_OfAnyLabel):
    """The mean label of all samples, without weights: for a number that a model reports as a label."""

    namespace = "scalar"
    num_sums = 2

    def _sums(self, samples: Samples) -> Tensor:
        return torch.stack([samples.labels.sum(), torch.ones_like(samples.labels).sum()])

    def _value(self, sums: Tensor) -> Tensor:
        return ratio(sums[0], sums[1])


class _Sum(_OfAnyLabel):
    num_sums = 1

    def _value(self, sums: Tensor) -> Tensor:
        return sums[0]


class NumPositiveSamplesMetric(_Sum):
    """The weight of the positive samples, ``sum(w y)``."""

    namespace = "num_positive_samples"
    labels_are = "0 or 1"

    def _sums(self, samples: Samples) -> Tensor:
        return (samples.weights * samples.labels).sum(0, keepdim=True)


class SumWeightsMetric(_Sum):
    """The weight of the samples, ``sum(w)``."""

    namespace = "sum_weights"

    def _sums(self, samples: Samples) -> Tensor:
        return samples.weights.sum(0, keepdim=True)


class NumMissingLabelsMetric(_Sum):
    """The weight of the samples whose label is NaN."""

    namespace = "num_missing_labels"
    labels_are = "finite or NaN"

    def _sums(self, samples: Samples) -> Tensor:
        return (samples.weights * samples.labels.isnan()).sum(0, keepdim=True)


class WeightedSumPredictionsMetric(_Sum):
    """The sum of predictions, ``sum(w p)``."""

    namespace = "weighted_sum_predictions"

    def _sums(self, samples: Samples) -> Tensor:
        return (samples.weights * samples.predictions).sum(0, keepdim=True)
