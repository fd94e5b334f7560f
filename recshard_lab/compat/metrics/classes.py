"""Metrics of classes: ``torchrec.metrics.multiclass_recall``, ``multi_label_precision`` and ``hindsight_target_pr``.

Shape letters: T tasks, n samples, C classes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recshard_lab.compat.metrics.names import MetricName, MetricNamespace, MetricPrefix
from recshard_lab.compat.metrics.rec_metric import MetricComputationReport, RecMetric, RecMetricException
from recshard_lab.compat.metrics.sums import Get, SumsComputation, compute_precision, compute_recall
from recshard_lab.train.metrics.formulas import at_thresholds, bits, true_at_k

THRESHOLD_GRANULARITY, TARGET_PRECISION = 1000, "target_precision"


class MulticlassRecallMetricComputation(SumsComputation):
    """The share of samples whose class is among the k + 1 highest predictions, ``[T, C]`` for k from 0.

    Args:
        number_of_classes: C. Predictions of a task are ``[n, C]``, and labels the numbers of classes ``[n]``.
        others: as of `RecMetricComputation`.
    """

    states = ("tp_at_k", "total_weights")

    def __init__(self, *args: Any, number_of_classes: int, **kwargs: Any) -> None:
        self._classes = number_of_classes
        super().__init__(*args, **kwargs)

    def _zeros(self, name: str) -> Tensor:
        return torch.zeros(self._n_tasks, self._classes, dtype=torch.double)

    def _sums(self, labels: Tensor, predictions: Tensor, weights: Tensor, more: dict[str, Any]) -> dict[str, Tensor]:
        hits = true_at_k(predictions, labels, weights)
        return {"tp_at_k": hits, "total_weights": weights.sum(-1, keepdim=True).expand_as(hits)}

    def _values(self, get: Get) -> list[tuple[MetricName, Tensor]]:
        return [(MetricName.MULTICLASS_RECALL, get("tp_at_k") / get("total_weights"))]


class MulticlassRecallMetric(RecMetric):
    """Recall of classes at each k; see `MulticlassRecallMetricComputation`.

    Raises:
        RecMetricException: ``fused_update_limit`` is above 0.
    """

    _namespace = MetricNamespace.MULTICLASS_RECALL
    _computation_class = MulticlassRecallMetricComputation

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._classes = kwargs.get("number_of_classes", 1)
        super().__init__(*args, **kwargs)
        if self._fused_update_limit > 0:
            raise RecMetricException("steps of multiclass recall are not joined. Fix: fused_update_limit=0")

    def _row(self, prediction: Tensor) -> Tensor:
        return prediction.reshape(1, -1, self._classes)


class MultiLabelPrecisionMetricComputation(SumsComputation):
    """Precision of each of C labels that a sample may have. Predictions and labels are integers, bit c for label c.

    Args:
        num_labels: C.
        label_names: a name for each. Default: ``label_0`` and so on. Fewer names than labels: the first labels only.
        others: as of `RecMetricComputation`.
    """

    def __init__(self, *args: Any, num_labels: int = 1, label_names: list[str] | None = None, **kwargs: Any) -> None:
        self._labels = (label_names or [f"label_{number}" for number in range(num_labels)])[:num_labels]
        self.states = tuple(f"{sign}_pos_sum_{name}" for name in self._labels for sign in ("true", "false"))
        super().__init__(*args, **kwargs)

    def _sums(self, labels: Tensor, predictions: Tensor, weights: Tensor, more: dict[str, Any]) -> dict[str, Tensor]:
        predicted, labeled = (bits(column, len(self._labels)) for column in (predictions, labels))
        true, false = ((weights * column).sum(-1) for column in (predicted * labeled, predicted * (1 - labeled)))
        return dict(zip(self.states, torch.stack([true, false], 1).flatten(0, 1), strict=True))

    def _values(self, get: Get) -> list[tuple[MetricName, Tensor]]:
        return []

    def _compute(self) -> list[MetricComputationReport]:
        reports = []
        for name in self._labels:
            states = [f"{sign}_pos_sum_{name}" for sign in ("true", "false")]
            for prefix, parts in (
                (MetricPrefix.LIFETIME, [getattr(self, state) for state in states]),
                (MetricPrefix.WINDOW, [self.get_window_state(state) for state in states]),
            ):
                value = compute_precision(*parts)
                reports.append(MetricComputationReport(MetricName.MULTI_LABEL_PRECISION, prefix, value, name))
        return reports


class MultiLabelPrecisionMetric(RecMetric):
    """Precision of each label; see `MultiLabelPrecisionMetricComputation`."""

    _namespace = MetricNamespace.MULTI_LABEL_PRECISION
    _computation_class = MultiLabelPrecisionMetricComputation


class HindsightTargetPRMetricComputation(SumsComputation):
    """The number of the lowest of 1000 thresholds whose precision reaches a target, and precision and recall at it.

    Thresholds are equidistant from 0 to 1. If none reaches the target, it is the last one.

    Args:
        target_precision: the target.
        others: as of `RecMetricComputation`.

    Raises:
        RecMetricException: fused tasks.
    """

    states = ("true_pos_sum", "false_pos_sum", "false_neg_sum")

    def __init__(self, *args: Any, target_precision: float = 0.5, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self._n_tasks > 1:
            raise RecMetricException("hindsight PR has one computation for each task. Fix: do not fuse tasks")
        self._target = target_precision

    def _zeros(self, name: str) -> Tensor:
        return torch.zeros(THRESHOLD_GRANULARITY, dtype=torch.double)

    def _sums(self, labels: Tensor, predictions: Tensor, weights: Tensor, more: dict[str, Any]) -> dict[str, Tensor]:
        sums = at_thresholds(labels, predictions, weights, THRESHOLD_GRANULARITY)
        return {name: own.squeeze(0) for name, own in zip(self.states, sums, strict=True)}

    def _values(self, get: Get) -> list[tuple[MetricName, Tensor]]:
        true, false, missed = map(get, self.states)
        precision = compute_precision(true, false)
        reached = (precision >= self._target).nonzero()
        at = int(reached[0]) if len(reached) else THRESHOLD_GRANULARITY - 1
        return [
            (MetricName.HINDSIGHT_TARGET_PR, torch.tensor([float(at)])),
            (MetricName.HINDSIGHT_TARGET_PRECISION, precision[at]),
            (MetricName.HINDSIGHT_TARGET_RECALL, compute_recall(true[at], missed[at])),
        ]


class HindsightTargetPRMetric(RecMetric):
    """Precision and recall at the threshold of a target precision; see `HindsightTargetPRMetricComputation`."""

    _namespace = MetricNamespace.HINDSIGHT_TARGET_PR
    _computation_class = HindsightTargetPRMetricComputation
