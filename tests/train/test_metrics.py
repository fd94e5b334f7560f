"""Metrics against scikit-learn."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss as sklearn_log_loss
from sklearn.metrics import roc_auc_score

from recshard_lab.train.metrics import auc, log_loss, normalized_entropy

scored = st.lists(st.tuples(st.floats(-80, 80, width=32), st.sampled_from([0.0, 1.0])), min_size=2, max_size=60).filter(
    lambda pairs: len({label for _, label in pairs}) == 2
)


@given(scored)
@settings(max_examples=80, deadline=None)
def test_auc_equals_scikit_learns(pairs: list[tuple[float, float]]) -> None:
    scores, labels = zip(*pairs, strict=True)
    assert auc(torch.tensor(scores), torch.tensor(labels)) == pytest.approx(roc_auc_score(labels, scores), abs=1e-6)


@given(scored)
@settings(max_examples=40, deadline=None)
def test_log_loss_equals_scikit_learns(pairs: list[tuple[float, float]]) -> None:
    scores, labels = zip(*((score / 4, label) for score, label in pairs), strict=True)
    chances = [1 / (1 + math.exp(-score)) for score in scores]
    assert log_loss(torch.tensor(scores), torch.tensor(labels)) == pytest.approx(
        sklearn_log_loss(labels, chances), rel=1e-4, abs=1e-6
    )


def test_normalized_entropy_of_the_rate_alone_is_one() -> None:
    labels = torch.tensor([1.0, 0, 0, 0])
    rate = torch.full((4,), math.log(0.25 / 0.75))
    assert normalized_entropy(rate, labels) == pytest.approx(1.0, abs=1e-6)
    assert normalized_entropy(rate + labels, labels) < 1.0


@pytest.mark.parametrize("metric", [auc, log_loss, normalized_entropy])
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
        auc(torch.rand(3), torch.ones(3))
    with pytest.raises(ValueError, match="clicks and non-clicks"):
        normalized_entropy(torch.rand(3), torch.zeros(3))
