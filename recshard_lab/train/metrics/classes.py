"""Metrics of classes: predictions at a threshold, several labels of a sample, and one of several classes.

Formulas of precision and recall: Manning et al. 2008, "Introduction to Information Retrieval", section 8.3.

Shape letters: n samples, k sums of a metric, C classes, B thresholds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recshard_lab.train.metrics.formulas import at_thresholds, bits, ratio, true_at_k
from recshard_lab.train.metrics.rec_metric import Samples
from recshard_lab.train.metrics.sums import SumMetric


class _AtThreshold(SumMetric):
    probabilities = False
    num_sums = 2

    def __init__(self, *args: Any, threshold: float = 0.5, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.threshold = threshold

    def _value(self, sums: Tensor) -> Tensor:
        return ratio(sums[0], sums[1])


class AccuracyMetric(_AtThreshold):
    """The share of samples whose class is predicted.

    Args:
        threshold: predictions of this and more are of class 1.
        others: as of `RecMetric`.
    """

    namespace = "accuracy"

    def _sums(self, samples: Samples) -> Tensor:
        right = (samples.predictions >= self.threshold) == samples.labels.bool()
        return torch.stack([(samples.weights * right).sum(), samples.weights.sum()])


class PrecisionMetric(_AtThreshold):
    """The share of predicted positives that are positive. Arguments are those of `AccuracyMetric`."""

    namespace = "precision"

    def _sums(self, samples: Samples) -> Tensor:
        predicted = samples.weights * (samples.predictions >= self.threshold)
        return torch.stack([(predicted * samples.labels).sum(), predicted.sum()])


class RecallMetric(_AtThreshold):
    """The share of positives that are predicted. Arguments are those of `AccuracyMetric`."""

    namespace = "recall"

    def _sums(self, samples: Samples) -> Tensor:
        positive = samples.weights * samples.labels
        return torch.stack([(positive * (samples.predictions >= self.threshold)).sum(), positive.sum()])


class HindsightTargetPRMetric(SumMetric):
    """The lowest of 1000 thresholds whose precision reaches a target, and precision and recall at it.

    Thresholds are equidistant from 0 to 1. If none reaches the target, the threshold is 1.

    Args:
        target_precision: the target.
        others: as of `RecMetric`.
    """

    namespace = "hindsight_target_pr"
    THRESHOLDS = 1000
    num_sums = 3 * THRESHOLDS

    def __init__(self, *args: Any, target_precision: float = 0.5, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.target_precision = target_precision

    def _sums(self, samples: Samples) -> Tensor:
        return torch.cat(at_thresholds(samples.labels, samples.predictions, samples.weights, self.THRESHOLDS))

    def _value(self, sums: Tensor) -> dict[str, Tensor]:
        true, false, missed = sums.view(3, self.THRESHOLDS)
        precision = ratio(true, true + false)
        reached = (precision >= self.target_precision).nonzero()
        at = int(reached[0]) if len(reached) else self.THRESHOLDS - 1
        return {
            "hindsight_target_threshold": sums.new_tensor(at / (self.THRESHOLDS - 1)),
            "hindsight_target_precision": precision[at],
            "hindsight_target_recall": ratio(true[at], true[at] + missed[at]),
        }


class MultiLabelPrecisionMetric(SumMetric):
    """Precision of each of C labels that a sample may have. Predictions and labels are integers, bit c for label c.

    Args:
        num_labels: C.
        label_names: a name for each. Default: ``label_0`` and so on.
        others: as of `RecMetric`.

    Raises:
        ValueError: another number of names.
    """

    namespace = "multi_label_precision"
    labels_are = "integers from 0"
    probabilities = False

    def __init__(
        self, *args: Any, num_labels: int = 1, label_names: Sequence[str] | None = None, **kwargs: Any
    ) -> None:
        self.label_names = list(label_names or (f"label_{number}" for number in range(num_labels)))
        if not 1 <= num_labels <= 52 or len(self.label_names) != num_labels:  # fp64 has integers of 53 bits
            raise ValueError(
                f"MultiLabelPrecisionMetric: num_labels must be from 1 to 52, each with a name, got {num_labels} with "
                f"{len(self.label_names)} names"
            )
        self.num_sums = 2 * num_labels
        super().__init__(*args, **kwargs)

    def _sums(self, samples: Samples) -> Tensor:
        predicted, labeled = (bits(column, len(self.label_names)) for column in (samples.predictions, samples.labels))
        return torch.cat([(samples.weights * column).sum(-1) for column in (predicted * labeled, predicted)])

    def _value(self, sums: Tensor) -> dict[str, Tensor]:
        values = ratio(*sums.chunk(2))
        return {f"multi_label_precision_{name}": own for name, own in zip(self.label_names, values, strict=True)}


class MulticlassRecallMetric(SumMetric):
    """The share of samples whose class is among the k + 1 highest predictions, ``[C]`` for k from 0.

    Args:
        number_of_classes: C. Predictions are ``[n, C]``, and labels the numbers of classes.
        others: as of `RecMetric`.

    Raises:
        ValueError: no class.
    """

    namespace = "multiclass_recall"
    labels_are = "integers from 0"
    probabilities = False

    def __init__(self, *args: Any, number_of_classes: int, **kwargs: Any) -> None:
        if not number_of_classes >= 1:
            raise ValueError(f"MulticlassRecallMetric: number_of_classes must be 1 or more, got {number_of_classes!r}")
        self.number_of_classes, self.num_sums = number_of_classes, number_of_classes + 1
        super().__init__(*args, **kwargs)

    def _predicted(self, given: Tensor) -> Tensor:
        return self._column(given).view(-1, self.number_of_classes)

    def _sums(self, samples: Samples) -> Tensor:
        hits = true_at_k(samples.predictions, samples.labels, samples.weights)
        return torch.cat([hits, samples.weights.sum(0, keepdim=True)])

    def _value(self, sums: Tensor) -> Tensor:
        return ratio(sums[:-1], sums[-1])
