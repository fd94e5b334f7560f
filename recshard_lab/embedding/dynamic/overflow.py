"""Ids of a training batch that find no slot, because a batch has more distinct ids than the fast tier of its table.

Shape letters: F shard features, B bags of each, N ids of the batch, K of them without a slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from recshard_lab.embedding.kernels import RowNorms

ABOVE = 1 << 62  # numbers of the second kernel's rows, above those of the first one's and their padding


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


class _Squares(Exception):
    """Ends a backward pass once its squares are known. It has changed nothing then."""


class JointNorms:
    """`RowNorms` of a kernel, with which the rows of a second kernel get theirs, in the same calls.

    The backward pass of the second kernel runs up to its next squares, once for each call, and the last time whole.
    Column shards have the same rows in both kernels.

    Args:
        step: the backward pass of the second kernel, which takes its `RowNorms`.
        row_norms: of both.
    """

    def __init__(self, step: Callable[[RowNorms], object], row_norms: RowNorms) -> None:
        self._step, self._row_norms = step, row_norms
        self._sums: list[list[Tensor]] = []  # of each call, per slot those of the second kernel
        self._found: tuple[list[Tensor], list[Tensor]] | None = None
        self._calls = 0

    def known(self, rows: list[Tensor], squares: list[Tensor]) -> list[Tensor]:
        """The `RowNorms` of the second kernel: sums of an earlier call."""
        self._calls += 1
        if self._calls > len(self._sums):
            self._found = rows, squares
            raise _Squares
        return self._sums[self._calls - 1]

    def __call__(self, rows: list[Tensor], squares: list[Tensor]) -> list[Tensor]:
        """Per slot the sums of the first kernel's rows."""
        self._calls = 0
        with suppress(_Squares):
            self._step(self.known)
        self._calls = 0
        assert self._found is not None
        others = [own + ABOVE for own in self._found[0]]
        joined = [torch.cat(pair) for pair in zip(squares, self._found[1], strict=True)]
        sums = self._row_norms([torch.cat(pair) for pair in zip(rows, others, strict=True)], joined)
        self._sums.append([own[len(first) :] for own, first in zip(sums, squares, strict=True)])
        return [own[: len(first)] for own, first in zip(sums, squares, strict=True)]


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
