"""The tiers below the fast one as one store: rows come up from the first tier that has them, and fall to the next one.

Shape letters: M ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from recshard_lab.embedding.dynamic.stores.base import Rows, RowStore, copy_rows, joined

_BATCH = 1 << 16  # rows


class Taken(NamedTuple):
    """Rows that move to the fast tier.

    Attributes:
        rows: of ids ``[M]``, zeros for absent ones. found: ``[M]`` bool which are present.
        parts: for each store the ids that it has.
    """

    rows: Rows
    found: Tensor
    parts: list[Tensor]


class Chain:
    """Several `RowStore`, fastest first. Ids of a call are distinct. All tensors are in host memory.

    Of several copies of a row, that in the first tier is the newest.

    If a tier fails, the rows that it was to store wait in memory. They are read as the newest copies, and the next
    `put` stores them.

    Args:
        stores: one or more, of one format.

    Attributes:
        has_copies: whether a tier may have a copy of a row of a faster one.
    """

    def __init__(self, stores: Sequence[RowStore]) -> None:
        self.stores = list(stores)
        self.has_copies = any(store.mode == "cache" for store in self.stores)
        self._waiting: Rows | None = None

    @contextmanager
    def batch(self) -> Iterator[None]:
        """No tier evicts a row that is stored or changed inside, before the end."""
        with ExitStack() as stack:
            for store in self.stores:
                stack.enter_context(store.batch())
            yield

    def get(self, ids: Tensor) -> tuple[Rows, Tensor]:
        """The rows of ids ``[M]``, zeros for absent ones, and ``[M]`` bool which are present. Nothing moves."""
        return self.take(ids)[:2]

    def take(self, ids: Tensor) -> Taken:
        """As `get`, for rows that move to the fast tier. Call `drop` once they are there."""
        rows, found = self.stores[0].get(ids)
        parts = [ids[found]]
        for store in self.stores[1:]:
            left = (~found).nonzero().squeeze(1)
            if not len(left):
                break
            lower, there = store.get(ids[left])
            copy_rows(lower.at(there), rows, left[there])
            found[left[there]] = True
            parts.append(ids[left[there]])
        if self._waiting is not None:
            at, there = _positions(self._waiting.ids, ids)
            copy_rows(self._waiting.at(at), rows, there)
            found[there] = True
        return Taken(rows, found, parts)

    def drop(self, taken: Taken) -> None:
        """Rows of `take` are in the fast tier now: tiers of mode ``"hybrid"`` lose them.

        Raises:
            TierError: a tier still has copies, which are not read while the row is in a faster one.
        """
        self._leave_waiting(taken.rows.ids[taken.found])
        error = None
        for store, ids in zip(self.stores, taken.parts, strict=False):
            try:
                if len(ids):
                    store.drop(ids)
            except Exception as problem:
                self.has_copies, error = True, error or problem
        if error is not None:
            raise error

    def put(self, rows: Rows) -> Rows | None:
        """Stores rows in the first tier. What a tier loses goes to the next one. Returns what the last one loses."""
        self._leave_waiting(rows.ids)
        lost: Rows | None = rows if self._waiting is None else joined([self._waiting, rows])
        for store in self.stores:
            if lost is None or not len(lost.ids):
                break
            self._waiting = lost  # until the store has them
            lost = store.put(lost)
        self._waiting = None
        return lost if lost is not None and len(lost.ids) else None

    def store_waiting(self) -> Rows | None:
        """Stores the rows that wait since a tier failed. Returns what the last tier loses."""
        return None if self._waiting is None else self.put(self._waiting.at(slice(0)))

    def change(self, ids: Tensor, change: Callable[[Rows, Tensor], Rows]) -> Tensor:
        """Overwrites the newest copies of rows. Returns ``[M]`` bool which ids are present.

        Args:
            ids: ``[M]``.
            change: is passed the rows of some of them and their positions ``[m]``. Returns the new rows.
        """
        left = torch.arange(len(ids))
        if self._waiting is not None:
            at, there = _positions(self._waiting.ids, ids)
            copy_rows(change(self._waiting.at(at), there), self._waiting, at)
            left = left[~torch.isin(left, there)]
        for store in self.stores:
            if not len(left):
                break
            rows, found = store.get(ids[left])
            if bool(found.any()):
                store.put(change(rows.at(found), left[found]))
            left = left[~found]
        present = torch.ones(len(ids), dtype=torch.bool)
        present[left] = False
        return present

    def contains(self, ids: Tensor) -> Tensor:
        """``[M]`` bool: which ids have a row. It is not counted as a lookup."""
        waiting = self._waits(ids)
        return waiting if bool(waiting.all()) else waiting | self._in(self.stores, ids)

    def delete(self, ids: Tensor) -> Tensor:
        """Removes every copy of ids ``[M]``. Returns ``[M]`` bool which had one."""
        found = self.contains(ids)
        for store in self.stores:
            store.delete(ids[found])
        self._leave_waiting(ids)
        return found

    def batches(self, size: int, faster: Callable[[Tensor], Tensor]) -> Iterator[Rows]:
        """The newest copy of every row, up to ``size`` at a time.

        Args:
            size: of a batch.
            faster: returns ``[M]`` bool which ids ``[M]`` are in the fast tier: they are left out.
        """
        if self._waiting is not None:
            yield self._waiting.at(~faster(self._waiting.ids))
        for _, rows in self.levels(size, faster):
            yield rows

    def levels(self, size: int, faster: Callable[[Tensor], Tensor]) -> Iterator[tuple[int, Rows]]:
        """`batches` with the number of the tier, without the rows that wait: see `store_waiting`."""
        for number, store in enumerate(self.stores):
            for rows in store.batches(size):
                newest = ~(faster(rows.ids) | self._waits(rows.ids) | self._in(self.stores[:number], rows.ids))
                if bool(newest.any()):
                    yield number, rows.at(newest)

    def clear(self) -> None:
        """Removes everything, in every tier."""
        self._waiting = None
        for store in self.stores:
            store.clear()

    def refill(
        self,
        index: Tensor,
        places: Tensor,
        levels: Tensor,
        read: Callable[[Tensor], Rows],
        lose: Callable[[Rows], object],
    ) -> None:
        """Fills empty tiers, in batches.

        Args:
            index: ``[M, 3]`` int64: ids, scores and `Rows.touched`.
            places: ``[M, 2]`` of `RowStore.places`.
            levels: ``[M]`` the number of the tier of each row. Rows for which it has no place go to the next one.
            read: returns the rows at positions ``[m]``.
            lose: is passed rows that the last tier has no place for.
        """
        levels = levels.clamp(max=len(self.stores) - 1)
        for number, store in enumerate(self.stores):
            at = (levels == number).nonzero().squeeze(1)
            ids, scores, touched = index[at].t().clone(memory_format=torch.contiguous_format)
            placed = store.reserve(ids, scores, touched, places[at])
            for some in at[placed].split(_BATCH):
                lost = store.put(read(some))
                for lower in self.stores[number + 1 :]:
                    lost = None if lost is None else lower.put(lost)
                if lost is not None:
                    lose(lost)
            rest = at[~placed]
            if number + 1 < len(self.stores):
                levels[rest] = number + 1
                places[rest] = -1
                continue
            for some in rest.split(_BATCH):
                if len(some):
                    lose(read(some))

    def sink(self) -> Rows | None:
        """Moves every row to the last tier. Returns the rows that it lost."""
        lost = [self.store_waiting()]
        for upper, lower in pairwise(self.stores):
            while len(upper):
                rows = next(upper.batches())
                lost.append(lower.put(rows))
                upper.delete(rows.ids)
        some = [rows for rows in lost if rows is not None]
        return joined(some) if some else None

    def counters(self) -> dict[str, dict[str, int]]:
        """Name of a tier -> its `StoreCounters`, and ``size`` in rows."""
        return {store.name: store.counters.as_dict() | {"size": len(store)} for store in self.stores}

    def close(self) -> None:
        """Closes all stores."""
        for store in self.stores:
            store.close()

    def _in(self, stores: Sequence[RowStore], ids: Tensor) -> Tensor:
        found = torch.zeros(len(ids), dtype=torch.bool)
        for store in stores:
            left = (~found).nonzero().squeeze(1)
            if len(left):
                found[left] = store.contains(ids[left])
        return found

    def _waits(self, ids: Tensor) -> Tensor:
        """``[M]`` bool: which ids have a row that waits."""
        return torch.zeros(len(ids), dtype=torch.bool) if self._waiting is None else torch.isin(ids, self._waiting.ids)

    def _leave_waiting(self, ids: Tensor) -> None:
        """Forgets the waiting rows of these ids."""
        if self._waiting is not None:
            rest = self._waiting.at(~torch.isin(self._waiting.ids, ids))
            self._waiting = rest if len(rest.ids) else None


def _positions(known: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Positions in ``known``, and in ``ids``, of the distinct ids that are in both."""
    order = known.argsort()
    at = torch.searchsorted(known[order], ids).clamp(max=max(0, len(known) - 1))
    there = (known[order][at] == ids).nonzero().squeeze(1)
    return order[at[there]], there
