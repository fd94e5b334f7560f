"""Variants of normalized entropy and calibration: ``torchrec.metrics.ne_positive``, ``segmented_ne`` and others.

Shape letters: T tasks, n samples, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recshard_lab.compat.metrics.config import RecComputeMode
from recshard_lab.compat.metrics.names import MetricName, MetricNamespace, MetricPrefix
from recshard_lab.compat.metrics.rec_metric import (
    MetricComputationReport,
    RecMetric,
    RecMetricComputation,
    RecMetricException,
)
from recshard_lab.compat.metrics.sums import (
    CalibrationMetricComputation,
    Get,
    NEMetricComputation,
    SumsComputation,
    compute_cross_entropy,
    compute_logloss,
    compute_ne,
    get_ne_states,
)
from recshard_lab.train.metrics.formulas import group_sums, recalibrated

GROUPING_KEYS, REQUIRED_INPUTS, NUM_EXAMPLES = "grouping_keys", "required_inputs", "num_examples"


class _Variant(NEMetricComputation):
    """Normalized entropy with other sums or another value, under a name of its own."""

    name: MetricName

    def __init__(self, *args: Any, allow_missing_label_with_zero_weight: bool = False, **kwargs: Any) -> None:
        missing = allow_missing_label_with_zero_weight
        super().__init__(*args, allow_missing_label_with_zero_weight=missing, **kwargs)

    def _value(self, get: Get) -> Tensor:
        missing = self._allow_missing_label_with_zero_weight
        loss, count, positive, negative = map(get, self.states[:4])
        return compute_ne(loss, count, positive, negative, self.eta, missing)

    def _values(self, get: Get) -> list[tuple[MetricName, Tensor]]:
        return [(self.name, self._value(get))]


class UnweightedNEMetricComputation(_Variant):
    """Normalized entropy with weight 1 for each sample."""

    name = MetricName.UNWEIGHTED_NE

    def _sums(self, labels: Tensor, predictions: Tensor, weights: Tensor, more: dict[str, Any]) -> dict[str, Tensor]:
        return get_ne_states(labels, predictions, torch.ones_like(weights), self.eta)


class UnweightedNEMetric(RecMetric):
    """Normalized entropy with weight 1 for each sample."""

    _namespace = MetricNamespace.UNWEIGHTED_NE
    _computation_class = UnweightedNEMetricComputation


class NEPositiveMetricComputation(_Variant):
    """Cross entropy of the positive samples over that of predicting the mean label for all samples."""

    states = ("cross_entropy_positive_sum", "weighted_num_samples", "pos_labels", "neg_labels")
    name = MetricName.NE_POSITIVE

    def _sums(self, labels: Tensor, predictions: Tensor, weights: Tensor, more: dict[str, Any]) -> dict[str, Tensor]:
        _, *others = get_ne_states(labels, predictions, weights, self.eta).values()
        positive = compute_cross_entropy(torch.ones_like(labels), predictions, weights * labels, self.eta).sum(-1)
        return dict(zip(self.states, [positive, *others], strict=True))


class NEPositiveMetric(RecMetric):
    """Normalized entropy of the positive samples; see `NEPositiveMetricComputation`."""

    _namespace = MetricNamespace.NE_POSITIVE
    _computation_class = NEPositiveMetricComputation


class CaliFreeNEMetricComputation(_Variant):
    """Normalized entropy over the summed cross entropy of predicting the mean prediction.

    ``NE / -(P log2 q + N log2(1 - q))`` with the weights P and N of positive and negative labels, and the mean
    prediction q. It falls as the number of samples grows; `recshard_lab.train.CaliFreeNEMetric` does not.
    """

    states = (*NEMetricComputation.states, "weighted_sum_predictions")
    name = MetricName.CALI_FREE_NE

    def _sums(self, labels: Tensor, predictions: Tensor, weights: Tensor, more: dict[str, Any]) -> dict[str, Tensor]:
        sums = get_ne_states(labels, predictions, weights, self.eta)
        return {**sums, "weighted_sum_predictions": (weights * predictions).sum(-1)}

    def _value(self, get: Get) -> Tensor:
        _, count, positive, negative, predicted = map(get, self.states)
        mean = predicted / count
        value = super()._value(get) / -(positive * mean.log2() + negative * (1 - mean).log2())
        return torch.where(count == 0, self.eta, value) if self._allow_missing_label_with_zero_weight else value


class CaliFreeNEMetric(RecMetric):
    """Normalized entropy without the error of the mean; see `CaliFreeNEMetricComputation`."""

    _namespace = MetricNamespace.CALI_FREE_NE
    _computation_class = CaliFreeNEMetricComputation


# ---- downsampled training data ----


class RecalibratedNEMetricComputation(NEMetricComputation):
    """Normalized entropy of recalibrated predictions, for a model that was trained on a share of the non-clicks.

    Args:
        recalibration_coefficient: the share.
        others: as of `NEMetricComputation`.
    """

    def __init__(self, *args: Any, recalibration_coefficient: float = 1.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._coefficient = recalibration_coefficient

    def _sums(self, labels: Tensor, predictions: Tensor, weights: Tensor, more: dict[str, Any]) -> dict[str, Tensor]:
        return super()._sums(labels, recalibrated(predictions, self._coefficient), weights, more)


class RecalibratedNEMetric(RecMetric):
    """Normalized entropy of recalibrated predictions; see `RecalibratedNEMetricComputation`."""

    _namespace = MetricNamespace.RECALIBRATED_NE
    _computation_class = RecalibratedNEMetricComputation


class RecalibratedCalibrationMetricComputation(CalibrationMetricComputation):
    """Calibration of recalibrated predictions. Arguments are those of `RecalibratedNEMetricComputation`."""

    def __init__(self, *args: Any, recalibration_coefficient: float = 1.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._coefficient = recalibration_coefficient

    def _sums(self, labels: Tensor, predictions: Tensor, weights: Tensor, more: dict[str, Any]) -> dict[str, Tensor]:
        return super()._sums(labels, recalibrated(predictions, self._coefficient), weights, more)


class RecalibratedCalibrationMetric(RecMetric):
    """Calibration of recalibrated predictions."""

    _namespace = MetricNamespace.RECALIBRATED_CALIBRATION
    _computation_class = RecalibratedCalibrationMetricComputation


# ---- samples with a weight ----


class _Counted(RecMetricComputation):
    """Reports the number of samples with a weight above 0 too."""

    num_examples: Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        zeros = torch.zeros(self._n_tasks, dtype=torch.long)
        self._add_state(NUM_EXAMPLES, zeros, add_window_state=False, dist_reduce_fx="sum", persistent=True)

    def update(self, *, predictions: Tensor | None, labels: Tensor, weights: Tensor | None, **kwargs: Any) -> None:
        """Adds samples to the sums, and counts them."""
        super().update(predictions=predictions, labels=labels, weights=weights, **kwargs)  # type: ignore[safe-super]
        counted = torch.ones_like(labels) if weights is None else weights
        self.num_examples += (counted > 0).sum(-1)

    def _compute(self) -> list[MetricComputationReport]:
        reports = super()._compute()  # type: ignore[safe-super]
        count = MetricComputationReport(MetricName.TOTAL_EXAMPLES, MetricPrefix.DEFAULT, self.num_examples.clone())
        return [*reports, count]


class ServingNEMetricComputation(_Counted, NEMetricComputation):
    """Normalized entropy, and the number of samples with a weight above 0."""


class ServingNEMetric(RecMetric):
    """Normalized entropy, and the number of samples with a weight above 0."""

    _namespace = MetricNamespace.SERVING_NE
    _computation_class = ServingNEMetricComputation


class ServingCalibrationMetricComputation(_Counted, CalibrationMetricComputation):
    """Calibration, and the number of samples with a weight above 0."""


class ServingCalibrationMetric(RecMetric):
    """Calibration, and the number of samples with a weight above 0."""

    _namespace = MetricNamespace.SERVING_CALIBRATION
    _computation_class = ServingCalibrationMetricComputation


# ---- groups ----


@dataclass
class GroupingKeyConfig:
    """A division of samples into groups.

    Args:
        name: the required input with the group of each sample.
        num_groups: G.
        cast_keys_to_int: whether its groups are floats that are cast to int64.
    """

    name: str
    num_groups: int = 1
    cast_keys_to_int: bool = False


def _configs(given: Any, num_groups: int, cast_keys_to_int: bool) -> list[GroupingKeyConfig]:
    keys = [given] if isinstance(given, str) else given
    found = []
    for key in keys:
        if isinstance(key, str):
            found.append(GroupingKeyConfig(key, num_groups, cast_keys_to_int))
        else:
            found.append(GroupingKeyConfig(**key) if isinstance(key, dict) else key)
    return found


class SegmentedNEMetricComputation(SumsComputation):
    """Normalized entropy of each group of samples.

    Args:
        include_logloss: whether to report the cross entropy of each group too.
        num_groups: G, unless a key has its own.
        grouping_keys: the required input with the groups ``[n]``, or several, as names, dicts or
            `GroupingKeyConfig`. Samples of other groups than 0 to G - 1 do not count.
        cast_keys_to_int: whether groups are floats that are cast to int64.
        others: as of `RecMetricComputation`.
    """

    states = ()
    columns = NEMetricComputation.states
    eta = NEMetricComputation.eta

    def __init__(
        self,
        *args: Any,
        include_logloss: bool = False,
        num_groups: int = 1,
        grouping_keys: str | Sequence[str | dict[str, Any] | GroupingKeyConfig] = GROUPING_KEYS,
        cast_keys_to_int: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._include_logloss = include_logloss
        self._keys = _configs(grouping_keys, num_groups, cast_keys_to_int)
        self._one = isinstance(grouping_keys, str) or [key.name for key in self._keys] == [GROUPING_KEYS]
        for key in self._keys:
            zeros = torch.zeros(self._n_tasks, key.num_groups, dtype=torch.double)
            for name in self.columns:
                self._add_state(self._state(key, name), zeros, True, dist_reduce_fx="sum", persistent=True)

    def _state(self, key: GroupingKeyConfig, name: str) -> str:
        return name if self._one else f"{key.name}_{name}"

    def _sums(self, labels: Tensor, predictions: Tensor, weights: Tensor, more: dict[str, Any]) -> dict[str, Tensor]:
        sums = {}
        loss = compute_cross_entropy(labels, predictions, weights, self.eta)
        columns = [loss, weights, weights * labels, weights * (1 - labels)]
        for key in self._keys:
            groups = _groups_of(more, key)
            known = (groups >= 0) & (groups < key.num_groups)
            for name, column in zip(self.columns, columns, strict=True):
                sums[self._state(key, name)] = group_sums(column[:, known], groups[known], key.num_groups)
        return sums

    def _values(self, get: Get) -> list[tuple[MetricName, Tensor]]:
        return []

    def _compute(self) -> list[MetricComputationReport]:
        views = ((MetricPrefix.LIFETIME, self._lifetime), (MetricPrefix.WINDOW, self.get_window_state))
        reports = []
        for key in self._keys:
            for prefix, get in views:
                loss, count, positive, negative = (get(self._state(key, name)) for name in self.columns)
                values = {MetricName.SEGMENTED_NE: compute_ne(loss, count, positive, negative, self.eta).float()}
                if self._include_logloss:
                    values[MetricName.LOG_LOSS] = compute_logloss(loss, positive, negative, self.eta)
                for name, value in values.items():
                    for group, own in enumerate(value.unbind(1)):
                        description = f"_{group}" if self._one else f"_{group}@{key.name}"
                        one = own[0] if self._compute_mode is RecComputeMode.UNFUSED_TASKS_COMPUTATION else own
                        reports.append(MetricComputationReport(name, prefix, one, description))
        return reports

    def _lifetime(self, name: str) -> Tensor:
        state: Tensor = getattr(self, name)
        return state


def _groups_of(more: dict[str, Any], key: GroupingKeyConfig) -> Tensor:
    given: Tensor | None = more.get(REQUIRED_INPUTS, {}).get(key.name)
    if given is None:
        raise RecMetricException(f"segmented NE reads groups. Fix: update(required_inputs={{{key.name!r}: ...}})")
    if given.dtype != torch.int64 and not (key.cast_keys_to_int and given.is_floating_point()):
        raise RecMetricException(
            f"groups {key.name!r} are {given.dtype}, not int64. Fix: pass int64, or cast_keys_to_int=True for floats"
        )
    return given.reshape(-1).long()


class SegmentedNEMetric(RecMetric):
    """Normalized entropy of each group of samples; see `SegmentedNEMetricComputation`."""

    _namespace = MetricNamespace.SEGMENTED_NE
    _computation_class = SegmentedNEMetricComputation

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._required_inputs |= {key.name for key in _configs(kwargs.get("grouping_keys", GROUPING_KEYS), 1, False)}
