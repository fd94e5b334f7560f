"""One group's lookup and the same lookup transposed: from bags to rows forward, from rows to bags backward.

Shape letters: G shard features of one group, B batch, n ids of one group, d columns, U touched rows, S shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from recshard_lab.embedding.optimizers import RowDims, accumulate_dtype

# Splits a batch into groups of shard features that one operator can serve, and joins the groups' results.
#
# Shape letters: F shard features, G shard features of one group, B batch, N ids, n ids of one group, d columns.


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
        self._positions = sorted(features, key=order.__getitem__)
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
        return pad(lengths.view(-1).cumsum(0, dtype=offsets.dtype), (1, 0))

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

    def in_order(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """One part of each group's shard features, group after group -> in the order of shard features."""
        return [parts[position] for position in self._positions]

    def join_pooled(self, outputs: Sequence[Tensor]) -> Tensor:
        """Per group ``[B, columns of the group's]`` -> ``[B, columns of all shard features]``."""
        if self.whole:
            return outputs[0]
        dims = [[self.feature_dims[feature] for feature in group] for group in self.groups]
        parts = [part for out, own in zip(outputs, dims, strict=True) for part in out.split(own, dim=1)]
        return torch.cat(self.in_order(parts), dim=1)

    def join_flat(self, outputs: Sequence[Tensor], spans: Spans) -> Tensor:
        """Per group ``[n, d]`` or ``[n]``, one shard feature after the other -> flat, in batch order."""
        if self.whole:
            return outputs[0].reshape(-1)
        parts: list[Tensor] = []
        for output, members in zip(outputs, self.groups, strict=True):
            parts += output.split([spans[feature][1] - spans[feature][0] for feature in members])
        return torch.cat([part.reshape(-1) for part in self.in_order(parts)])


CHUNK_BYTES = 1024 * 1024  # of gradient rows, so that they stay in or near the L2 cache


@dataclass
class Looked:
    """What one group looked up: kept for backward."""

    rows: Tensor  # [n] flat row of each id
    offsets: Tensor  # [G * B + 1]; not pooled: unused
    weights: Tensor | None  # [n] per-sample weights
    most_rows: list[int]  # [S] an upper bound of each shard's touched rows


@dataclass
class TransposedLookup:
    """The transposed lookup of one group: its distinct rows and how to compute their gradient.

    On CPU the rows are the U touched ones. On a device only the host's bound of their number is known without a wait:
    there each shard's rows are followed by padding, which names the spare row below all shards and has no members.
    """

    rows: Tensor  # [U] int64 flat rows, ascending within each shard
    starts: Tensor  # [U + 1] where each row's members begin
    shard_sizes: list[int]  # [S] how many of the rows each shard has, padding included
    members: Tensor  # [n] bags, row after row
    weights: Tensor | None  # [n] per-sample weights, row after row
    bag_grads: Tensor  # [bags, d]
    # what a step gets from the tables, one number for all rows or [U]: columns of the whole table, and steps taken
    full_dim: RowDims = 0
    iteration: RowDims = 0
    totals: list[Tensor] = field(default_factory=list)  # [U] or [U, k] for each round of row norms so far

    def above(self, chunk: slice) -> tuple[list[Tensor], RowDims, RowDims]:
        """Totals, columns and steps of some of the rows."""
        dims, count = (own if isinstance(own, int) else own[chunk] for own in (self.full_dim, self.iteration))
        return [total[chunk] for total in self.totals], dims, count

    def chunks(self, chunk_bytes: int = CHUNK_BYTES) -> Iterator[tuple[slice, Tensor]]:
        """Some of the rows and their summed gradient at a time: on CPU as many as fit the cache, elsewhere all."""
        total = self.rows.numel()
        if self.rows.device.type != "cpu":
            if total:
                yield slice(0, total), embedding_bag(self.members, self.bag_grads, self.starts, self.weights)
            return
        row_bytes = self.bag_grads.shape[1] * self.bag_grads.element_size()
        edges = [*range(0, total, max(1, chunk_bytes // row_bytes)), total]
        cuts = self.starts[edges].tolist()
        for position in range(len(edges) - 1):
            chunk, own = slice(*edges[position : position + 2]), slice(*cuts[position : position + 2])
            starts = self.starts[chunk.start : chunk.stop + 1] - own.start
            weights = None if self.weights is None else self.weights[own]
            yield chunk, embedding_bag(self.members[own], self.bag_grads, starts, weights)

    def shards(self, bounds: Tensor) -> Tensor:
        """``[U]`` the shard of each row; ``bounds`` as of `transpose`. Padding counts to the last shard."""
        return torch.searchsorted(bounds[1:-1], self.rows, right=True)


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


def transpose(looked: Looked, bag_grads: Tensor, bags: Tensor | None, bounds: Tensor) -> TransposedLookup:
    """Row -> its bags, from bag -> its rows.

    Args:
        bounds: ``[S + 1]`` int64, the first flat row of each shard, and the spare row.
    """
    ordered, order = looked.rows.sort(stable=True)  # replicas must add the bags of a row in the same order
    if ordered.device.type == "cpu":
        rows, counts = torch.unique_consecutive(ordered, return_counts=True)
        starts = looked.rows.new_zeros(rows.numel() + 1)
        torch.cumsum(counts, 0, out=starts[1:])
        rows = rows.long()
        shard_sizes = torch.searchsorted(rows, bounds).diff().tolist() if bounds.numel() > 2 else [rows.numel()]
    else:
        shard_sizes = looked.most_rows
        rows, starts = _padded_rows(ordered, bounds, shard_sizes)
    members = order.to(starts.dtype) if bags is None else bags.index_select(0, order)
    weights = looked.weights
    if weights is not None:
        weights = weights.to(bag_grads.dtype).index_select(0, order)
    return TransposedLookup(rows, starts, shard_sizes, members, weights, bag_grads)


def touched_rows(ids: Tensor, num_rows: int, padded: bool) -> Tensor:
    """The distinct rows of one shard, ascending, as `transpose` computes them.

    Args:
        ids: ``[n]``.
        num_rows: of the shard.
        padded: as off the CPU, where their number is known without a host wait.
    """
    if not padded:
        return ids.unique().long()
    bounds = torch.tensor([0, num_rows], device=ids.device)
    return _padded_rows(ids.sort()[0], bounds, [min(ids.numel(), num_rows)])[0]


def _padded_rows(ordered: Tensor, bounds: Tensor, shard_sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Distinct rows and where each begins in ``ordered`` ``[n]``, for shards of fixed sizes, without a host wait."""
    total, last = sum(shard_sizes), max(0, ordered.numel() - 1)
    if not total:
        return bounds[:0], ordered.new_zeros(1)
    places = pad((ordered[1:] != ordered[:-1]).cumsum(0), (1, 0))  # [n] the number of each id's row
    if len(shard_sizes) > 1:
        bounds = bounds.to(ordered.dtype)
        firsts = torch.searchsorted(ordered, bounds)  # [S + 1] each shard's first id
        sizes = torch.minimum(firsts.diff(), bounds.diff())  # shard_sizes, on the device
        shifts = sizes.cumsum(0) - sizes - places.index_select(0, firsts[:-1].clamp(max=last))
        places += shifts.index_select(0, torch.searchsorted(bounds[1:-1], ordered, right=True))
    starts = torch.searchsorted(places, torch.arange(total + 1, device=places.device))
    rows = ordered.index_select(0, starts[:-1].clamp(max=last)).long()
    return torch.where(starts.diff() > 0, rows, bounds[-1]), starts.to(ordered.dtype)


def weight_grad(weight: Tensor, rows: Tensor, bag_grads: Tensor, bags: Tensor | None) -> Tensor:
    """``[n]``: the inner product of each id's row with the gradient of its bag."""
    assert bags is not None
    if weight.dtype == bag_grads.dtype:  # the formula of torch's own embedding_bag, no row is copied
        product = torch.ops.aten._embedding_bag_per_sample_weights_backward
        return product(bag_grads, weight, rows, bags[:0], bags, 0)
    return torch.linalg.vecdot(gather(rows, weight), bag_grads.index_select(0, bags))
