"""Metrics of order, for all groups at once: sort by group and score, then sums over runs of equal scores.

Arguments are not checked. All numbers are fp64. Samples of equal score share the gain of their places equally, so
results do not depend on the order of samples.

Shape letters: n samples, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class _Sorted:
    """Samples by group, and by descending score inside it. A *tie* is a run of equal scores in a group.

    Attributes:
        order: ``[n]``, the sample in each place.
        group: ``[n]``, counted from 0 in places.
        tie: ``[n]``, counted from 0 in places.
        first: ``[G]``, where each group begins.
    """

    order: Tensor
    group: Tensor
    tie: Tensor
    first: Tensor

    def rank(self) -> Tensor:
        """``[n]``: each place's number in its group, from 0."""
        return torch.arange(len(self.order), device=self.order.device) - self.first[self.group]

    def tie_sums(self, values: Tensor) -> Tensor:
        """Sums of ``[n]`` over each tie."""
        ties = int(self.tie[-1]) + 1 if len(self.tie) else 0
        return values.new_zeros(ties).index_add(0, self.tie, values)

    def tie_means(self, values: Tensor) -> Tensor:
        """``[n]``: the mean over the tie of each place."""
        size = self.tie_sums(torch.ones_like(values))
        return (self.tie_sums(values) / size)[self.tie]

    def group_sums(self, values: Tensor) -> Tensor:
        """Sums of ``[n]`` over each group."""
        return values.new_zeros(len(self.first)).index_add(0, self.group, values)


def _sorted(scores: Tensor, groups: Tensor) -> _Sorted:
    order = torch.argsort(scores, descending=True, stable=True)
    order = order[torch.argsort(groups[order], stable=True)]
    by_group, by_score = groups[order], scores[order]
    starts = torch.ones(len(order), dtype=torch.bool, device=order.device)
    starts[1:] = by_group[1:] != by_group[:-1]
    breaks = starts.clone()
    breaks[1:] |= by_score[1:] != by_score[:-1]
    return _Sorted(order, starts.cumsum(0) - 1, breaks.cumsum(0) - 1, starts.nonzero().flatten())


def group_aucs(scores: Tensor, labels: Tensor, weights: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Area under each group's ROC curve, by the statistic of Mann and Whitney (1947, Ann. Math. Stat. 18).

    The chance that a click drawn by weight scores above a non-click drawn by weight, ties counting half.

    Returns:
        ``[G]`` areas, NaN for a group with one class; ``[G]`` sums of weights.
    """
    at = _sorted(scores, groups)
    positive = (labels * weights)[at.order]
    negative = ((1 - labels) * weights)[at.order]
    all_negative = at.group_sums(negative)
    before = all_negative.cumsum(0) - all_negative  # non-clicks of the groups before
    until = at.tie_sums(negative).cumsum(0)[at.tie] - before[at.group]  # in the group, with a score as high
    below = all_negative[at.group] - until + at.tie_sums(negative)[at.tie] / 2
    all_positive = at.group_sums(positive)
    pairs = all_positive * all_negative
    areas = at.group_sums(positive * below) / torch.where(pairs > 0, pairs, torch.nan)
    return areas, all_positive + all_negative


def group_ndcgs(scores: Tensor, gains: Tensor, groups: Tensor, k: int | None) -> Tensor:
    """Normalised discounted cumulative gain of each group's first k (Jarvelin and Kekalainen 2002, ACM TOIS 20(4)).

    Place r, from 1, is discounted by ``1 / log2(r + 1)``.

    Returns:
        ``[G]``, NaN for a group without a gain.
    """
    best = _discounted(gains, gains, groups, k)
    return _discounted(scores, gains, groups, k) / torch.where(best > 0, best, torch.nan)


def _discounted(scores: Tensor, gains: Tensor, groups: Tensor, k: int | None) -> Tensor:
    at = _sorted(scores, groups)
    place = at.rank()
    discount = 1 / torch.log2(place.double() + 2)
    if k is not None:
        discount = discount * (place < k)
    return at.group_sums(gains[at.order] * at.tie_means(discount))


def group_recalls(scores: Tensor, labels: Tensor, groups: Tensor, k: int) -> Tensor:
    """The share of each group's relevant samples that is among its k best.

    Returns:
        ``[G]``, NaN for a group without a relevant sample.
    """
    at = _sorted(scores, groups)
    found = at.tie_means((at.rank() < k).double())
    relevant = labels[at.order]
    return at.group_sums(relevant * found) / at.group_sums(relevant)


def group_hits(scores: Tensor, labels: Tensor, weights: Tensor, groups: Tensor, k: int) -> Tensor:
    """The weight of relevant samples among each group's k best, and that of all samples among them: ``[2]``."""
    at = _sorted(scores, groups)
    found = at.tie_means((at.rank() < k).double()) * weights[at.order]
    return torch.stack([(found * labels[at.order]).sum(), found.sum()])
