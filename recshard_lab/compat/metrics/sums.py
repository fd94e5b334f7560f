"""Metrics that are functions of sums: ``torchrec.metrics.ne``, ``calibration``, ``ctr``, ``mse`` and others.

Shape letters: T tasks, n samples.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recshard_lab.compat.metrics.names import MetricName, MetricNamespace, MetricPrefix
from recshard_lab.compat.metrics.rec_metric import MetricComputationReport, RecMetric, RecMetricComputation

CALIBRATION_NUM, CALIBRATION_DENOM = "calibration_num", "calibration_denom"
CTR_NUM, CTR_DENOM = "ctr_num", "ctr_denom"
ERROR_SUM, WEIGHTED_NUM_SAMPLES, WEIGHTED_NUM_PAIRS = "error_sum", "weighted_num_samples", "weighted_num_pairs"
LABEL_SUM, LABEL_SQUARED_SUM, PREDICTION_SUM = "label_sum", "label_squared_sum", "prediction_sum"
THRESHOLD = "threshold"

Get = Callable[[str], Tensor]


class SumsComputation(RecMetricComputation):
    """A computation whose states are sums over samples, fp64 ``[T]`` or of the shape of `_zeros`, with windows."""

    states: tuple[str, ...]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in self.states:
            self._add_state(name, self._zeros(name), add_window_state=True, dist_reduce_fx="sum", persistent=True)

    def _zeros(self, name: str) -> Tensor:
        """The first value of a state."""
        return torch.zeros(self._n_tasks, dtype=torch.double)

    @abstractmethod
    def _sums(self, labels: Tensor, predictions: Tensor, weights: Tensor, more: dict[str, Any]) -> dict[str, Tensor]:
        """State -> ``[T]`` of ``[T, n]``."""

    @abstractmethod
    def _values(self, get: Get) -> list[tuple[MetricName, Tensor]]:
        """Names and ``[T]`` values, from the states."""

    def update(self, *, predictions: Tensor | None, labels: Tensor, weights: Tensor | None, **kwargs: Any) -> None:
        """Adds samples to the sums."""
        assert predictions is not None
        weights = torch.ones_like(labels, dtype=predictions.dtype) if weights is None else weights
        for name, part in self._sums(labels, predictions, weights, kwargs).items():
            state = getattr(self, name)
            state += part
            self._aggregate_window_state(name, part, labels.shape[-1])

    def _compute(self) -> list[MetricComputationReport]:
        views = (
            (MetricPrefix.LIFETIME, lambda name: getattr(self, name)),
            (MetricPrefix.WINDOW, self.get_window_state),
        )
        return [
            MetricComputationReport(name, prefix, value) for prefix, get in views for name, value in self._values(get)
        ]


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """fp64, 0 where the denominator is not positive."""
    return torch.where(denominator <= 0.0, 0.0, numerator / denominator).double()


# ---- normalized entropy ----


def compute_cross_entropy(labels: Tensor, predictions: Tensor, weights: Tensor, eta: float) -> Tensor:
    """Weighted cross entropy of each sample, in bits.

    Args:
        labels, predictions, weights: of one shape.
        eta: predictions are clamped to at least this distance from 0 and 1.

    >>> compute_cross_entropy(torch.ones(1), torch.tensor([0.25]), torch.ones(1), 1e-12)
    tensor([2.], dtype=torch.float64)
    """
    chance = predictions.double().clamp(eta, 1 - eta)
    return -weights * (labels * chance.log2() + (1 - labels) * (1 - chance).log2())


def get_ne_states(labels: Tensor, predictions: Tensor, weights: Tensor, eta: float) -> dict[str, Tensor]:
    """The four sums of normalized entropy over the last dimension."""
    return {
        "cross_entropy_sum": compute_cross_entropy(labels, predictions, weights, eta).sum(-1),
        "weighted_num_samples": weights.sum(-1),
        "pos_labels": (weights * labels).sum(-1),
        "neg_labels": (weights * (1 - labels)).sum(-1),
    }


def compute_ne(
    ce_sum: Tensor,
    weighted_num_samples: Tensor,
    pos_labels: Tensor,
    neg_labels: Tensor,
    eta: float,
    allow_missing_label_with_zero_weight: bool = False,
) -> Tensor:
    """Cross entropy over that of predicting the mean label (He et al. 2014, section 3).

    Args:
        ce_sum, weighted_num_samples, pos_labels, neg_labels: the sums of `get_ne_states`.
        eta: the mean label is clamped to at least this distance from 0 and 1.
        allow_missing_label_with_zero_weight: whether the value without samples is `eta`. Otherwise it is NaN.
    """
    rate = (pos_labels.double() / weighted_num_samples).clamp(eta, 1 - eta)
    baseline = -(pos_labels * rate.log2() + neg_labels * (1 - rate).log2())
    value = ce_sum / baseline
    return torch.where(weighted_num_samples == 0, eta, value) if allow_missing_label_with_zero_weight else value


def compute_logloss(ce_sum: Tensor, pos_labels: Tensor, neg_labels: Tensor, eta: float) -> Tensor:
    """Cross entropy per sample, in bits."""
    return ce_sum / (pos_labels + neg_labels).clamp(min=eta)


class NEMetricComputation(SumsComputation):
    """Normalized entropy.

    Args:
        include_logloss: whether to report the cross entropy too.
        others: as of `RecMetricComputation`.
    """

    states: tuple[str, ...] = ("cross_entropy_sum", "weighted_num_samples", "pos_labels", "neg_labels")
    eta = 1e-12

    def __init__(
        self,
        *args: Any,
        include_logloss: bool = False,
        allow_missing_label_with_zero_weight: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._include_logloss = include_logloss
        self._allow_missing_label_with_zero_weight = allow_missing_label_with_zero_weight

    def _sums(self, labels: Tensor, predictions: Tensor, weights: Tensor, more: dict[str, Any]) -> dict[str, Tensor]:
        return get_ne_states(labels, predictions, weights, self.eta)

    def _values(self, get: Get) -> list[tuple[MetricName, Tensor]]:
        loss, count, positive, negative = map(get, self.states)
        missing = self._allow_missing_label_with_zero_weight
        values = [(MetricName.NE, compute_ne(loss, count, positive, negative, self.eta, missing))]
        if self._include_logloss:
            values.append((MetricName.LOG_LOSS, compute_logloss(loss, positive, negative, self.eta)))
        return values


class NEMetric(RecMetric):
    """Normalized entropy; see `NEMetricComputation`."""

    _namespace = MetricNamespace.NE
    _computation_class = NEMetricComputation


# ---- ratios ----


def get_calibration_states(labels: Tensor, predictions: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """The sums of calibration over the last dimension."""
    return {CALIBRATION_NUM: (predictions * weights).sum(-1), CALIBRATION_DENOM: (labels * weights).sum(-1)}


def compute_calibration(calibration_num: Tensor, calibration_denom: Tensor) -> Tensor:
    """Predicted clicks over clicks; 0 without a click."""
    return _ratio(calibration_num, calibration_denom)


class CalibrationMetricComputation(SumsComputation):
    """Predicted clicks over clicks."""

    states = (CALIBRATION_NUM, CALIBRATION_DENOM)

    def _sums(self, labels: Tensor, predictions: Tensor, weights: Tensor, more: dict[str, Any]) -> dict[str, Tensor]:
        return get_calibration_states(labels, predictions, weights)

    def _values(self, get: Get) -> list[tuple[MetricName, Tensor]]:
        return [(MetricName.CALIBRATION, compute_calibration(*map(get, self.states)))]


class CalibrationMetric(RecMetric):
    """Predicted clicks over clicks."""

    _namespace = MetricNamespace.CALIBRATION
    _computation_class = CalibrationMetricComputation


def get_ctr_states(labels: Tensor, predictions: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """The sums of the click rate over the last dimension."""
    return {CTR_NUM: (labels * weights).sum(-1), CTR_DENOM: weights.sum(-1)}


def compute_ctr(ctr_num: Tensor, ctr_denom: Tensor) -> Tensor:
    """The mean label; 0 without samples."""
    return _ratio(ctr_num, ctr_denom)


class CTRMetricComputation(SumsComputation):
    """The mean label."""

    states = (CTR_NUM, CTR_DENOM)

    def _sums(self, labels: Tensor, predictions: Tensor, weights: Tensor, more: dict[str, Any]) -> dict[str, Tensor]:
        return get_ctr_states(labels, predictions, weights)

    def _values(self, get: Get) -> list[tuple[MetricName, Tensor]]:
        return [(MetricName.CTR, compute_ctr(*map(get, self.states)))]


class CTRMetric(RecMetric):
    """The mean label."""

    _namespace = MetricNamespace.CTR
    _computation_class = CTRMetricComputation


class WeightedAvgMetricComputation(SumsComputation):
    """The mean prediction by weight; 0 without samples."""

    states = ("weighted_sum", "weighted_num_samples")

    def _sums(self, labels: Tensor, predictions: Tensor, weights: Tensor, more: dict[str, Any]) -> dict[str, Tensor]:
        return {"weighted_sum": (predictions * weights).sum(-1), "weighted_num_samples": weights.sum(-1)}

    def _values(self, get: Get) -> list[tuple[MetricName, Tensor]]:
        return [(MetricName.WEIGHTED_AVG, get_mean(*map(get, self.states)))]


def get_mean(value_sum: Tensor, num_samples: Tensor) -> Tensor:
    """A sum over its number of samples; 0 without samples."""
    return _ratio(value_sum, num_samples)


class WeightedAvgMetric(RecMetric):
    """The mean prediction by weight."""

    _namespace = MetricNamespace.WEIGHTED_AVG
    _computation_class = WeightedAvgMetricComputation


# ---- errors ----


def get_mse_states(labels: Tensor, predictions: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """The sums of the squared error over the last dimension."""
    return {
        ERROR_SUM: (weights * (labels - predictions.double()) ** 2).sum(-1),
        WEIGHTED_NUM_SAMPLES: weights.sum(-1),
        LABEL_SUM: (weights * labels).sum(-1),
        LABEL_SQUARED_SUM: (weights * labels**2).sum(-1),
    }


def compute_mse(error_sum: Tensor, weighted_num_samples: Tensor) -> Tensor:
    """The mean squared error; 0 without samples."""
    return _ratio(error_sum, weighted_num_samples)


def compute_rmse(error_sum: Tensor, weighted_num_samples: Tensor) -> Tensor:
    """The root of the mean squared error; 0 without samples."""
    return compute_mse(error_sum, weighted_num_samples).sqrt()


def compute_r_squared(
    error_sum: Tensor, weighted_num_samples: Tensor, label_sum: Tensor, label_squared_sum: Tensor
) -> Tensor:
    """The share of the variance of the labels that predictions explain."""
    variance = label_squared_sum.double() - label_sum**2 / weighted_num_samples
    return 1 - error_sum / variance


class MSEMetricComputation(SumsComputation):
    """The mean squared error and its root.

    Args:
        include_r_squared: whether to report the share of the variance that is explained.
        others: as of `RecMetricComputation`.
    """

    states = (ERROR_SUM, WEIGHTED_NUM_SAMPLES, LABEL_SUM, LABEL_SQUARED_SUM)

    def __init__(self, *args: Any, include_r_squared: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._include_r_squared = include_r_squared

    def _sums(self, labels: Tensor, predictions: Tensor, weights: Tensor, more: dict[str, Any]) -> dict[str, Tensor]:
        return get_mse_states(labels, predictions, weights)

    def _values(self, get: Get) -> list[tuple[MetricName, Tensor]]:
        error, count, *labels = map(get, self.states)
        values = [(MetricName.MSE, compute_mse(error, count)), (MetricName.RMSE, compute_rmse(error, count))]
        if self._include_r_squared:
            values.append((MetricName.R_SQUARED, compute_r_squared(error, count, *labels)))
        return values


class MSEMetric(RecMetric):
    """The mean squared error and its root."""

    _namespace = MetricNamespace.MSE
    _computation_class = MSEMetricComputation


def get_mae_states(labels: Tensor, predictions: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """The sums of the absolute error over the last dimension."""
    error = (weights * (labels - predictions.double()).abs()).sum(-1)
    return {ERROR_SUM: error, WEIGHTED_NUM_SAMPLES: weights.sum(-1)}


def compute_mae(error_sum: Tensor, weighted_num_samples: Tensor) -> Tensor:
    """The mean absolute error; 0 without samples."""
    return _ratio(error_sum, weighted_num_samples)


class MAEMetricComputation(SumsComputation):
    """The mean absolute error."""

    states = (ERROR_SUM, WEIGHTED_NUM_SAMPLES)

    def _sums(self, labels: Tensor, predictions: Tensor, weights: Tensor, more: dict[str, Any]) -> dict[str, Tensor]:
        return get_mae_states(labels, predictions, weights)

    def _values(self, get: Get) -> list[tuple[MetricName, Tensor]]:
        return [(MetricName.MAE, compute_mae(*map(get, self.states)))]


class MAEMetric(RecMetric):
    """The mean absolute error."""

    _namespace = MetricNamespace.MAE
    _computation_class = MAEMetricComputation


def get_xauc_states(labels: Tensor, predictions: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Of all pairs of samples: the weight of those that predictions order as labels do, and of all."""
    first, second = torch.triu_indices(labels.shape[-1], labels.shape[-1], offset=1, device=labels.device)
    predicted, labeled = (
        (values[..., first] - values[..., second]).sign() for values in (predictions.double(), labels)
    )
    pairs = weights[..., first] * weights[..., second]
    return {ERROR_SUM: (pairs * (predicted == labeled).double()).sum(-1), WEIGHTED_NUM_PAIRS: pairs.sum(-1)}


def compute_xauc(error_sum: Tensor, weighted_num_pairs: Tensor) -> Tensor:
    """The share of pairs in the right order; 0 without pairs."""
    return _ratio(error_sum, weighted_num_pairs)


class XAUCMetricComputation(SumsComputation):
    """The share of the pairs of a batch that predictions order as labels do."""

    states = (ERROR_SUM, WEIGHTED_NUM_PAIRS)

    def _sums(self, labels: Tensor, predictions: Tensor, weights: Tensor, more: dict[str, Any]) -> dict[str, Tensor]:
        return get_xauc_states(labels, predictions, weights)

    def _values(self, get: Get) -> list[tuple[MetricName, Tensor]]:
        return [(MetricName.XAUC, compute_xauc(*map(get, self.states)))]


class XAUCMetric(RecMetric):
    """The share of the pairs of a batch that predictions order as labels do."""

    _namespace = MetricNamespace.XAUC
    _computation_class = XAUCMetricComputation


# ---- classes at a threshold ----


def get_accuracy_states(
    labels: Tensor, predictions: Tensor, weights: Tensor | None, threshold: float = 0.5
) -> dict[str, Tensor]:
    """The sums of accuracy over the last dimension. Predictions of `threshold` and more are of class 1."""
    weights = torch.ones_like(predictions) if weights is None else weights
    right = (predictions >= threshold).to(labels.dtype) == labels
    return {"accuracy_sum": (weights * right).sum(-1), "weighted_num_samples": weights.sum(-1)}


def compute_accuracy(accuracy_sum: Tensor, weighted_num_samples: Tensor) -> Tensor:
    """The share of samples of the right class; 0 without samples."""
    return _ratio(accuracy_sum, weighted_num_samples)


def _true_and_false(
    labels: Tensor, predictions: Tensor, weights: Tensor | None, threshold: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights of true positives, false positives and false negatives."""
    weights = torch.ones_like(predictions) if weights is None else weights
    positive, negative = (predictions >= threshold).to(weights.dtype), (predictions <= threshold).to(weights.dtype)
    return (
        (weights * positive * labels).sum(-1),
        (weights * positive * (1 - labels)).sum(-1),
        (weights * negative * labels).sum(-1),
    )


def get_precision_states(
    labels: Tensor, predictions: Tensor, weights: Tensor | None, threshold: float = 0.5
) -> dict[str, Tensor]:
    """The sums of precision over the last dimension."""
    true, false, _ = _true_and_false(labels, predictions, weights, threshold)
    return {"true_pos_sum": true, "false_pos_sum": false}


def compute_precision(num_true_positives: Tensor, num_false_positives: Tensor) -> Tensor:
    """The share of predicted positives that are positive; 0 without predicted positives."""
    return _ratio(num_true_positives, num_true_positives + num_false_positives)


def get_recall_states(
    labels: Tensor, predictions: Tensor, weights: Tensor | None, threshold: float = 0.5
) -> dict[str, Tensor]:
    """The sums of recall over the last dimension. A prediction that equals `threshold` counts in both."""
    true, _, false = _true_and_false(labels, predictions, weights, threshold)
    return {"true_pos_sum": true, "false_neg_sum": false}


def compute_recall(num_true_positives: Tensor, num_false_negitives: Tensor) -> Tensor:
    """The share of positives that are predicted, in the dtype of the sums; 0 without positives."""
    return _ratio(num_true_positives, num_true_positives + num_false_negitives).to(num_true_positives.dtype)


class _AtThreshold(SumsComputation):
    def __init__(self, *args: Any, threshold: float = 0.5, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._threshold = threshold


class AccuracyMetricComputation(_AtThreshold):
    """The share of samples of the right class.

    Args:
        threshold: predictions of this and more are of class 1.
        others: as of `RecMetricComputation`.
    """

    states = ("accuracy_sum", "weighted_num_samples")

    def _sums(self, labels: Tensor, predictions: Tensor, weights: Tensor, more: dict[str, Any]) -> dict[str, Tensor]:
        return get_accuracy_states(labels, predictions, weights, self._threshold)

    def _values(self, get: Get) -> list[tuple[MetricName, Tensor]]:
        return [(MetricName.ACCURACY, compute_accuracy(*map(get, self.states)))]


class AccuracyMetric(RecMetric):
    """The share of samples of the right class; see `AccuracyMetricComputation`."""

    _namespace = MetricNamespace.ACCURACY
    _computation_class = AccuracyMetricComputation


class PrecisionMetricComputation(_AtThreshold):
    """The share of predicted positives that are positive. Arguments are those of `AccuracyMetricComputation`."""

    states = ("true_pos_sum", "false_pos_sum")

    def _sums(self, labels: Tensor, predictions: Tensor, weights: Tensor, more: dict[str, Any]) -> dict[str, Tensor]:
        return get_precision_states(labels, predictions, weights, self._threshold)

    def _values(self, get: Get) -> list[tuple[MetricName, Tensor]]:
        return [(MetricName.PRECISION, compute_precision(*map(get, self.states)))]


class PrecisionMetric(RecMetric):
    """The share of predicted positives that are positive."""

    _namespace = MetricNamespace.PRECISION
    _computation_class = PrecisionMetricComputation


class RecallMetricComputation(_AtThreshold):
    """The share of positives that are predicted. Arguments are those of `AccuracyMetricComputation`."""

    states = ("true_pos_sum", "false_neg_sum")

    def _sums(self, labels: Tensor, predictions: Tensor, weights: Tensor, more: dict[str, Any]) -> dict[str, Tensor]:
        return get_recall_states(labels, predictions, weights, self._threshold)

    def _values(self, get: Get) -> list[tuple[MetricName, Tensor]]:
        return [(MetricName.RECALL, compute_recall(*map(get, self.states)))]


class RecallMetric(RecMetric):
    """The share of positives that are predicted."""

    _namespace = MetricNamespace.RECALL
    _computation_class = RecallMetricComputation
