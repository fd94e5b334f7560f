"""Means, counts and reported numbers: ``torchrec.metrics.average``, ``nmse``, ``scalar``, ``output`` and others.

Shape letters: T tasks, n samples.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recshard_lab.compat.metrics.config import RecTaskInfo
from recshard_lab.compat.metrics.names import MetricName, MetricNamespace, MetricPrefix
from recshard_lab.compat.metrics.rec_metric import (
    MetricComputationReport,
    RecMetric,
    RecMetricComputation,
    RecMetricException,
)
from recshard_lab.compat.metrics.sums import (
    ERROR_SUM,
    LABEL_SUM,
    PREDICTION_SUM,
    WEIGHTED_NUM_SAMPLES,
    Get,
    SumsComputation,
    get_mean,
)

CONST_PRED_ERROR_SUM, REQUIRED_INPUTS = "const_pred_error_sum", "required_inputs"


class AverageMetricComputation(SumsComputation):
    """The mean label and the mean prediction by weight; 0 without samples."""

    states = (LABEL_SUM, PREDICTION_SUM, WEIGHTED_NUM_SAMPLES)

    def _sums(self, labels: Tensor, predictions: Tensor, weights: Tensor, more: dict[str, Any]) -> dict[str, Tensor]:
        columns = (weights * labels, weights * predictions, weights)
        return {name: column.sum(-1) for name, column in zip(self.states, columns, strict=True)}

    def _values(self, get: Get) -> list[tuple[MetricName, Tensor]]:
        label, prediction, count = map(get, self.states)
        return [
            (MetricName.LABEL_AVERAGE, get_mean(label, count)),
            (MetricName.PREDICTION_AVERAGE, get_mean(prediction, count)),
        ]


class AverageMetric(RecMetric):
    """The mean label and the mean prediction by weight."""

    _namespace = MetricNamespace.AVERAGE
    _computation_class = AverageMetricComputation


class NMSEMetricComputation(SumsComputation):
    """The squared error over that of predicting 1 for each sample, and its root; 0 if all labels are 1."""

    states = (ERROR_SUM, WEIGHTED_NUM_SAMPLES, CONST_PRED_ERROR_SUM)

    def _sums(self, labels: Tensor, predictions: Tensor, weights: Tensor, more: dict[str, Any]) -> dict[str, Tensor]:
        columns = (weights * (labels - predictions.double()) ** 2, weights, weights * (labels - 1.0).double() ** 2)
        return {name: column.sum(-1) for name, column in zip(self.states, columns, strict=True)}

    def _values(self, get: Get) -> list[tuple[MetricName, Tensor]]:
        nmse = get_mean(get(ERROR_SUM), get(CONST_PRED_ERROR_SUM))
        return [(MetricName.NMSE, nmse), (MetricName.NRMSE, nmse.sqrt())]


class NMSEMetric(RecMetric):
    """The squared error over that of predicting 1 for each sample, and its root."""

    _namespace = MetricNamespace.NMSE
    _computation_class = NMSEMetricComputation


class TensorWeightedAvgMetricComputation(SumsComputation):
    """The mean of a required input by weight; 0 without samples.

    Args:
        tasks: their ``tensor_name`` is the required input ``[n]``. If ``weighted`` is False, weights do not count.
        description: is added to the keys.
        others: as of `RecMetricComputation`.

    Raises:
        RecMetricException: a task without ``tensor_name``; in ``update``, a required input that is missing.
    """

    states = ("weighted_sum", "weighted_num_samples")

    def __init__(self, *args: Any, tasks: list[RecTaskInfo], description: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tasks, self._description = tasks, description
        for task in tasks:
            if task.tensor_name is None:
                raise RecMetricException(
                    f"task {task.name!r} names no required input to average. Fix: RecTaskInfo(tensor_name=)"
                )

    def _sums(self, labels: Tensor, predictions: Tensor, weights: Tensor, more: dict[str, Any]) -> dict[str, Tensor]:
        inputs = more.get(REQUIRED_INPUTS, {})
        for task in self._tasks:
            if task.tensor_name not in inputs:
                raise RecMetricException(
                    f"task {task.name!r} averages a required input that is missing. "
                    f"Fix: update(required_inputs={{{task.tensor_name!r}: ...}})"
                )
        values = torch.stack([inputs[task.tensor_name].reshape(-1) for task in self._tasks])
        weighted = torch.tensor([[task.weighted] for task in self._tasks], device=weights.device)
        weights = torch.where(weighted, weights, 1.0)
        return {"weighted_sum": (weights * values).sum(-1), "weighted_num_samples": weights.sum(-1)}

    def _values(self, get: Get) -> list[tuple[MetricName, Tensor]]:
        return [(MetricName.WEIGHTED_AVG, get_mean(*map(get, self.states)))]

    def _compute(self) -> list[MetricComputationReport]:
        return [
            MetricComputationReport(one.name, one.metric_prefix, one.value, self._description)
            for one in super()._compute()
        ]


class TensorWeightedAvgMetric(RecMetric):
    """The mean of a required input by weight; see `TensorWeightedAvgMetricComputation`."""

    _namespace = MetricNamespace.WEIGHTED_AVG
    _computation_class = TensorWeightedAvgMetricComputation

    def _get_task_kwargs(self, task_config: RecTaskInfo | list[RecTaskInfo]) -> dict[str, Any]:
        return {"tasks": task_config if isinstance(task_config, list) else [task_config]}

    def _get_task_required_inputs(self, task_config: RecTaskInfo | list[RecTaskInfo]) -> set[str]:
        tasks = task_config if isinstance(task_config, list) else [task_config]
        return {task.tensor_name for task in tasks if task.tensor_name is not None}


# ---- sums ----


class _Sum(SumsComputation):
    """One sum as a metric."""

    name: MetricName

    def _values(self, get: Get) -> list[tuple[MetricName, Tensor]]:
        return [(self.name, get(self.states[0]).clone())]


class NumPositiveSamplesMetricComputation(_Sum):
    """The weight of the positive samples."""

    states = ("weighted_pos_sum",)
    name = MetricName.NUM_POSITIVE_SAMPLES

    def _sums(self, labels: Tensor, predictions: Tensor, weights: Tensor, more: dict[str, Any]) -> dict[str, Tensor]:
        return {"weighted_pos_sum": (weights * labels).nansum(-1)}


class NumPositiveSamplesMetric(RecMetric):
    """The weight of the positive samples. Missing labels (NaN) do not count."""

    _namespace = MetricNamespace.NUM_POSITIVE_SAMPLES
    _computation_class = NumPositiveSamplesMetricComputation


class SumWeightsMetricComputation(_Sum):
    """The weight of the samples."""

    states = ("weighted_sum",)
    name = MetricName.SUM_WEIGHTS

    def _sums(self, labels: Tensor, predictions: Tensor, weights: Tensor, more: dict[str, Any]) -> dict[str, Tensor]:
        return {"weighted_sum": weights.sum(-1)}


class SumWeightsMetric(RecMetric):
    """The weight of the samples."""

    _namespace = MetricNamespace.SUM_WEIGHTS
    _computation_class = SumWeightsMetricComputation


class NumMissingLabelsMetricComputation(_Sum):
    """The weight of the samples whose label is NaN."""

    states = ("missing_label_sum",)
    name = MetricName.NUM_MISSING_LABELS

    def _sums(self, labels: Tensor, predictions: Tensor, weights: Tensor, more: dict[str, Any]) -> dict[str, Tensor]:
        return {"missing_label_sum": (weights * labels.isnan()).sum(-1)}


class NumMissingLabelsMetric(RecMetric):
    """The weight of the samples whose label is NaN."""

    _namespace = MetricNamespace.NUM_MISSING_LABELS
    _computation_class = NumMissingLabelsMetricComputation


class WeightedSumPredictionsMetricComputation(_Sum):
    """The sum of predictions by weight."""

    states = ("weighted_predictions_sum",)
    name = MetricName.WEIGHTED_SUM_PREDICTIONS

    def _sums(self, labels: Tensor, predictions: Tensor, weights: Tensor, more: dict[str, Any]) -> dict[str, Tensor]:
        return {"weighted_predictions_sum": (weights * predictions).sum(-1)}


class WeightedSumPredictionsMetric(RecMetric):
    """The sum of predictions by weight."""

    _namespace = MetricNamespace.WEIGHTED_SUM_PREDICTIONS
    _computation_class = WeightedSumPredictionsMetricComputation


# ---- reported numbers ----


class ScalarMetricComputation(RecMetricComputation):
    """The mean label of the last step, and the mean of those of the window's steps. NaN without steps.

    A step counts as one sample of the window, as in TorchRec.
    """

    labels: Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in ("labels", "window_count"):
            zeros = torch.zeros(self._n_tasks, dtype=torch.double)
            self._add_state(name, zeros, add_window_state=True, dist_reduce_fx="mean")

    def update(self, *, predictions: Tensor | None, labels: Tensor, weights: Tensor | None, **kwargs: Any) -> None:
        """Replaces the number of the last step."""
        self.labels = labels.detach().mean(-1)
        self._aggregate_window_state("labels", self.labels, 1)
        self._aggregate_window_state("window_count", torch.ones_like(self.labels), 1)

    def _compute(self) -> list[MetricComputationReport]:
        window = self.get_window_state("labels") / self.get_window_state("window_count")
        return [
            MetricComputationReport(MetricName.SCALAR, MetricPrefix.LIFETIME, self.labels),
            MetricComputationReport(MetricName.SCALAR, MetricPrefix.WINDOW, window),
        ]


class ScalarMetric(RecMetric):
    """The number that a model reports as a label; see `ScalarMetricComputation`."""

    _namespace = MetricNamespace.SCALAR
    _computation_class = ScalarMetricComputation


class OutputMetricComputation(RecMetricComputation):
    """The means of the required inputs ``latest_imp`` and ``total_latest_imp`` in the last step, added over ranks.

    Raises:
        RecMetricException: in ``update``, one of them is missing.
    """

    INPUTS = ("latest_imp", "total_latest_imp")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in self.INPUTS:
            zeros = torch.zeros(self._n_tasks, dtype=torch.double)
            self._add_state(name, zeros, add_window_state=False, dist_reduce_fx="sum")

    def update(self, *, predictions: Tensor | None, labels: Tensor, weights: Tensor | None, **kwargs: Any) -> None:
        """Replaces the numbers of the last step."""
        inputs = kwargs.get(REQUIRED_INPUTS, {})
        for name in self.INPUTS:
            if name not in inputs:
                raise RecMetricException(
                    f"the output metric reports {name!r}. Fix: update(required_inputs={{{name!r}: ...}})"
                )
            setattr(self, name, inputs[name].detach().double().mean().expand(self._n_tasks).clone())

    def _compute(self) -> list[MetricComputationReport]:
        return [
            MetricComputationReport(MetricName.OUTPUT, MetricPrefix.DEFAULT, getattr(self, name), f"_{name}")
            for name in self.INPUTS
        ]


class OutputMetric(RecMetric):
    """Two outputs of a model as they are; see `OutputMetricComputation`."""

    _namespace = MetricNamespace.OUTPUT
    _computation_class = OutputMetricComputation

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._required_inputs |= set(OutputMetricComputation.INPUTS)
