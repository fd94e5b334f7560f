"""Metrics over ranks, steps and windows, against scikit-learn and torchmetrics on the samples in one place."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sk

from recshard_lab.train import metrics
from tests.launched import launched
from tests.train import jobs

WINDOW = 4  # steps


some = launched([2, 3], ids=lambda n: f"W{n}")


def truth(samples: jobs.Step) -> dict[str, float]:
    """What each metric is of these samples, by others' code where there is any."""
    p, y, w, g = (samples[name].double().numpy() for name in ("predictions", "labels", "weights", "groups"))
    loss = sk.log_loss(y, p, sample_weight=w, labels=[0, 1])
    rate = np.average(y, weights=w)
    areas, sizes, gains, recalls, best = [], [], [], [], []
    for group in np.unique(g):
        own = g == group
        if 0 < y[own].sum() < own.sum():
            areas.append(sk.roc_auc_score(y[own], p[own], sample_weight=w[own]))
            sizes.append(w[own].sum())
        if y[own].any():
            one = own.sum() == 1  # scikit-learn refuses to rank a single document, which is ranked first
            gains.append(1.0 if one else sk.ndcg_score(y[own][None], p[own][None], k=2))
            recalls.append(expected_recall(p[own], y[own], 2))
        best.append(weights_of_best(p[own], y[own], w[own], 2))
    entropy = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    unweighted = -(y.mean() * np.log(y.mean()) + (1 - y.mean()) * np.log(1 - y.mean()))
    mean = np.average(p, weights=w)
    mse, by_one = (sk.mean_squared_error(y, q, sample_weight=w) for q in (p, np.ones_like(p)))
    disagree = np.sign(p[:, None] - p) * np.sign(y[:, None] - y) < 0
    return {
        "ne_positive": -(w * y * np.log(p)).sum() / w.sum() / entropy,
        "unweighted_ne": sk.log_loss(y, p) / unweighted,
        "cali_free_ne": loss / -(rate * np.log(mean) + (1 - rate) * np.log(1 - mean)),
        "total_examples": (w > 0).sum(),
        "mse": mse,
        "rmse": mse**0.5,
        "r_squared": sk.r2_score(y, p, sample_weight=w),
        "mae": sk.mean_absolute_error(y, p, sample_weight=w),
        "nmse": mse / by_one,
        "nrmse": (mse / by_one) ** 0.5,
        "weighted_avg": mean,
        "label_average": rate,
        "prediction_average": mean,
        "scalar": y.mean(),
        "sum_weights": w.sum(),
        "num_positive_samples": w[y == 1].sum(),
        "num_missing_labels": 0.0,
        "weighted_sum_predictions": (w * p).sum(),
        "accuracy": sk.accuracy_score(y, p >= 0.5, sample_weight=w),
        "precision": sk.precision_score(y, p >= 0.5, sample_weight=w),
        "recall": sk.recall_score(y, p >= 0.5, sample_weight=w),
        "auprc": sk.average_precision_score(y, p, sample_weight=w),
        "rauc": 1 - disagree.sum() / (len(y) * (len(y) - 1)),
        "precision_session": np.divide(*np.sum(best, 0)),
        "ne": loss / entropy,
        "logloss": loss,
        "calibration": (w * p).sum() / (w * y).sum(),
        "ctr": rate,
        "auc": sk.roc_auc_score(y, p, sample_weight=w),
        "gauc": np.average(areas, weights=sizes),
        "gauc_num_samples": sum(sizes),
        "ndcg": np.mean(gains),
        "recall_session": np.mean(recalls),
    }


def expected_recall(p: Any, y: Any, k: int) -> float:
    """Of the relevant samples, those above the k-th score, and of its ties the share for which there is room."""
    edge = np.sort(p)[::-1][min(k, len(p)) - 1]
    above, tied = p > edge, p == edge
    room = min(k, len(p)) - above.sum()
    return float((y[above].sum() + y[tied].sum() * room / tied.sum()) / y.sum())


def weights_of_best(p: Any, y: Any, w: Any, k: int) -> tuple[float, float]:
    """The weight of relevant samples, and of all, among the k best; samples of the last score have equal shares."""
    edge = np.sort(p)[::-1][min(k, len(p)) - 1]
    share = np.where(p > edge, 1.0, (p == edge) * (min(k, len(p)) - (p > edge).sum()) / (p == edge).sum())
    return float((share * w * y).sum()), float((share * w).sum())


OF_WINDOW = ("auc", "gauc", "gauc_num_samples", "ndcg", "recall_session", "auprc", "rauc", "precision_session")


def check(values: dict[str, float], steps: list[list[jobs.Step]]) -> None:
    lifetime, window = truth(jobs.whole(steps)), truth(jobs.whole(steps[-WINDOW:]))
    for name, expected in window.items():
        assert values[f"window_{name}"] == pytest.approx(expected, rel=1e-9), name
    for name in lifetime.keys() - OF_WINDOW:
        assert values[f"lifetime_{name}"] == pytest.approx(lifetime[name], rel=1e-9), name


@pytest.mark.gate
@pytest.mark.parametrize("seed", [0, 1])
def test_ranks_measure_what_others_do_on_the_gathered_samples(some: Any, seed: int) -> None:
    steps = jobs.rank_steps(seed, some.world_size, 9)
    for values, _ in some.run(jobs.measured, steps, WINDOW * some.world_size):
        check(values, steps)


def test_a_state_goes_on_in_mid_window_on_any_number_of_ranks(some: Any) -> None:
    world = some.world_size
    steps = jobs.rank_steps(5, world, 9)
    halves = some.run(jobs.measured, steps[:6], WINDOW * world)
    for values, _ in some.run(jobs.measured, steps[6:], WINDOW * world, halves[0][1]):
        check(values, steps)
    alone = [[jobs.whole([step])] for step in steps[6:]]
    check(jobs.measured(alone, WINDOW, halves[-1][1])[0], steps)
    one = jobs.measured([[jobs.whole([step])] for step in steps[:6]], WINDOW)[1]
    for values, _ in some.run(jobs.measured, steps[6:], WINDOW * world, one):
        check(values, steps)


def test_ranks_that_made_different_numbers_of_updates_are_all_told(some: Any) -> None:
    for said in some.run(jobs.uneven_updates):
        assert "different numbers of updates" in said


@pytest.mark.parametrize("k", [1, 3, 10])
def test_order_metrics_equal_torchmetrics_where_no_scores_are_equal(k: int) -> None:
    from torchmetrics.retrieval import RetrievalNormalizedDCG, RetrievalRecall

    torch.manual_seed(k)
    scores, labels, groups = torch.randperm(200) / 200, (torch.rand(200) < 0.2).long(), torch.randint(0, 30, (200,))
    for kind, ours in ((RetrievalNormalizedDCG, metrics.ndcg), (RetrievalRecall, metrics.recall_at_k)):
        theirs = kind(empty_target_action="skip", top_k=k)(scores, labels, indexes=groups)
        assert ours(scores, labels, groups, k) == pytest.approx(float(theirs), abs=1e-5)


def updated(metric: Any, *steps: tuple[list[float], list[float]], **others: Any) -> dict[str, float]:
    for predictions, labels in steps:
        metric.update(predictions=torch.tensor(predictions), labels=torch.tensor(labels), **others)
    return {name.partition("|")[2]: float(value) for name, value in metric.compute().items()}


SIZES = {"batch_size": 2, "window_size": 4}  # two steps
ZEROS = torch.zeros(2, dtype=torch.int64)


OF_CLASSES = [metrics.NEMetric, metrics.CalibrationMetric, metrics.AUCMetric]


OTHERS = [metrics.AccuracyMetric, metrics.AUPRCMetric, metrics.MSEMetric, metrics.RAUCMetric, metrics.XAUCMetric]


@pytest.mark.parametrize("kind", [*OF_CLASSES, *OTHERS])
def test_no_samples_and_one_class_have_no_value(kind: Any) -> None:
    nothing = updated(kind(**SIZES), ([], []))
    assert all(math.isnan(value) for value in nothing.values())
    assert all(math.isnan(value) for value in updated(kind(**SIZES)).values())
    if kind in OF_CLASSES:
        assert all(math.isnan(value) for value in updated(kind(**SIZES), ([0.5, 0.25], [0.0, 0.0])).values())


def test_a_nan_prediction_is_told_as_nan_until_it_leaves_the_window() -> None:
    good, bad = ([0.5, 0.25], [1.0, 0.0]), ([math.nan, 0.25], [1.0, 0.0])
    for kind in (metrics.NEMetric, metrics.CalibrationMetric, metrics.AUCMetric):
        metric = kind(**SIZES)
        values = updated(metric, good, bad, good)
        assert all(math.isnan(value) for value in values.values())
        later = updated(metric, good)
        assert {name: math.isnan(value) for name, value in later.items()} == {
            name: name.startswith("lifetime") for name in later
        }
        metric.reset()
        assert not any(math.isnan(value) for value in updated(metric, good).values())
    for kind in (metrics.GAUCMetric, metrics.NDCGMetric):
        metric = kind(**SIZES)
        assert math.isnan(updated(metric, good, bad, groups=ZEROS)[f"window_{metric.namespace}"])
        assert updated(metric, good, good, groups=ZEROS)[f"window_{metric.namespace}"] == 1.0


def test_tasks_are_measured_apart_under_torchrecs_keys() -> None:
    metric = metrics.AUCMetric(1, 0, 2, [metrics.RecTaskInfo("click"), metrics.RecTaskInfo("buy")])
    labels = {"click": torch.tensor([1.0, 0.0]), "buy": torch.tensor([0.0, 1.0])}
    metric.update(predictions={"click": torch.tensor([0.9, 0.1]), "buy": torch.tensor([0.9, 0.1])}, labels=labels)
    assert {name: float(value) for name, value in metric.compute().items()} == {
        "auc-click|window_auc": 1.0,
        "auc-buy|window_auc": 0.0,
    }


PAIR = {"predictions": torch.ones(2), "labels": torch.ones(2)}
MINUS = -torch.ones(2)


@pytest.mark.parametrize(
    ("kind", "given", "says"),
    [
        (metrics.NEMetric, {"predictions": -3 * MINUS}, "takes probabilities, got 3 to 3. Fix: pass logits.sig"),
        (metrics.AUCMetric, {"labels": -2 * MINUS}, "labels must be 0 or 1, got 2"),
        (metrics.NDCGMetric, {"labels": MINUS, "groups": ZEROS}, "finite and not negative, got -1"),
        (metrics.NEMetric, {"labels": torch.ones(3)}, r"must be of one size, got \[2, 3, 2, 2\]"),
        (metrics.NEMetric, {"weights": MINUS}, "weights must be finite and not"),
        (metrics.GAUCMetric, {}, r"pass update\(groups=\.\.\.\)"),
        (metrics.GAUCMetric, {"groups": torch.ones(2)}, "groups must be integers, got"),
        (metrics.NEMetric, {"predictions": {"b": MINUS}}, r"task 'DefaultTask' is missing: got \['b'\]"),
    ],
)
def test_samples_that_cannot_be_are_refused_and_not_counted(kind: Any, given: dict[str, Any], says: str) -> None:
    metric = kind(**SIZES)
    with pytest.raises(ValueError, match=says):
        metric.update(**PAIR | given)
    assert metric.steps == 0


def test_a_state_of_another_metric_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the state of metric 'ne' with tasks .* is 'calibration'"):
        metrics.CalibrationMetric().load_state_dict(metrics.NEMetric().state_dict())
    with pytest.raises(ValueError, match="needs tasks of different names"):
        metrics.NEMetric(tasks=[metrics.RecTaskInfo(), metrics.RecTaskInfo()])
    with pytest.raises(ValueError, match="needs a process group"):
        metrics.NEMetric(world_size=2)
    with pytest.raises(ValueError, match="window_size must be an integer from 1"):
        metrics.NEMetric(window_size=0)
    for kind in (metrics.RecallSessionMetric, metrics.PrecisionSessionMetric):
        with pytest.raises(ValueError, match=f"{kind.__name__} needs k"):
            kind()


def test_throughput_leaves_warm_up_and_pauses_out_and_goes_on_from_its_state() -> None:
    now = 0.0

    def made() -> metrics.ThroughputMetric:
        return metrics.ThroughputMetric(batch_size=5, world_size=2, window_seconds=3, warmup_steps=1, clock=lambda: now)

    metric = made()
    for seconds in (9.0, 9.0, 2.0, 2.0, 1.0):
        now += seconds
        metric.update()
    values = {name.partition("|")[2]: float(value) for name, value in metric.compute().items()}
    assert values == {"total_examples": 50, "lifetime_throughput": 40 / 14, "window_throughput": 20 / 3}
    now += 1000
    resumed = made()
    resumed.load_state_dict(metric.state_dict())
    resumed.update()
    now += 1
    resumed.update(30)
    values = {name.partition("|")[2]: float(value) for name, value in resumed.compute().items()}
    assert values == {"total_examples": 90, "lifetime_throughput": 70 / 15, "window_throughput": 50 / 4}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_window_keeps_what_it_was_given_though_the_tensors_change(dtype: torch.dtype) -> None:
    scores = torch.tensor([0.1, 0.1 + 1e-12], dtype=dtype)  # fp32 does not tell them apart
    labels, groups = torch.tensor([0.0, 1.0], dtype=dtype), torch.zeros(2, dtype=torch.int64)
    metric = metrics.GAUCMetric(**SIZES)
    metric.update(predictions=scores, labels=labels, groups=groups)
    for tensor in (scores, labels):
        tensor.zero_()
    groups += torch.arange(2)
    assert float(metric.compute()["gauc-DefaultTask|window_gauc"]) == (1.0 if dtype is torch.float64 else 0.5)
    kept = metric._window["DefaultTask"][0].labels
    assert kept.dtype is torch.float32
