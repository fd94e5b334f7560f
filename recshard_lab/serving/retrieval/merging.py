"""The best of scored items: equal scores by item id, without excluded items.

Shape letters: Q queries, n columns, k results a query.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recshard_lab.serving.retrieval.index import Found

NO_ID = -1
"""The id in places without a result. An item may have it too: `Found.counts` tells them apart."""


def best(scores: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest scores of each row and their ids, descending, equal scores by ascending id.

    Args:
        scores: ``[Q, n]``; -inf marks a missing result.
        ids: ``[n]`` or ``[Q, n]`` int64.

    Returns:
        ``[Q, min(k, n)]`` scores and ids.

    >>> best(torch.tensor([[1.0, 3.0, 3.0]]), torch.tensor([5, 9, 7]), 2)
    (tensor([[3., 3.]]), tensor([[7, 9]]))
    """
    k = min(k, scores.shape[1])
    top, columns = torch.topk(scores, k, dim=1)
    found = ids[columns] if ids.dim() == 1 else ids.gather(1, columns)
    last = top[:, -1:]
    tied = ((scores >= last).sum(1) > k) & (last[:, 0] > -torch.inf)  # equal scores on both sides of the k-th place
    if bool(tied.any()):
        rows = tied.nonzero()[:, 0]
        for row in rows.tolist():
            kept = (scores[row] >= last[row]).nonzero()[:, 0]
            own = ids[kept] if ids.dim() == 1 else ids[row, kept]
            order = _order(scores[row, kept].unsqueeze(0), own.unsqueeze(0))[0, :k]
            top[row], found[row] = scores[row, kept[order]], own[order]
    order = _order(top, found)
    return top.gather(1, order), found.gather(1, order)


def without(scores: Tensor, ids: Tensor, k: int, exclude: list[Tensor] | None) -> Found:
    """The first k results of sorted rows ``[Q, n]`` that are not excluded; -inf marks a missing result."""
    if exclude is not None:
        scores = scores.clone()
        for row, own in enumerate(exclude):
            if len(own):
                scores[row, torch.isin(ids[row], own.to(ids.device))] = -torch.inf
    missing = scores == -torch.inf
    if bool(missing.any()):
        order = torch.argsort(missing.to(torch.uint8), dim=1, stable=True)
        scores, ids, missing = scores.gather(1, order), ids.gather(1, order), missing.gather(1, order)
    scores, ids, missing = scores[:, :k], ids[:, :k], missing[:, :k]
    lacking = k - scores.shape[1]
    counts = (~missing).sum(1)
    ids = ids.masked_fill(missing, NO_ID)
    if lacking:
        scores = torch.cat([scores, scores.new_full((len(scores), lacking), -torch.inf)], 1)
        ids = torch.cat([ids, ids.new_full((len(ids), lacking), NO_ID)], 1)
    return Found(scores.contiguous(), ids.contiguous(), counts)


def longest(exclude: list[Tensor] | None) -> int:
    """The most ids that one query excludes: a search of k results finds this many more."""
    return max(map(len, exclude)) if exclude else 0


def _order(scores: Tensor, ids: Tensor) -> Tensor:
    """``[Q, n]`` -> columns by descending score, equal ones by ascending id."""
    by_id = torch.argsort(ids, dim=1, stable=True)
    by_score = torch.argsort(scores.gather(1, by_id), dim=1, descending=True, stable=True)
    return by_id.gather(1, by_score)
