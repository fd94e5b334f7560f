"""Metrics against scikit-learn; those with inputs of their own: groups, classes, bits, thresholds, pairs."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk

from recshard_lab.train import metrics
from recshard_lab.train.metrics.formulas import discordant_pairs

scored = st.lists(st.tuples(st.floats(-80, 80, width=32), st.sampled_from([0.0, 1.0])), min_size=2, max_size=60).filter(
    lambda pairs: len({label for _, label in pairs}) == 2
)


@given(scored)
@settings(max_examples=80, deadline=None)
def test_auc_equals_scikit_learns(pairs: list[tuple[float, float]]) -> None:
    scores, labels = zip(*pairs, strict=True)
    assert metrics.auc(torch.tensor(scores), torch.tensor(labels)) == pytest.approx(
        sk.roc_auc_score(labels, scores), abs=1e-6
    )


@given(scored)
@settings(max_examples=40, deadline=None)
def test_log_loss_equals_scikit_learns(pairs: list[tuple[float, float]]) -> None:
    scores, labels = zip(*((score / 4, label) for score, label in pairs), strict=True)
    chances = [1 / (1 + math.exp(-score)) for score in scores]
    assert metrics.log_loss(torch.tensor(scores), torch.tensor(labels)) == pytest.approx(
        sk.log_loss(labels, chances), rel=1e-4, abs=1e-6
    )


def test_normalized_entropy_of_the_rate_alone_is_one() -> None:
    labels = torch.tensor([1.0, 0, 0, 0])
    rate = torch.full((4,), math.log(0.25 / 0.75))
    assert metrics.normalized_entropy(rate, labels) == pytest.approx(1.0, abs=1e-6)
    assert metrics.normalized_entropy(rate + labels, labels) < 1.0


@pytest.mark.parametrize("metric", [metrics.auc, metrics.log_loss, metrics.normalized_entropy])
def test_what_cannot_be_measured_is_refused(metric: object) -> None:
    assert callable(metric)
    with pytest.raises(ValueError, match="scores and labels must have the same length"):
        metric(torch.zeros(3), torch.zeros(2))
    with pytest.raises(ValueError, match="score number 1 is nan: the model diverged"):
        metric(torch.tensor([0.0, math.nan]), torch.tensor([0.0, 1.0]))
    with pytest.raises(ValueError, match="labels must be 0 or 1"):
        metric(torch.zeros(2), torch.tensor([0.0, 2.0]))


def test_labels_of_one_class_have_no_auc() -> None:
    with pytest.raises(ValueError, match="all 3 labels are 1"):
        metrics.auc(torch.rand(3), torch.ones(3))
    with pytest.raises(ValueError, match="clicks and non-clicks"):
        metrics.normalized_entropy(torch.rand(3), torch.zeros(3))


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
    found = lifetime(metrics.SegmentedNEMetric(batch_size=SIZE, num_groups=4), groups=groups, **samples)
    for group in range(3):
        own = {name: column[groups == group] for name, column in samples.items()}
        assert found[f"segmented_ne_{group}"] == pytest.approx(lifetime(metrics.NEMetric(batch_size=SIZE), **own)["ne"])
    assert math.isnan(found["segmented_ne_3"])
    with pytest.raises(ValueError, match=r"group 4 is not in \[0, 4\)"):
        metrics.SegmentedNEMetric(num_groups=4).update(groups=groups + 2, **samples)
    with pytest.raises(ValueError, match="num_groups must be"):
        metrics.SegmentedNEMetric(num_groups=0)


def test_a_model_of_downsampled_data_is_recalibrated(samples: Any) -> None:
    p, y, w = (samples[name].numpy() for name in ("predictions", "labels", "weights"))
    q = p / (p + (1 - p) / 0.1)
    rate = np.average(y, weights=w)
    ne = sk.log_loss(y, q, sample_weight=w) / -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    settings: Any = {"batch_size": SIZE, "recalibration_coefficient": 0.1}
    assert lifetime(metrics.RecalibratedNEMetric(**settings), **samples)["recalibrated_ne"] == pytest.approx(ne)
    calibration = lifetime(metrics.RecalibratedCalibrationMetric(**settings), **samples)["recalibrated_calibration"]
    assert calibration == pytest.approx((w * q).sum() / (w * y).sum())
    with pytest.raises(ValueError, match="recalibration_coefficient must be above 0, got 0"):
        metrics.RecalibratedNEMetric(recalibration_coefficient=0)
    with pytest.raises(ValueError, match="takes probabilities"):
        metrics.RecalibratedNEMetric(recalibration_coefficient=0.1).update(
            predictions=torch.tensor([1.2]), labels=torch.ones(1)
        )


def test_recall_of_classes_is_accuracy_of_the_best_k() -> None:
    torch.manual_seed(0)
    predictions, labels, weights = torch.rand(SIZE, 4), torch.randint(0, 4, (SIZE,)), torch.rand(SIZE)
    metric = metrics.MulticlassRecallMetric(batch_size=SIZE, number_of_classes=4)
    found = lifetime(metric, predictions=predictions, labels=labels, weights=weights)["multiclass_recall"]
    for k in (1, 2, 3):
        expected = sk.top_k_accuracy_score(labels, predictions, k=k, sample_weight=weights)
        assert found[k - 1] == pytest.approx(expected, rel=1e-6)
    assert found[3] == 1.0
    with pytest.raises(ValueError, match="of one size"):
        metric.update(predictions=predictions[:-1], labels=labels)


def test_labels_of_one_sample_are_bits() -> None:
    torch.manual_seed(0)
    predictions, labels, weights = torch.randint(0, 8, (SIZE,)), torch.randint(0, 8, (SIZE,)), torch.rand(SIZE)
    metric = metrics.MultiLabelPrecisionMetric(batch_size=SIZE, num_labels=3, label_names=["a", "b", "c"])
    found = lifetime(metric, predictions=predictions, labels=labels, weights=weights)
    for bit, name in enumerate("abc"):
        expected = sk.precision_score(labels >> bit & 1, predictions >> bit & 1, sample_weight=weights)
        assert found[f"multi_label_precision_{name}"] == pytest.approx(expected, rel=1e-6)
    with pytest.raises(ValueError, match="got 2 with 1 names"):
        metrics.MultiLabelPrecisionMetric(num_labels=2, label_names=["a"])


@pytest.mark.parametrize("target", [0.1, 0.5, 1.1])
def test_the_lowest_threshold_with_a_precision(samples: Any, target: float) -> None:
    p, y, w = (samples[name].numpy() for name in ("predictions", "labels", "weights"))
    found = lifetime(metrics.HindsightTargetPRMetric(batch_size=SIZE, target_precision=target), **samples)
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
    assert lifetime(metrics.XAUCMetric(batch_size=SIZE), **samples)["xauc"] == pytest.approx(
        (pairs * right).sum() / pairs.sum()
    )


def test_missing_labels_are_counted() -> None:
    metric = metrics.NumMissingLabelsMetric(batch_size=3)
    labels = torch.tensor([math.nan, -1.0, math.nan])
    found = lifetime(metric, predictions=torch.zeros(3), labels=labels, weights=torch.tensor([1.0, 2.0, 0.5]))
    assert found == {"num_missing_labels": 1.5}
    with pytest.raises(ValueError, match="labels must be finite, got nan"):
        metrics.MSEMetric().update(predictions=torch.zeros(3), labels=labels)
