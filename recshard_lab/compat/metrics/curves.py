"""Curves of a window's samples: ``torchrec.metrics.auprc`` and ``rauc``.

Shape letters: T tasks, n samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from recshard_lab.compat.metrics.names import MetricName, MetricNamespace, MetricPrefix
from recshard_lab.compat.metrics.order import GROUPING_KEYS, WindowComputation, one_row
from recshard_lab.compat.metrics.rec_metric import MetricComputationReport, RecMetric
from recshard_lab.train.metrics.formulas import average_precision, discordant_pairs

Samples = Sequence[Tensor] | Tensor


def _per_group(value: Callable[..., Tensor], n_tasks: int, columns: Sequence[Tensor], grouping_keys: Tensor) -> Tensor:
    """The mean over groups, ``[T]``; 0.5 without groups."""
    groups = [grouping_keys == key for key in grouping_keys.unique()]
    values = [value(n_tasks, *(column[:, own] for column in columns)) for own in groups]
    return torch.stack(values).mean(0) if values else columns[0].new_full((n_tasks,), 0.5)


def compute_auprc(n_tasks: int, predictions: Samples, labels: Samples, weights: Samples) -> Tensor:
    """The area under the precision-recall curve of each task, ``[T]``; 0 without a positive label.

    Args:
        n_tasks: T.
        predictions, labels, weights: ``[T, n]``, or a list of such parts.

    >>> compute_auprc(1, torch.tensor([[0.9, 0.4, 0.6]]), torch.tensor([[1.0, 0, 0]]), torch.ones(1, 3))
    tensor([1.])
    """
    rows = zip(one_row(predictions), one_row(labels), one_row(weights), strict=True)
    return torch.stack([average_precision(*row) for row in rows])


def compute_auprc_per_group(
    n_tasks: int, predictions: Samples, labels: Samples, weights: Samples, grouping_keys: Tensor
) -> Tensor:
    """The mean of `compute_auprc` over groups, ``[T]``.

    Args:
        n_tasks, predictions, labels, weights: as of `compute_auprc`.
        grouping_keys: ``[n]``, the group of each sample.
    """
    return _per_group(compute_auprc, n_tasks, [one_row(predictions), one_row(labels), one_row(weights)], grouping_keys)


def compute_rauc(n_tasks: int, predictions: Samples, labels: Samples, weights: Samples) -> Tensor:
    """The share of pairs that predictions do not order against their labels, ``[T]``. Weights do not count.

    0.5 with fewer than 2 samples, for which TorchRec raises ZeroDivisionError.

    Args:
        n_tasks: T.
        predictions, labels, weights: ``[T, n]``, or a list of such parts.
    """

    def share(scores: Tensor, targets: Tensor) -> float:
        pairs = len(scores) * (len(scores) - 1) / 2
        return 1 - discordant_pairs(scores, targets) / pairs if pairs else 0.5

    return torch.tensor([share(*row) for row in zip(one_row(predictions), one_row(labels), strict=True)])


def compute_rauc_per_group(
    n_tasks: int, predictions: Samples, labels: Samples, weights: Samples, grouping_keys: Tensor
) -> Tensor:
    """The mean of `compute_rauc` over groups, ``[T]``. Arguments are those of `compute_auprc_per_group`."""
    return _per_group(compute_rauc, n_tasks, [one_row(predictions), one_row(labels), one_row(weights)], grouping_keys)


class AUPRCMetricComputation(WindowComputation):
    """The area under the precision-recall curve of the window, from its samples.

    The lifetime value is the mean of the windows at each ``compute()`` that follows an ``update()``, by the weight of
    their samples; 0.5 before the first sample.

    Args:
        grouped_auprc: whether to report also the mean over groups, which ``required_inputs["grouping_keys"]`` names.
        others: as of `RecMetricComputation`.
    """

    def __init__(self, *args: Any, grouped_auprc: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, grouped=grouped_auprc, **kwargs)
        self._forget()

    def _forget(self) -> None:
        self._area, self._weight = (torch.zeros(self._n_tasks, dtype=torch.double) for _ in range(2))
        self._changed = False

    def update(self, *, predictions: Tensor | None, labels: Tensor, weights: Tensor | None, **kwargs: Any) -> None:
        """As `WindowComputation.update`."""
        super().update(predictions=predictions, labels=labels, weights=weights, **kwargs)
        self._changed = True

    def _compute(self) -> list[MetricComputationReport]:
        scores, labels, weights, keys = self._samples()
        areas = compute_auprc(self._n_tasks, scores, labels, weights)
        if self._changed:
            total = weights.sum(-1).double().cpu()
            self._area, self._weight = self._area + areas.cpu() * total, self._weight + total
            self._changed = False
        lifetime = torch.where(self._weight > 0, self._area / self._weight, 0.5)
        reports = [
            MetricComputationReport(MetricName.AUPRC, MetricPrefix.WINDOW, areas),
            MetricComputationReport(MetricName.AUPRC, MetricPrefix.LIFETIME, lifetime),
        ]
        if self._grouped:
            grouped = compute_auprc_per_group(self._n_tasks, scores, labels, weights, keys)
            reports.append(MetricComputationReport(MetricName.GROUPED_AUPRC, MetricPrefix.WINDOW, grouped))
        return reports

    def reset(self) -> None:
        """Removes all samples."""
        super().reset()
        self._forget()


class AUPRCMetric(RecMetric):
    """The area under the precision-recall curve; see `AUPRCMetricComputation`."""

    _namespace = MetricNamespace.AUPRC
    _computation_class = AUPRCMetricComputation

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if kwargs.get("grouped_auprc"):
            self._required_inputs.add(GROUPING_KEYS)


class RAUCMetricComputation(WindowComputation):
    """The share of the window's pairs that predictions do not order against their labels.

    Args:
        grouped_rauc: whether to report also the mean over groups, which ``required_inputs["grouping_keys"]`` names.
        others: as of `RecMetricComputation`.
    """

    def __init__(self, *args: Any, grouped_rauc: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, grouped=grouped_rauc, **kwargs)

    def _compute(self) -> list[MetricComputationReport]:
        scores, labels, weights, keys = self._samples()
        value = compute_rauc(self._n_tasks, scores, labels, weights)
        reports = [MetricComputationReport(MetricName.RAUC, MetricPrefix.WINDOW, value)]
        if self._grouped:
            grouped = compute_rauc_per_group(self._n_tasks, scores, labels, weights, keys)
            reports.append(MetricComputationReport(MetricName.GROUPED_RAUC, MetricPrefix.WINDOW, grouped))
        return reports


class RAUCMetric(RecMetric):
    """AUC of a regression; see `RAUCMetricComputation`."""

    _namespace = MetricNamespace.RAUC
    _computation_class = RAUCMetricComputation

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if kwargs.get("grouped_rauc"):
            self._required_inputs.add(GROUPING_KEYS)
