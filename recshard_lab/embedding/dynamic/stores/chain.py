"""The tiers below the fast one as one store: rows come up from the first tier that has them, and fall to the next one.

Shape letters: M ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from recshard_lab.embedding.dynamic.stores.base import Rows, RowStore, joined


class Chain:
    """Several `RowStore`, fastest first. Ids of a call are distinct. All tensors are in host memory.

    Of several copies of a row, that in the first tier is the newest.

    Args:
        stores: one or more, of one format.
    """

    def __init__(self, stores: Sequence[RowStore]) -> None:
        self.stores = list(stores)

    def get(self, ids: Tensor) -> tuple[Rows, Tensor]:
        """The rows of ids ``[M]``, zeros for absent ones, and ``[M]`` bool which are present. Nothing moves."""
        return self._first_copies(ids, lambda store, own: store.get(own))

    def take(self, ids: Tensor) -> tuple[Rows, Tensor]:
        """As `get`, for rows that move to the fast tier: tiers of mode ``"hybrid"`` lose them."""
        return self._first_copies(ids, lambda store, own: store.take(own))

    def put(self, rows: Rows) -> Rows | None:
        """Stores rows in the first tier. What a tier loses goes to the next one. Returns what the last one loses."""
        lost: Rows | None = rows
        for store in self.stores:
            if lost is None or not len(lost.ids):
                return None
            lost = store.put(lost)
        return lost

    def change(self, ids: Tensor, change: Callable[[Rows, Tensor], Rows]) -> Tensor:
        """Overwrites the newest copies of rows. Returns ``[M]`` bool which ids are present.

        Args:
            ids: ``[M]``.
            change: is passed the rows of some of them and their positions ``[m]``. Returns the new rows.
        """
        left = torch.arange(len(ids))
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
        return self._in(self.stores, ids)

    def delete(self, ids: Tensor) -> Tensor:
        """Removes every copy of ids ``[M]``. Returns ``[M]`` bool which had one."""
        found = self.contains(ids)
        for store in self.stores:
            store.delete(ids[found])
        return found

    def batches(self, size: int, faster: Callable[[Tensor], Tensor]) -> Iterator[Rows]:
        """The newest copy of every row, up to ``size`` at a time.

        Args:
            size: of a batch.
            faster: returns ``[M]`` bool which ids ``[M]`` are in the fast tier: they are left out.
        """
        for number, store in enumerate(self.stores):
            for rows in store.batches(size):
                newest = ~(faster(rows.ids) | self._in(self.stores[:number], rows.ids))
                if bool(newest.any()):
                    yield rows.at(newest)

    def sink(self) -> Rows | None:
        """Moves every row to the last tier. Returns the rows that it lost."""
        lost = []
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

    def state(self) -> list[dict[str, Any]]:
        """The state of each store."""
        return [store.state() for store in self.stores]

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

    def _first_copies(
        self, ids: Tensor, read: Callable[[RowStore, Tensor], tuple[Rows, Tensor]]
    ) -> tuple[Rows, Tensor]:
        rows, found = read(self.stores[0], ids)
        for store in self.stores[1:]:
            left = (~found).nonzero().squeeze(1)
            if not len(left):
                break
            lower, there = read(store, ids[left])
            own, at = lower.at(there), left[there]
            found[at] = True
            rows.scores[at], rows.touched[at], rows.weight[at] = own.scores, own.touched, own.weight
            for name, state in rows.states.items():
                state[at] = own.states[name]
        return rows, found
