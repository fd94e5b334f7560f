"""Cuts a batch into groups of lanes that one operation can serve, and joins what the groups return.

Shape letters: L lanes, G lanes of one group, B batch, N ids, n ids of one group, d columns of a lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn import functional

Spans = list[tuple[int, int]]  # where each lane's ids begin and end


class LaneGroups:
    """The lanes of a kernel, told apart by group.

    Args:
        lane_dims: columns of each lane.
        groups: the lanes of each group, in the order in which the group works on them; together every lane once.
    """

    def __init__(self, lane_dims: Sequence[int], groups: Sequence[Sequence[int]]) -> None:
        self.lane_dims = list(lane_dims)
        self.groups = [list(group) for group in groups]
        self.columns = list(accumulate(self.lane_dims, initial=0))
        lanes = list(range(len(self.lane_dims)))
        self.whole = self.groups == [lanes]  # one group in the given order: nothing to cut or join
        order = [lane for group in self.groups for lane in group]
        assert sorted(order) == lanes, f"groups {self.groups} must hold each of {len(lanes)} lanes once"
        self._position = {lane: position for position, lane in enumerate(order)}

    def spans(self, offsets: Tensor, pooled: bool) -> tuple[Spans, int]:
        """Where each lane's ids lie, and the batch size B (1 when not pooled)."""
        lanes = len(self.lane_dims)
        batch = (offsets.numel() - 1) // lanes if pooled else 1
        starts = offsets[::batch].tolist() if batch else [0] * (lanes + 1)
        return list(pairwise(starts)), batch

    def take(self, values: Tensor, group: int, spans: Spans) -> Tensor:
        """``[N] -> [n]``: one group's ids or per-sample weights."""
        if self.whole:
            return values
        parts = [values[slice(*spans[lane])] for lane in self.groups[group]]
        return torch.cat(parts) if parts else values[:0]

    def take_offsets(self, offsets: Tensor, group: int, batch: int) -> Tensor:
        """``[L * B + 1] -> [G * B + 1]``."""
        if self.whole:
            return offsets
        lengths = offsets.diff().view(len(self.lane_dims), batch)[self.groups[group]].reshape(-1)
        return functional.pad(lengths.cumsum(0, dtype=offsets.dtype), (1, 0))

    def take_pooled_grad(self, grad: Tensor, group: int) -> Tensor:
        """``[B, columns of all lanes] -> [B, columns of the group's lanes]``."""
        if self.whole:
            return grad
        own = self.groups[group]
        return torch.cat([grad[:, self.columns[lane] : self.columns[lane + 1]] for lane in own], dim=1)

    def take_flat_grad(self, grad: Tensor, group: int, spans: Spans) -> Tensor:
        """Flat gradient of all lanes -> that of the group's lanes ``[n, d]``."""
        own = self.groups[group]
        dim = self.lane_dims[own[0]]
        if self.whole:
            return grad.reshape(-1, dim)
        sizes = [(end - start) * width for (start, end), width in zip(spans, self.lane_dims, strict=True)]
        parts = grad.split(sizes)
        return torch.cat([parts[lane] for lane in own]).view(-1, dim)

    def join_pooled(self, outputs: Sequence[Sequence[Tensor]]) -> Tensor:
        """Per group and lane ``[B, d]`` -> ``[B, columns of all lanes]``."""
        pieces = [piece for output in outputs for piece in output]
        return torch.cat([pieces[self._position[lane]] for lane in range(len(pieces))], dim=1)

    def join_flat(self, outputs: Sequence[Tensor], spans: Spans) -> Tensor:
        """Per group ``[n, d]`` or ``[n]``, its lanes one after the other -> flat, in the lanes' own order."""
        if self.whole:
            return outputs[0].reshape(-1)
        pieces: list[Tensor] = []
        for output, own in zip(outputs, self.groups, strict=True):
            pieces += output.split([spans[lane][1] - spans[lane][0] for lane in own])
        return torch.cat([pieces[self._position[lane]].reshape(-1) for lane in range(len(pieces))])
