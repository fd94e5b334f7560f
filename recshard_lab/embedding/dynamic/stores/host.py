"""Rows in host memory, up to a capacity.

Shape letters: M ids, C slots of the store.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from recshard_lab.embedding.dynamic.config import SLOTS
from recshard_lab.embedding.dynamic.index import ScoredIndex
from recshard_lab.embedding.dynamic.stores.base import RowFormat, Rows, RowStore, Stored, joined


class HostStore(RowStore):
    """Rows in tensors, found by a `ScoredIndex` of the rows' scores.

    A full store loses its lowest scores for the rows of a put, also if these have lower ones.

    Args:
        format: of all rows.
        capacity: rows of the table, rounded up to whole buckets of every partition.
        partitions: of the table. Default: those of an index of this capacity.
        shard: the first of these partitions that is here, and the one after the last. Default: all.
        options: the other arguments of `RowStore`.

    >>> format = RowFormat(4, torch.float32)
    >>> store = HostStore(format, 128)
    >>> rows = format.empty(torch.tensor([7, -3]))
    >>> store.put(rows), len(store), store.get(torch.tensor([7, 8]))[1].tolist()
    (None, 2, [True, False])
    """

    def __init__(
        self,
        format: RowFormat,
        capacity: int,
        *,
        partitions: int | None = None,
        shard: tuple[int, int] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(format, **options)
        self._index = ScoredIndex(capacity, evict="custom", partitions=partitions, shard=shard)
        self._rows = format.empty(torch.zeros(self._index.capacity, dtype=torch.int64))
        self._outdated = torch.zeros(self._index.capacity, dtype=torch.bool)
        self._pinned_from: int | None = None  # the first step of a `batch`

    @property
    def capacity(self) -> int:
        """Rows that fit."""
        return self._index.capacity

    def __len__(self) -> int:
        """Rows in the store."""
        counted = self._index.counters
        return counted.inserts - counted.evictions - counted.erasures

    @contextmanager
    def batch(self) -> Iterator[None]:
        """As of `RowStore`."""
        outer = self._pinned_from
        self._pinned_from = self._index.step + 1 if outer is None else outer
        try:
            yield
        finally:
            self._pinned_from = outer

    def _get(self, ids: Tensor) -> tuple[Rows, Tensor]:
        slots = self._index.find(ids)
        found = slots >= 0
        return self._at(slots.clamp(min=0), ids), found

    def _contains(self, ids: Tensor) -> Tensor:
        return self._index.find(ids) >= 0

    def _put(self, rows: Rows) -> Stored:
        before = self._index.counters.inserts
        found = self._index.find_or_insert(rows.ids, rows.scores, pinned_from=self._pinned_from)
        last_copies = ~self._outdated[found.evicted_slots]
        evicted = self._at(found.evicted_slots, found.evicted_ids)
        evicted = evicted._replace(scores=found.evicted_scores).at(last_copies)
        stored = found.slots >= 0
        slots, own = found.slots[stored], rows.at(stored)
        self._rows.touched[slots] = own.touched
        self._rows.weight.index_copy_(0, slots, own.weight)
        for name, state in self._rows.states.items():
            state.index_copy_(0, slots, own.states[name])
        self._outdated[slots] = False
        refused = len(stored) - len(slots)
        lost = [part for part in (evicted, rows.at(~stored) if refused else None) if part is not None and len(part.ids)]
        inserts = self._index.counters.inserts - before
        return Stored(inserts, len(found.evicted_ids), refused, joined(lost) if lost else None)

    def _delete(self, ids: Tensor) -> int:
        return len(self._index.erase(ids))

    def _outdate(self, ids: Tensor) -> None:
        self._outdated[self._index.find(ids)] = True

    def places(self, ids: Tensor) -> Tensor:
        """``[M, 2]`` as of `RowStore`."""
        index = self._index
        slots = index._find(ids)
        first = index.shard[0] * index.buckets * SLOTS
        return torch.stack([torch.where(slots < 0, slots, slots + first), torch.full_like(slots, index.buckets)], dim=1)

    def reserve(self, ids: Tensor, scores: Tensor, touched: Tensor, places: Tensor) -> Tensor:
        """As of `RowStore`: ids get the slots that they had before, if the store has the same size."""
        index, many = self._index, max(1, len(places))
        known = len(places) > 0 and bool((places[:, 0] >= 0).all())
        geometry = {
            "partitions": index.partitions,
            "buckets": int(places[:, 1].sum()) // many,
            "choices": index.choices,
        }
        lost = index.counters.evictions
        self.counters.erasures += index.size
        slots = index.refill(ids, scores, touched, places[:, 0] if known else None, geometry)
        self.counters.inserts += len(ids)
        self.counters.evictions += index.counters.evictions - lost
        self._outdated.zero_()
        return slots >= 0

    def _batches(self, size: int) -> Iterator[Rows]:
        for ids, _, slots in self._index.export_batches(size):
            yield self._at(slots, ids)

    def _at(self, slots: Tensor, ids: Tensor) -> Rows:
        return self._rows.at(slots)._replace(ids=ids, scores=self._index.scores[slots])

    def state(self) -> dict[str, Any]:
        """The index and the rows. Tensors are not copied."""
        _, _, touched, weight, states = self._rows
        fields = {"touched": touched, "weight": weight, "outdated": self._outdated}
        return fields | {"index": self._index.state(), "states": dict(states), "counters": self.counters.as_dict()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Becomes the store that `state` was read from."""
        self._index.load_state(state["index"])
        self._rows.touched.copy_(state["touched"])
        self._rows.weight.copy_(state["weight"])
        self._outdated.copy_(state["outdated"])
        for name, own in self._rows.states.items():
            own.copy_(state["states"][name])
        self.counters = type(self.counters)(**state["counters"])
