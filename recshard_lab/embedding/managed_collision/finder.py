"""Finds the row of an id, where the ids of rows are a tensor."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from recshard_lab.embedding.dynamic.index import ScoredIndex


class Owners(NamedTuple):
    """Which id owns each row.

    Attributes:
        ids: ``[E]`` int64.
        owned: ``[E]`` uint8: 1 where the row has an owner.
    """

    ids: Tensor
    owned: Tensor


class RowFinder:
    """The rows of ids of any int64 value.

    It indexes `Owners`, which alone are state. When something else has written them (a checkpoint, a move), the next
    call indexes them again.

    >>> import torch
    >>> owners = Owners(torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.uint8))
    >>> finder = RowFinder()
    >>> finder.assign(owners, torch.tensor([2, 0]), torch.tensor([10**12, -1]))
    >>> finder.find(owners, torch.tensor([-1, 7, 10**12])).tolist()
    [0, -1, 2]
    """

    def __init__(self) -> None:
        self._known: tuple[Tensor | int, ...] | None = None  # the owners, and their versions
        self._index: ScoredIndex
        self._row_of: Tensor  # [slots of the index + 1] the row of each slot; the last one is -1

    def find(self, owners: Owners, ids: Tensor) -> Tensor:
        """``[N]`` rows, -1 for ids without one."""
        self._follow(owners)
        return self._row_of[self._index.find(ids)]

    def assign(self, owners: Owners, rows: Tensor, ids: Tensor) -> None:
        """Makes distinct ids ``[M]``, which have no row, the owners of rows ``[M]``. Earlier owners lose theirs."""
        self._follow(owners)
        self._index.erase(owners.ids[rows[owners.owned[rows] == 1]])
        owners.ids[rows] = ids
        owners.owned[rows] = 1
        self._insert(ids, rows)
        self._known = (*owners, *_versions(owners))

    def knows(self, owners: Owners) -> bool:
        """Whether nothing else has written the owners."""
        known = self._known
        if known is None or known[0] is not owners.ids or known[1] is not owners.owned:
            return False
        return known[2:] == _versions(owners)

    def _follow(self, owners: Owners) -> None:
        if self.knows(owners):
            return
        rows = (owners.owned == 1).nonzero().squeeze(1)
        size = len(owners.ids)
        self._index = ScoredIndex(size + size // 4 + 1, 8 * size + 256, device=owners.ids.device)
        self._row_of = owners.ids.new_full((self._index.capacity + 1,), -1)
        self._insert(owners.ids[rows], rows)
        self._known = (*owners, *_versions(owners))

    def _insert(self, ids: Tensor, rows: Tensor) -> None:
        before = self._row_of
        found = self._index.find_or_insert(ids)
        if found.moved is not None:
            self._row_of = before.new_full((self._index.capacity + 1,), -1)
            self._row_of[found.moved[1]] = before[found.moved[0]]
        lost = len(found.evicted_ids) + int((found.slots < 0).sum())
        if lost:
            raise RuntimeError(
                f"{lost:,} of {len(ids):,} ids have no place in the index: too many of their hashes are equal. "
                f"Fix: pass input_hash_func, a function that gives these ids other values"
            )
        self._row_of[found.slots] = rows


def _versions(owners: Owners) -> tuple[int, ...]:
    """Numbers that change when something writes the owners."""
    return tuple(own._version for own in owners)
