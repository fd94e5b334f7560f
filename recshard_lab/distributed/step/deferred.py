"""Deferred steps: backward keeps the gradients of fused tables, and the optimizer's ``step`` applies them.

Between both, all gradients of a step are known. Their norm can be clipped, and those of several batches accumulate::

    backward of batch 1, 2, ...   gradients arrive and are kept          executor.finish_backward
    norm                          of the summed gradient of every row    Deferred.norm_power, one all-reduce
    step                          each kernel once, for all batches      executor.step_deferred

Shape letters: F shard features of a kernel, S bags, N ids, d columns, U distinct rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from recshard_lab.distributed.step.lookup import Bags, KernelGroup
from recshard_lab.embedding.kernels.feature_groups import FeatureGroups
from recshard_lab.embedding.kernels.transposed import Looked, Touched, transpose
from recshard_lab.sparse.ops import complete_cumsum


@dataclass(slots=True)
class KernelGradients:
    """The gradients of one kernel, of one batch or of several.

    Attributes:
        group: the kernel.
        bags: the ids of each batch, from all ranks.
        grads: the gradient of each batch's rows: ``[S, columns]``, flat for sequences.
        kept: what the lookup of a single batch kept for backward; None if nothing was looked up here.
    """

    group: KernelGroup
    bags: list[Bags]
    grads: list[Tensor]
    kept: Any = None

    def add(self, other: KernelGradients) -> None:
        """Accumulates the gradients of another batch."""
        self.bags += other.bags
        self.grads += other.grads
        self.kept = None  # the merged batch is another lookup

    def merged(self) -> tuple[Bags, Tensor]:
        """All batches as one."""
        if len(self.bags) > 1:
            grad = merge_grads(self.grads, self.bags, self.group)
            self.bags, self.grads = [merge_bags(self.bags, self.group.kernel.pooled)], [grad]
        return self.bags[0], self.grads[0]


class Deferred:
    """The gradients that one collection keeps until the step."""

    def __init__(self) -> None:
        #: the gradients of each kernel of this rank, by the kernel group's identity
        self.kernels: dict[int, KernelGradients] = {}
        #: batches since the last step
        self.batches = 0
        self._sums: dict[int, RowGradients] = {}

    def add(self, kernels: Sequence[KernelGradients]) -> None:
        """Accumulates the gradients of one batch."""
        self.batches += 1
        for own in kernels:
            if id(own.group) in self.kernels:
                self.kernels[id(own.group)].add(own)
            else:
                self.kernels[id(own.group)] = own

    def take(self) -> list[KernelGradients]:
        """The gradients of all batches; none are kept."""
        kernels, self.kernels, self.batches = list(self.kernels.values()), {}, 0
        return kernels

    def scale(self, factor: Tensor) -> None:
        """Multiplies all gradients, in place."""
        for own in self.kernels.values():
            for grad in own.grads:
                grad.mul_(factor.to(grad.device))

    def norm_power(self, norm_type: float, replicas: bool, total: Tensor) -> Tensor:
        """``total`` plus ``|g|^p`` of the summed gradients of all touched rows; the maximum for ``p = inf``.

        Args:
            norm_type: p.
            replicas: whether this rank counts the replicated tables, whose gradients all ranks have.
            total: 0-d.
        """
        for key, own in self.kernels.items():
            if own.group.first_copy is not None and not replicas:
                continue
            if key not in self._sums:
                self._sums[key] = RowGradients(own.group)
            for touched in self._sums[key](*own.merged()):
                for _, rows in touched.chunks():
                    if norm_type == float("inf"):
                        total = torch.maximum(total, rows.abs().amax())
                    else:
                        total = total + torch.linalg.vector_norm(rows, norm_type) ** norm_type
        return total


class RowGradients:
    """Sums the gradient of each distinct row of a kernel's shards.

    Args:
        group: the kernel.
    """

    def __init__(self, group: KernelGroup) -> None:
        self.pooled, self.slots, self.dynamic = group.kernel.pooled, group.kernel.slots, group.kind.dynamic
        self.feature_slots = group.kernel.feature_slots
        dims = [self.slots[slot].num_cols for slot in self.feature_slots]
        #: shard features of each width
        self.widths = [[n for n, dim in enumerate(dims) if dim == width] for width in sorted(set(dims))]
        self.features, self.device = FeatureGroups(dims, self.widths, group.device), group.device
        self.fixed = [self._bounds([slot.num_rows for slot in self.slots], members) for members in self.widths]

    def _bounds(self, sizes: Sequence[int], members: Sequence[int]) -> tuple[dict[int, int], Tensor]:
        """Slot -> first of its rows, numbered over all slots of a width; and the same numbers with their end."""
        slots = sorted({self.feature_slots[feature] for feature in members})
        edges = list(accumulate((sizes[slot] for slot in slots), initial=0))
        return dict(zip(slots, edges, strict=False)), torch.tensor(edges, device=self.device)

    def __call__(self, bags: Bags, grad: Tensor) -> list[Touched]:
        """The distinct rows of each width, and how to sum the gradient of each."""
        ids, offsets, weights, counts = bags
        sizes = [slot.num_rows for slot in self.slots]
        if self.dynamic:
            ids, sizes = self._numbered(ids, counts)
        spans, samples = self.features.spans(offsets, self.pooled, counts)
        found = []
        for index, members in enumerate(self.widths):
            bounds, edges = self._bounds(sizes, members) if self.dynamic else self.fixed[index]
            uses, parts = dict.fromkeys(bounds, 0), []
            own_ids = self.features.take(ids, index, spans).long().split([counts[feature] for feature in members])
            for feature, own in zip(members, own_ids, strict=True):
                uses[self.feature_slots[feature]] += counts[feature]
                parts.append(own + bounds[self.feature_slots[feature]])
            rows, width = torch.cat(parts), self.features.feature_dims[members[0]]
            own_weights = None if weights is None else self.features.take(weights, index, spans)
            if self.pooled:
                own_offsets = self.features.take_offsets(offsets, index, samples)
                own_grad = self.features.take_pooled_grad(grad, index).view(samples, len(members), width)
                bag_grads = own_grad.transpose(0, 1).reshape(-1, width)
                numbers = torch.arange(len(members) * samples, device=ids.device)
                bag_of_id = numbers.repeat_interleave(own_offsets.diff(), output_size=rows.numel())
            else:
                own_offsets, bag_of_id = offsets, torch.arange(rows.numel(), device=ids.device)
                bag_grads = self.features.take_flat_grad(grad, index, spans)
            most = [min(use, sizes[slot]) for slot, use in uses.items()]
            found.append(transpose(Looked(rows, own_offsets, own_weights, most), bag_grads, bag_of_id, edges))
        return found

    def _numbered(self, ids: Tensor, counts: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Ids of dynamic tables have any value: numbers them within each slot. Also how many ids each slot has."""
        parts, sizes = list(ids.split(list(counts))), [0] * len(self.slots)
        for slot in set(self.feature_slots):
            features = [feature for feature, own in enumerate(self.feature_slots) if own == slot]
            numbers = torch.cat([parts[feature] for feature in features]).unique(return_inverse=True)[1]
            sizes[slot] = len(numbers)  # not how many are distinct: that is unknown on the host
            for feature, part in zip(features, numbers.split([counts[n] for n in features]), strict=True):
                parts[feature] = part
        return torch.cat(parts), sizes


def merge_bags(batches: Sequence[Bags], pooled: bool) -> Bags:
    """The bags of several batches as those of one: of each shard feature, batch after batch."""
    counts = [sum(own) for own in zip(*(bags[3] for bags in batches), strict=True)]
    ids = _by_feature([bags[0] for bags in batches], batches)
    weighted = [bags[2] for bags in batches if bags[2] is not None]
    weights = _by_feature(weighted, batches) if weighted else None
    if pooled:
        lengths = torch.cat([bags[1].diff().view(len(counts), -1) for bags in batches], 1)
        return ids, complete_cumsum(lengths.reshape(-1)), weights, counts
    return ids, sum((bags[1] for bags in batches[1:]), batches[0][1]), weights, counts


def merge_grads(grads: Sequence[Tensor], batches: Sequence[Bags], group: KernelGroup) -> Tensor:
    """The gradients of several batches in the order of `merge_bags`."""
    if group.kernel.pooled:
        return torch.cat(list(grads))
    dims = [feature.shard.num_cols for feature in group.features]
    sizes = [[count * dim for count, dim in zip(bags[3], dims, strict=True)] for bags in batches]
    return _interleaved([grad.split(own) for grad, own in zip(grads, sizes, strict=True)])


def _by_feature(values: Sequence[Tensor], batches: Sequence[Bags]) -> Tensor:
    return _interleaved([own.split(bags[3]) for own, bags in zip(values, batches, strict=True)])


def _interleaved(parts: Sequence[Sequence[Tensor]]) -> Tensor:
    return torch.cat([part for feature in zip(*parts, strict=True) for part in feature])
