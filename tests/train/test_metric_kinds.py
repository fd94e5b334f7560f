"""Metrics with inputs of their own: groups, classes, bits, thresholds, pairs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss, precision_score, top_k_accuracy_score

from recshard_lab.train.metrics import (
    HindsightTargetPRMetric,
    MSEMetric,
    MulticlassRecallMetric,
    MultiLabelPrecisionMetric,
    NEMetric,
    NumMissingLabelsMetric,
    RecalibratedCalibrationMetric,
    RecalibratedNEMetric,
    SegmentedNEMetric,
    XAUCMetric,
)
from recshard_lab.train.metrics.formulas import discordant_pairs

SIZE = 64


@pytest.fixture
def samples() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {
        "predictions": torch.randint(1, 40, (SIZE,)).double() / 40,
        "labels": (torch.rand(SIZE) < 0.4).double(),
        "weights": torch.rand(SIZE, dtype=torch.float64),
    }


def lifetime(metric: Any, **samples: Any) -> dict[str, Any]:
    """Values of one step."""
    metric.update(**samples)
    values = {key.partition("|lifetime_")[2]: value for key, value in metric.compute().items() if "lifetime" in key}
    return {key: value.tolist() for key, value in values.items()}


def test_segments_have_the_entropy_of_their_samples(samples: Any) -> None:
    groups = torch.randint(0, 3, (SIZE,))
    found = lifetime(SegmentedNEMetric(batch_size=SIZE, num_groups=4), groups=groups, **samples)
    for group in range(3):
        own = {name: column[groups == group] for name, column in samples.items()}
        assert found[f"segmented_ne_{group}"] == pytest.approx(lifetime(NEMetric(batch_size=SIZE), **own)["ne"])
    assert math.isnan(found["segmented_ne_3"])
    with pytest.raises(ValueError, match=r"group 4 is not in \[0, 4\)"):
        SegmentedNEMetric(num_groups=4).update(groups=groups + 2, **samples)
    with pytest.raises(ValueError, match="num_groups must be"):
        SegmentedNEMetric(num_groups=0)


def test_a_model_of_downsampled_data_is_recalibrated(samples: Any) -> None:
    p, y, w = (samples[name].numpy() for name in ("predictions", "labels", "weights"))
    q = p / (p + (1 - p) / 0.1)
    rate = np.average(y, weights=w)
    ne = log_loss(y, q, sample_weight=w) / -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    settings: Any = {"batch_size": SIZE, "recalibration_coefficient": 0.1}
    assert lifetime(RecalibratedNEMetric(**settings), **samples)["recalibrated_ne"] == pytest.approx(ne)
    calibration = lifetime(RecalibratedCalibrationMetric(**settings), **samples)["recalibrated_calibration"]
    assert calibration == pytest.approx((w * q).sum() / (w * y).sum())
    with pytest.raises(ValueError, match="recalibration_coefficient must be above 0, got 0"):
        RecalibratedNEMetric(recalibration_coefficient=0)
    with pytest.raises(ValueError, match="takes probabilities"):
        RecalibratedNEMetric(recalibration_coefficient=0.1).update(
            predictions=torch.tensor([1.2]), labels=torch.ones(1)
        )


def test_recall_of_classes_is_accuracy_of_the_best_k() -> None:
    torch.manual_seed(0)
    predictions, labels, weights = torch.rand(SIZE, 4), torch.randint(0, 4, (SIZE,)), torch.rand(SIZE)
    metric = MulticlassRecallMetric(batch_size=SIZE, number_of_classes=4)
    found = lifetime(metric, predictions=predictions, labels=labels, weights=weights)["multiclass_recall"]
    for k in (1, 2, 3):
        expected = top_k_accuracy_score(labels, predictions, k=k, sample_weight=weights)
        assert found[k - 1] == pytest.approx(expected, rel=1e-6)
    assert found[3] == 1.0
    with pytest.raises(ValueError, match="of one size"):
        metric.update(predictions=predictions[:-1], labels=labels)


def test_labels_of_one_sample_are_bits() -> None:
    torch.manual_seed(0)
    predictions, labels, weights = torch.randint(0, 8, (SIZE,)), torch.randint(0, 8, (SIZE,)), torch.rand(SIZE)
    metric = MultiLabelPrecisionMetric(batch_size=SIZE, num_labels=3, label_names=["a", "b", "c"])
    found = lifetime(metric, predictions=predictions, labels=labels, weights=weights)
    for bit, name in enumerate("abc"):
        expected = precision_score(labels >> bit & 1, predictions >> bit & 1, sample_weight=weights)
        assert found[f"multi_label_precision_{name}"] == pytest.approx(expected, rel=1e-6)
    with pytest.raises(ValueError, match="got 2 with 1 names"):
        MultiLabelPrecisionMetric(num_labels=2, label_names=["a"])


@pytest.mark.parametrize("target", [0.1, 0.5, 1.1])
def test_the_lowest_threshold_with_a_precision(samples: Any, target: float) -> None:
    p, y, w = (samples[name].numpy() for name in ("predictions", "labels", "weights"))
    found = lifetime(HindsightTargetPRMetric(batch_size=SIZE, target_precision=target), **samples)
    reached = [
        t for t in np.linspace(0, 1, 1000) if (p >= t).any() and (w * y)[p >= t].sum() / w[p >= t].sum() >= target
    ]
    at = reached[0] if reached else 1.0
    assert found["hindsight_target_threshold"] == pytest.approx(at)
    if reached:
        assert found["hindsight_target_precision"] == pytest.approx((w * y)[p >= at].sum() / w[p >= at].sum())
        expected = (w * y)[p >= at].sum() / ((w * y)[p >= at].sum() + (w * y)[p <= at].sum())
        assert found["hindsight_target_recall"] == pytest.approx(expected)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 7, 8, 33])
def test_discordant_pairs_are_counted(size: int) -> None:
    torch.manual_seed(size)
    predictions, labels = torch.randint(0, 6, (size,)).double(), torch.randint(-4, 4, (size,)).double()
    order = (predictions[:, None] - predictions).sign() * (labels[:, None] - labels).sign()
    assert discordant_pairs(predictions, labels) == int((order < 0).sum()) // 2


def test_pairs_of_a_batch(samples: Any) -> None:
    p, y, w = (samples[name].numpy() for name in ("predictions", "labels", "weights"))
    first, second = np.triu_indices(SIZE, 1)
    right = np.sign(p[first] - p[second]) == np.sign(y[first] - y[second])
    pairs = w[first] * w[second]
    assert lifetime(XAUCMetric(batch_size=SIZE), **samples)["xauc"] == pytest.approx(
        (pairs * right).sum() / pairs.sum()
    )


def test_missing_labels_are_counted() -> None:
    metric = NumMissingLabelsMetric(batch_size=3)
    labels = torch.tensor([math.nan, -1.0, math.nan])
    found = lifetime(metric, predictions=torch.zeros(3), labels=labels, weights=torch.tensor([1.0, 2.0, 0.5]))
    assert found == {"num_missing_labels": 1.5}
    with pytest.raises(ValueError, match="labels must be finite, got nan"):
        MSEMetric().update(predictions=torch.zeros(3), labels=labels)
