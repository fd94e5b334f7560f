"""Lookups of batches by table, and the distinct rows among them.

Names follow TorchRec's ``torchrec.distributed.model_tracker``.

Shape letters: N ids of a lookup, U distinct ids, S numbers of a state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from recshard_lab.distributed.delta_tracker import UniqueRows


class UpdateMode(Enum):
    """Which state of an id that was looked up several times is kept."""

    NONE = "none"
    FIRST = "first"
    LAST = "last"


@dataclass
class IndexedLookup:
    """The ids of one table in one batch.

    Args:
        batch_idx: the batch.
        ids: ``[N]`` int64.
        states: ``[N]`` or ``[N, S]``; None without states.
        compact: whether several batches were merged into this one.
    """

    batch_idx: int
    ids: Tensor
    states: Tensor | None
    compact: bool = False


class DeltaStore(ABC):
    """The interface of stores of lookups."""

    def __init__(self, updateMode: UpdateMode = UpdateMode.NONE) -> None:
        self.updateMode = updateMode

    @abstractmethod
    def append(self, batch_idx: int, fqn: str, ids: Tensor, states: Tensor | None = None) -> None:
        """Adds a lookup of the table `fqn`."""

    @abstractmethod
    def delete(self, up_to_idx: int | None = None) -> None:
        """Removes the batches before `up_to_idx`; all if it is None."""

    @abstractmethod
    def compact(self, start_idx: int, end_idx: int) -> None:
        """Merges the batches from `start_idx` to before `end_idx`."""

    @abstractmethod
    def get_unique(self, from_idx: int = 0) -> dict[str, UniqueRows]:
        """Table -> its distinct rows in the batches from `from_idx`."""


class DeltaStoreTrec(DeltaStore):
    """A store of lookups in memory.

    Args:
        updateMode: which state of an id is kept. With ``NONE``, lookups have no states.

    >>> store = DeltaStoreTrec()
    >>> store.append(0, "movies", torch.tensor([7, 2])); store.append(1, "movies", torch.tensor([7, 1]))
    >>> store.compact(0, 2); store.get_unique()["movies"].ids
    tensor([1, 2, 7])
    """

    def __init__(self, updateMode: UpdateMode = UpdateMode.NONE) -> None:
        super().__init__(updateMode)
        self.per_fqn_lookups: dict[str, list[IndexedLookup]] = {}

    def append(self, batch_idx: int, fqn: str, ids: Tensor, states: Tensor | None = None) -> None:
        """Adds a lookup.

        Args:
            batch_idx: the batch.
            fqn: the table.
            ids: ``[N]`` int64.
            states: ``[N]`` or ``[N, S]``, unless the mode is ``NONE``.

        Raises:
            ValueError: states are missing, or the mode has none.
        """
        if (states is None) != (self.updateMode is UpdateMode.NONE):
            raise ValueError(
                f"a lookup of {fqn!r} has {'no ' if states is None else ''}states, and the store's mode is "
                f"{self.updateMode.name}. Fix: UpdateMode.NONE without states, FIRST or LAST with states"
            )
        self.per_fqn_lookups.setdefault(fqn, []).append(IndexedLookup(batch_idx, ids, states))

    def delete(self, up_to_idx: int | None = None) -> None:
        """Removes the batches before `up_to_idx`; all if it is None."""
        for fqn, lookups in self.per_fqn_lookups.items():
            self.per_fqn_lookups[fqn] = [one for one in lookups if up_to_idx is not None and one.batch_idx >= up_to_idx]

    def compact(self, start_idx: int, end_idx: int) -> None:
        """Merges the batches from `start_idx` to before `end_idx` into one, under the number of the first of them.

        Raises:
            ValueError: the range is empty.
        """
        if start_idx >= end_idx:
            raise ValueError(f"batches {start_idx} to {end_idx} are an empty range. Fix: start_idx < end_idx")
        for fqn, lookups in self.per_fqn_lookups.items():
            inside = [one for one in lookups if start_idx <= one.batch_idx < end_idx]
            if inside:
                rows = _unique(inside, self.updateMode)
                merged = IndexedLookup(inside[0].batch_idx, rows.ids, rows.states, compact=True)
                before = [one for one in lookups if one.batch_idx < start_idx]
                self.per_fqn_lookups[fqn] = [*before, merged, *(one for one in lookups if one.batch_idx >= end_idx)]

    def get_indexed_lookups(self, start_idx: int, end_idx: int) -> dict[str, list[IndexedLookup]]:
        """Table -> its lookups in the batches from `start_idx` to before `end_idx`."""
        return {
            fqn: [one for one in lookups if start_idx <= one.batch_idx < end_idx]
            for fqn, lookups in self.per_fqn_lookups.items()
        }

    def get_unique(self, from_idx: int = 0) -> dict[str, UniqueRows]:
        """Table -> its distinct rows ``[U]``, ascending, in the batches from `from_idx`. Others have no entry."""
        late = {
            fqn: [one for one in lookups if one.batch_idx >= from_idx] for fqn, lookups in self.per_fqn_lookups.items()
        }
        return {fqn: _unique(lookups, self.updateMode) for fqn, lookups in late.items() if lookups}


def _unique(lookups: list[IndexedLookup], mode: UpdateMode) -> UniqueRows:
    ids, places = torch.cat([one.ids for one in lookups]).unique(return_inverse=True)
    if mode is UpdateMode.NONE:
        return UniqueRows(ids, None)
    number = torch.arange(len(places), device=places.device)
    end = "amin" if mode is UpdateMode.FIRST else "amax"
    kept = number.new_zeros(len(ids)).scatter_reduce(0, places, number, end, include_self=False)
    return UniqueRows(ids, torch.cat([one.states for one in lookups if one.states is not None])[kept])
