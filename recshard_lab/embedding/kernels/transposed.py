"""One group's lookup and the same lookup transposed: from bags to rows forward, from rows to bags backward.

Shape letters: G lanes of one group, B batch, n ids of one group, d columns, U touched rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from recshard_lab.embedding.optimizers import accumulate_dtype

CHUNK_BYTES = 1024 * 1024  # of gradient rows: they must stay in the L2 cache, or near it


@dataclass
class Looked:
    """What one group looked up: kept for backward."""

    rows: Tensor  # [n] flat row of each id
    offsets: Tensor  # [G * B + 1]; not pooled: unused
    weights: Tensor | None  # [n] per-sample weights


@dataclass
class Touched:
    """The transposed lookup of one group: its distinct rows and how to make their gradient."""

    rows: Tensor  # [U] int64 flat rows, ascending
    starts: Tensor  # [U + 1] where each row's members begin
    members: Tensor  # [n] bags, row after row
    weights: Tensor | None  # [n] per-sample weights, row after row
    bag_grads: Tensor  # [bags, d]

    def chunks(self, chunk_bytes: int = CHUNK_BYTES) -> Iterator[tuple[slice, Tensor]]:
        """Which of the rows, and their coalesced gradient, a cacheful at a time."""
        total = self.rows.numel()
        row_bytes = self.bag_grads.shape[1] * self.bag_grads.element_size()
        size = max(1, chunk_bytes // row_bytes) if self.rows.device.type == "cpu" else max(1, total)
        edges = [*range(0, total, size), total]
        cuts = self.starts[edges].tolist()
        for position in range(len(edges) - 1):
            chunk, own = slice(*edges[position : position + 2]), slice(*cuts[position : position + 2])
            starts = self.starts[chunk.start : chunk.stop + 1] - own.start
            weights = None if self.weights is None else self.weights[own]
            yield chunk, embedding_bag(self.members[own], self.bag_grads, starts, weights)


def embedding_bag(indices: Tensor, table: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
    """``functional.embedding_bag`` in mode sum, offsets with their end, without its argument checks."""
    if indices.numel() == 0:
        return table.new_zeros(offsets.numel() - 1, table.shape[1])
    return torch.embedding_bag(table, indices, offsets, False, 0, False, weights, True)[0]


def pool(looked: Looked, weight: Tensor, first: int, end: int) -> Tensor:
    """Sums ``[end - first, d]`` of some bags; half-precision rows are widened before they are added."""
    offsets = looked.offsets[first : end + 1].to(looked.rows.dtype)
    rows, weights = looked.rows, looked.weights
    if end - first < looked.offsets.numel() - 1:
        own = slice(*offsets[[0, -1]].tolist())
        rows, weights, offsets = rows[own], None if weights is None else weights[own], offsets - own.start
    wide = accumulate_dtype(weight.dtype)
    if weight.dtype != wide:
        weight = weight.index_select(0, rows).to(wide)
        rows = torch.arange(rows.numel(), dtype=rows.dtype, device=rows.device)
    return embedding_bag(rows, weight, offsets, None if weights is None else weights.to(wide))


def gather(rows: Tensor, weight: Tensor) -> Tensor:
    """``[n, d]``."""
    return weight.index_select(0, rows).to(accumulate_dtype(weight.dtype))


def transpose(looked: Looked, bag_grads: Tensor, bags: Tensor | None) -> Touched:
    """Row -> its bags, from bag -> its rows."""
    ordered, order = looked.rows.sort(stable=True)  # replicas add up a row in one order, whatever lies beside it
    rows, counts = torch.unique_consecutive(ordered, return_counts=True)
    starts = looked.rows.new_zeros(rows.numel() + 1)
    torch.cumsum(counts, 0, out=starts[1:])
    members = order.to(starts.dtype) if bags is None else bags.index_select(0, order)
    weights = looked.weights
    if weights is not None:
        weights = weights.to(bag_grads.dtype).index_select(0, order)
    return Touched(rows.long(), starts, members, weights, bag_grads)


def weight_grad(weight: Tensor, rows: Tensor, bag_grads: Tensor, bags: Tensor | None) -> Tensor:
    """``[n]``: the inner product of each id's row with the gradient of its bag."""
    assert bags is not None
    if weight.dtype == bag_grads.dtype:  # the formula of torch's own embedding_bag, no row is copied
        product = torch.ops.aten._embedding_bag_per_sample_weights_backward
        return product(bag_grads, weight, rows, bags[:0], bags, 0)
    return torch.linalg.vecdot(gather(rows, weight), bag_grads.index_select(0, bags))
