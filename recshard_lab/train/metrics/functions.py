"""Metrics of predictions in one process. n samples; scores are logits unless stated otherwise."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from recshard_lab.arguments import checks_arguments
from recshard_lab.train.metrics.ranking import group_aucs, group_ndcgs, group_recalls


def _checked(scores: Tensor, labels: Tensor, graded: bool = False) -> tuple[Tensor, Tensor]:
    if scores.is_meta or labels.is_meta:
        raise ValueError("scores and labels on the meta device have no values")
    scores, labels = scores.detach().flatten(), labels.detach().flatten()
    if len(scores) != len(labels) or not len(scores):
        raise ValueError(
            f"scores and labels must have the same length, at least 1, got {len(scores)} and {len(labels)}"
        )
    if not bool(torch.isfinite(scores).all()):
        bad = int((~torch.isfinite(scores)).nonzero()[0])
        raise ValueError(f"score number {bad} is {float(scores[bad])}: the model diverged")
    if graded and not bool(((labels >= 0) & torch.isfinite(labels)).all()):
        raise ValueError("labels must be finite and not negative")
    if not graded and not bool(((labels == 0) | (labels == 1)).all()):
        raise ValueError("labels must be 0 or 1")
    return scores.double(), labels.double()


def _groups(groups: Tensor, like: Tensor) -> Tensor:
    if groups.is_floating_point() or groups.dtype == torch.bool or groups.is_meta or groups.numel() != len(like):
        raise ValueError(
            f"groups must be integers, one a sample [{len(like)}], got {groups.dtype} {list(groups.shape)}"
        )
    return groups.flatten().to(like.device).long()


def _k(k: int) -> int:
    if not 1 <= k < 1 << 31:
        raise ValueError(f"k must be at least 1 and below 2**31, got {k}")
    return k


@checks_arguments
def auc(scores: Tensor, labels: Tensor, weights: Tensor | None = None) -> float:
    """Area under the ROC curve: the chance that a click scores above a non-click, ties counting half.

    Args:
        scores: ``[n]`` or ``[n, 1]``, any numbers; only their order counts.
        labels: ``[n]``, 0 or 1.
        weights: ``[n]``, the weight of each sample. Default: 1.

    Raises:
        ValueError: sizes that differ, scores that are not finite, labels of one class only.

    >>> auc(torch.tensor([0.9, 0.4, 0.6, 0.1]), torch.tensor([1, 1, 0, 0]))
    0.75
    """
    scores, labels = _checked(scores, labels)
    if weights is not None and (
        weights.is_meta or weights.numel() != len(scores) or not bool((weights.isfinite() & (weights >= 0)).all())
    ):
        raise ValueError(f"weights must have shape [{len(scores)}] and not be negative, got {list(weights.shape)}")
    if not 0 < float(labels.sum()) < len(labels):
        raise ValueError(f"AUC needs clicks and non-clicks, all {len(labels)} labels are {int(labels[0])}")
    counted = torch.ones_like(scores) if weights is None else weights.detach().flatten().to(scores)
    return float(group_aucs(scores, labels, counted, torch.zeros_like(scores).long())[0])


@checks_arguments
def log_loss(scores: Tensor, labels: Tensor) -> float:
    """Mean cross entropy of logits ``[n]`` against labels ``[n]``, in nats.

    >>> round(log_loss(torch.zeros(2), torch.tensor([0., 1.])), 4)
    0.6931
    """
    return float(binary_cross_entropy_with_logits(*_checked(scores, labels)))


@checks_arguments
def normalized_entropy(scores: Tensor, labels: Tensor) -> float:
    """Log loss divided by that of always predicting the click rate. Below 1, the model is better than the rate alone.

    He et al. 2014, "Practical Lessons from Predicting Clicks on Ads at Facebook", section 3.

    >>> round(normalized_entropy(torch.zeros(4), torch.tensor([0., 1., 0., 1.])), 6)
    1.0
    """
    loss = log_loss(scores, labels)
    rate = labels.double().mean()
    if not 0.0 < float(rate) < 1.0:
        raise ValueError("normalized entropy needs clicks and non-clicks")
    return loss / float(-(rate * rate.log() + (1 - rate) * (1 - rate).log()))


@checks_arguments
def calibration(scores: Tensor, labels: Tensor) -> float:
    """Predicted clicks divided by actual clicks: 1 is right on average (He et al. 2014, section 3).

    Args:
        scores: logits ``[n]``.
        labels: ``[n]``, 0 or 1.

    Raises:
        ValueError: no click, and as in `auc`.

    >>> calibration(torch.zeros(4), torch.tensor([0., 1., 0., 0.]))
    2.0
    """
    scores, labels = _checked(scores, labels)
    if not bool(labels.any()):
        raise ValueError("calibration needs at least one click")
    return float(scores.sigmoid().sum() / labels.sum())


@checks_arguments
def grouped_auc(scores: Tensor, labels: Tensor, groups: Tensor) -> float:
    """GAUC: the mean of the AUC of each group, weighed by its samples (Zhu et al. 2018, arXiv 1706.06978, section 6.3).

    Args:
        scores, labels: as in `auc`.
        groups: integers ``[n]``, such as users. Samples are compared inside a group only. A group with one class is
            omitted.

    Raises:
        ValueError: no group has both classes, beside what `auc` refuses.

    >>> grouped_auc(torch.tensor([1., 2., 5., 4.]), torch.tensor([0, 1, 0, 1]), torch.tensor([7, 7, 3, 3]))
    0.5
    """
    scores, labels = _checked(scores, labels)
    areas, sizes = group_aucs(scores, labels, torch.ones_like(scores), _groups(groups, scores))
    both = ~areas.isnan()
    if not bool(both.any()):
        raise ValueError(f"GAUC needs a group with clicks and non-clicks, none of {len(areas)} has both")
    return float((areas * sizes)[both].sum() / sizes[both].sum())


@checks_arguments
def ndcg(scores: Tensor, labels: Tensor, groups: Tensor, k: int | None = None) -> float:
    """NDCG@k: the mean over groups of the discounted gain of their first k places, divided by the best possible one.

    Jarvelin and Kekalainen 2002, ACM TOIS 20(4); gains are the labels, and tied samples share the gain of their places.

    Args:
        scores: ``[n]``, any numbers.
        labels: ``[n]``, 0 or more.
        groups: integers ``[n]``: users, sessions or queries. A group without a gain is omitted.
        k: places that count; all when left out.

    Raises:
        ValueError: no group has anything to gain, beside what `auc` refuses.

    >>> ndcg(torch.tensor([1., 2.]), torch.tensor([0, 1]), torch.tensor([0, 0]), k=1)
    1.0
    """
    scores, labels = _checked(scores, labels, graded=True)
    return _mean(group_ndcgs(scores, labels, _groups(groups, scores), None if k is None else _k(k)), "NDCG")


@checks_arguments
def recall_at_k(scores: Tensor, labels: Tensor, groups: Tensor, k: int) -> float:
    """The mean over groups of the share of their relevant samples that is among their k best.

    Args:
        scores: ``[n]``, any numbers.
        labels: ``[n]``, 1 for relevant samples, else 0.
        groups: integers ``[n]``. A group without a relevant sample is omitted.
        k: places that count.

    Raises:
        ValueError: no relevant sample, beside what `auc` refuses.

    >>> recall_at_k(torch.tensor([3., 2., 1.]), torch.tensor([1, 0, 1]), torch.tensor([0, 0, 0]), k=2)
    0.5
    """
    scores, labels = _checked(scores, labels)
    return _mean(group_recalls(scores, labels, _groups(groups, scores), _k(k)), "recall")


def _mean(each: Tensor, name: str) -> float:
    known = each[~each.isnan()]
    if not len(known):
        raise ValueError(f"{name} needs a group with a label above 0, none of {len(each)} has one")
    return float(known.mean())
