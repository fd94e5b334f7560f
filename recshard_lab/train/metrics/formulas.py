"""Formulas that metrics of several steps, of one process and of `recshard_lab.compat` share.

Arguments are not checked. Formulas compute in the dtype of their arguments.

Shape letters: T any leading dimensions, n samples, C classes, G groups, B thresholds.
"""

from __future__ import annotations

import torch
from torch import Tensor


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The quotient, NaN where the denominator is not positive."""
    return numerator / torch.where(denominator > 0, denominator, torch.nan)


def recalibrated(predictions: Tensor, coefficient: float) -> Tensor:
    """Predictions of a model that was trained on all clicks and a share of the non-clicks, for all samples.

    ``p / (p + (1 - p) / coefficient)`` (He et al. 2014, section 6.3).

    Args:
        predictions: probabilities.
        coefficient: the share of the non-clicks that were trained, above 0. With a `coefficient` above 1, of the clicks
            the share ``1 / coefficient``.

    >>> recalibrated(torch.tensor([0.5]), 0.25)
    tensor([0.2000])
    """
    return predictions / (predictions + (1 - predictions) / coefficient)


def group_sums(values: Tensor, groups: Tensor, count: int) -> Tensor:
    """Sums of ``[T, n]`` over each of G groups, ``[T, G]`` fp64.

    Args:
        values: ``[T, n]``.
        groups: ``[n]`` int64 in ``[0, G)``.
        count: G.
    """
    zeros = torch.zeros(*values.shape[:-1], count, dtype=torch.float64, device=values.device)
    return zeros.index_add(-1, groups, values.double())


def true_at_k(predictions: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Weight of the samples whose class is among the k + 1 highest predictions, ``[T, C]`` for k from 0.

    Of equal predictions, the class with the lower number is first.

    Args:
        predictions: ``[T, n, C]``.
        labels: ``[T, n]``, the class of each sample.
        weights: ``[T, n]``.

    >>> true_at_k(torch.tensor([[0.1, 0.9], [0.7, 0.3]]), torch.tensor([0, 0]), torch.ones(2))
    tensor([1., 2.])
    """
    order = torch.argsort(predictions, dim=-1, descending=True, stable=True)
    hits = (order == labels.unsqueeze(-1)).to(weights.dtype).cumsum(-1)
    return (hits * weights.unsqueeze(-1)).sum(-2)


def at_thresholds(labels: Tensor, predictions: Tensor, weights: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Weights of true positives, false positives and false negatives at B equidistant thresholds from 0 to 1.

    A prediction is positive if it is at least the threshold, and negative if it is at most the threshold.

    Args:
        labels, predictions, weights: ``[T, n]``. Predictions are in ``[0, 1]``.
        count: B.

    Returns:
        Three ``[T, B]``, fp64.
    """
    thresholds = torch.linspace(0, 1, count, dtype=predictions.dtype, device=predictions.device)
    reached = torch.searchsorted(thresholds, predictions.contiguous(), right=True)  # thresholds that are as low
    missed = torch.searchsorted(thresholds, predictions.contiguous())  # thresholds that are lower
    positive, negative = (weights * labels).double(), (weights * (1 - labels)).double()

    def totals(buckets: Tensor, values: Tensor) -> Tensor:
        zeros = values.new_zeros(*values.shape[:-1], count + 1)
        return zeros.scatter_add(-1, buckets, values).cumsum(-1)

    true, false = totals(reached, positive), totals(reached, negative)
    return true[..., -1:] - true[..., :-1], false[..., -1:] - false[..., :-1], totals(missed, positive)[..., :-1]


def average_precision(predictions: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Area under the precision-recall curve: the sum of precision times the gain of recall over all thresholds.

    Samples of equal prediction share one threshold (Manning et al. 2008, "Introduction to Information Retrieval",
    section 8.4; without interpolation). 0 without a positive label.

    Args:
        predictions, labels, weights: ``[n]``.

    >>> average_precision(torch.tensor([0.9, 0.6, 0.6]), torch.tensor([1.0, 1.0, 0.0]), torch.ones(3))
    tensor(0.8333)
    """
    order = torch.argsort(predictions, descending=True, stable=True)
    score, weight = predictions[order], weights[order]
    last = torch.ones_like(score, dtype=torch.bool)
    last[:-1] = score[1:] != score[:-1]  # the last sample of each threshold
    true, all_above = (weight * labels[order]).cumsum(0)[last], weight.cumsum(0)[last]
    if not len(true) or not bool(true[-1] > 0):
        return torch.zeros((), dtype=weights.dtype, device=weights.device)
    recall = true / true[-1]
    precision = true / torch.where(all_above > 0, all_above, 1.0)
    return (precision * recall.diff(prepend=recall.new_zeros(1))).sum()


def discordant_pairs(predictions: Tensor, labels: Tensor) -> int:
    """Pairs of samples that predictions order one way and labels the other way. Ties are not counted.

    Merge counting, O(n log^2 n) (Knight 1966, "A Computer Method for Calculating Kendall's Tau").

    Args:
        predictions, labels: ``[n]``.

    >>> discordant_pairs(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([3.0, 1.0, 2.0]))
    2
    """
    by_label = torch.argsort(labels, stable=True)
    order = by_label[torch.argsort(predictions[by_label], stable=True)]
    ranks = labels.unique(return_inverse=True)[1][order]
    size = 1 << max(len(ranks) - 1, 0).bit_length()
    run = torch.full((size,), len(ranks), dtype=torch.int64, device=labels.device)
    run[: len(ranks)] = ranks
    pairs, width = 0, 1
    while width < size:
        left, right = run.view(-1, 2, width).unbind(1)
        pairs += int(torch.searchsorted(right.contiguous(), left.contiguous()).sum())
        run = run.view(-1, 2 * width).sort(dim=1).values.flatten()
        width *= 2
    return pairs


def pairs_in_order(labels: Tensor, predictions: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Of all pairs of samples: the weight of those that predictions order as labels do, and of all. O(n^2) memory.

    The weight of a pair is the product of its samples' weights. Equal predictions are in order if labels are equal.

    Args:
        labels, predictions, weights: ``[T, n]``.

    Returns:
        Two ``[T]``.
    """
    first, second = torch.triu_indices(labels.shape[-1], labels.shape[-1], offset=1, device=labels.device)
    predicted, labeled = (
        (values[..., first] - values[..., second]).sign() for values in (predictions.double(), labels.double())
    )
    pairs = weights[..., first] * weights[..., second]
    return (pairs * (predicted == labeled)).sum(-1), pairs.sum(-1)


def bits(labels: Tensor, count: int) -> Tensor:
    """The lowest C bits of integers ``[T, n]``, the lowest first: ``[C, T, n]`` of 0 and 1, int64.

    >>> bits(torch.tensor([5, 2]), 3).tolist()
    [[1, 0], [0, 1], [1, 0]]
    """
    return torch.stack([(labels.long() >> place) & 1 for place in range(count)])
