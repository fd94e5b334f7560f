"""Ids of a training batch that find no slot, because a batch has more distinct ids than the fast tier of its table.

Shape letters: F shard features, B bags of each, N ids of the batch, K of them without a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class Absent(NamedTuple):
    """Ids of a shard feature without a slot. Shape letter A: these ids.

    Attributes:
        feature: its number.
        positions: ``[A]`` of the ids in the batch.
        rows: ``[A, D]``.
        overflowed: ``[A]`` bool: whose rows are trained. None for none.
    """

    feature: int
    positions: Tensor
    rows: Tensor
    overflowed: Tensor | None


class Overflow(NamedTuple):
    """The ids of a batch that have no slot and are trained.

    Attributes:
        ids, positions: ``[K]``: in the order of the batch, and where they are in it.
        batch: offsets, per-sample weights and counts of these ids alone, as `LookupKernel.forward` takes them.
    """

    ids: Tensor
    positions: Tensor
    batch: tuple[Tensor, Tensor | None, list[int]]

    def _spans(self) -> list[tuple[int, int]]:
        return list(pairwise(accumulate(self.batch[2], initial=0)))

    def ids_of(self, slot: int, feature_slots: Sequence[int]) -> Tensor:
        """The distinct ids of a slot, ascending."""
        spans = zip(feature_slots, self._spans(), strict=True)
        return torch.cat([self.ids[:0], *(self.ids[first:end] for own, (first, end) in spans if own == slot)]).unique()

    def local_ids(self, distinct: Sequence[Tensor], feature_slots: Sequence[int]) -> Tensor:
        """``[K]`` the position of each id among the distinct ones of its slot."""
        spans = zip(feature_slots, self._spans(), strict=True)
        return torch.cat([torch.searchsorted(distinct[slot], self.ids[first:end]) for slot, (first, end) in spans])


def overflow_of(
    ids: Tensor, offsets: Tensor, weights: Tensor | None, counts: Sequence[int], absent: Sequence[Absent]
) -> Overflow | None:
    """What of a batch is trained without a slot. None if nothing is.

    Args:
        ids, offsets, weights, counts: the batch, as `LookupKernel.forward` takes it.
        absent: its ids without a slot.
    """
    chosen = [own.positions[own.overflowed] for own in absent if own.overflowed is not None]
    if not chosen:
        return None
    positions = torch.cat(chosen)
    mask = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    mask[positions] = True
    before = pad(mask.cumsum(0), (1, 0))
    ends = before[[*accumulate(counts, initial=0)]].tolist()
    few = [end - start for start, end in pairwise(ends)]
    own_weights = None if weights is None else weights[positions]
    return Overflow(ids[positions], positions, (before[offsets], own_weights, few))
