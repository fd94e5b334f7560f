"""Splits a batch into groups of shard features that one operator can serve, and joins the groups' results.

Shape letters: F shard features, G shard features of one group, B batch, N ids, n ids of one group, d columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn import functional

Spans = list[tuple[int, int]]  # where each shard feature's ids begin and end


class FeatureGroups:
    """The shard features of a kernel by group.

    Args:
        feature_dims: columns of each shard feature.
        groups: the shard features of each group, in the group's order; together each of them once.
        device: stores the batches.
    """

    def __init__(self, feature_dims: Sequence[int], groups: Sequence[Sequence[int]], device: torch.device) -> None:
        self.feature_dims = list(feature_dims)
        self.groups = [list(group) for group in groups]
        self.columns = list(accumulate(self.feature_dims, initial=0))
        features = list(range(len(self.feature_dims)))
        self.whole = self.groups == [features]  # one group in batch order: nothing to split or join
        order = [feature for group in self.groups for feature in group]
        assert sorted(order) == features, f"groups {self.groups} must hold each of {len(features)} shard features once"
        self._position = {feature: position for position, feature in enumerate(order)}
        self._indices = [torch.tensor(group, dtype=torch.int64, device=device) for group in self.groups]

    def spans(self, offsets: Tensor, pooled: bool, counts: Sequence[int] | None) -> tuple[Spans, int]:
        """Where each shard feature's ids begin and end, and the batch size B (1 when not pooled).

        Copies offsets to the host where the caller has no ``counts``.
        """
        features = len(self.feature_dims)
        batch = (offsets.numel() - 1) // features if pooled else 1
        if counts is not None:
            starts = list(accumulate(counts, initial=0))
        else:
            starts = offsets.index_select(0, torch.arange(features + 1, device=offsets.device) * batch).tolist()
        return list(pairwise(starts)), batch

    def take(self, values: Tensor, group: int, spans: Spans) -> Tensor:
        """``[N] -> [n]``: one group's ids or per-sample weights."""
        if self.whole:
            return values
        parts = [values[slice(*spans[feature])] for feature in self.groups[group]]
        return torch.cat(parts) if parts else values[:0]

    def take_offsets(self, offsets: Tensor, group: int, batch: int) -> Tensor:
        """``[F * B + 1] -> [G * B + 1]``."""
        if self.whole:
            return offsets
        lengths = offsets.diff().view(len(self.feature_dims), batch).index_select(0, self._indices[group])
        return functional.pad(lengths.view(-1).cumsum(0, dtype=offsets.dtype), (1, 0))

    def take_pooled_grad(self, grad: Tensor, group: int) -> Tensor:
        """``[B, columns of all shard features] -> [B, columns of the group's]``."""
        if self.whole:
            return grad
        members = self.groups[group]
        return torch.cat([grad[:, self.columns[feature] : self.columns[feature + 1]] for feature in members], dim=1)

    def take_flat_grad(self, grad: Tensor, group: int, spans: Spans) -> Tensor:
        """Flat gradient of all shard features -> that of the group's ``[n, d]``."""
        members = self.groups[group]
        dim = self.feature_dims[members[0]]
        if self.whole:
            return grad.reshape(-1, dim)
        sizes = [(end - start) * width for (start, end), width in zip(spans, self.feature_dims, strict=True)]
        parts = grad.split(sizes)
        return torch.cat([parts[feature] for feature in members]).view(-1, dim)

    def join_pooled(self, outputs: Sequence[Sequence[Tensor]]) -> Tensor:
        """Per group and shard feature ``[B, d]`` -> ``[B, columns of all shard features]``."""
        parts = [part for output in outputs for part in output]
        return torch.cat([parts[self._position[feature]] for feature in range(len(parts))], dim=1)

    def join_flat(self, outputs: Sequence[Tensor], spans: Spans) -> Tensor:
        """Per group ``[n, d]`` or ``[n]``, one shard feature after the other -> flat, in batch order."""
        if self.whole:
            return outputs[0].reshape(-1)
        parts: list[Tensor] = []
        for output, members in zip(outputs, self.groups, strict=True):
            parts += output.split([spans[feature][1] - spans[feature][0] for feature in members])
        return torch.cat([parts[self._position[feature]].reshape(-1) for feature in range(len(parts))])
