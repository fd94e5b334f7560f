"""Rows by id in a memory that is slower than the fast tier of a table.

Shape letters: M ids, D columns.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recshard_lab.embedding.dynamic.config import EmulatedCost


class TierError(OSError):
    """A tier below the fast one has failed, such as a server that is gone or a full disk. No row is lost."""


class Rows(NamedTuple):
    """Ids with everything that belongs to them.

    Attributes:
        ids, scores: ``[M]`` int64.
        touched: ``[M]`` int64: the step of the index at the last access. Below the fast tier: at which the row left it.
        weight: ``[M, D]``.
        states: name -> ``[M]`` or ``[M, D]``, the optimizer states of these rows.
    """

    ids: Tensor
    scores: Tensor
    touched: Tensor
    weight: Tensor
    states: dict[str, Tensor]

    def map(self, change: Callable[[Tensor], Tensor]) -> Rows:
        """The rows with every tensor changed."""
        states = {name: change(state) for name, state in self.states.items()}
        return Rows(change(self.ids), change(self.scores), change(self.touched), change(self.weight), states)

    def at(self, which: Tensor | slice) -> Rows:
        """The rows at these positions, or for which a mask ``[M]`` is True. A slice or a mask of all copies nothing."""
        if isinstance(which, slice):
            return self.map(lambda own: own[which])
        if which.dtype == torch.bool:
            which = which.nonzero().squeeze(1)
            if len(which) == len(self.ids):
                return self
        return self.map(lambda own: own.index_select(0, which))

    def to(self, device: torch.device | str) -> Rows:
        """The same on another device."""
        return self.map(lambda own: own.to(device))


def joined(parts: Sequence[Rows]) -> Rows:
    """All rows of one or more parts."""
    if len(parts) == 1:
        return parts[0]
    states = {name: torch.cat([part.states[name] for part in parts]) for name in parts[0].states}
    ids, scores, touched, weight = (torch.cat(own) for own in zip(*(part[:4] for part in parts), strict=True))
    return Rows(ids, scores, touched, weight, states)


def copy_rows(source: Rows, target: Rows, at: Tensor) -> None:
    """Copies all but the ids to positions ``at`` of other rows."""
    target.scores[at], target.touched[at], target.weight[at] = source.scores, source.touched, source.weight
    for name, state in target.states.items():
        state[at] = source.states[name]


@dataclass(frozen=True)
class RowFormat:
    """Sizes and number formats of a row: what all `Rows` of a table have in common.

    Args:
        columns: D.
        dtype: of the weight.
        states: name -> axes of the optimizer state after the first one, and its dtype.
    """

    columns: int
    dtype: torch.dtype
    states: tuple[tuple[str, tuple[int, ...], torch.dtype], ...] = ()

    @classmethod
    def of(cls, weight: Tensor, states: Mapping[str, Tensor]) -> RowFormat:
        """The format of a weight ``[M, D]`` and of optimizer states with one entry per row."""
        kinds = ((name, tuple(state.shape[1:]), state.dtype) for name, state in sorted(states.items()))
        return cls(weight.shape[1], weight.dtype, tuple(kinds))

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's weight and optimizer states."""
        parts = ((self.columns, self.dtype), *((torch.Size(axes).numel(), dtype) for _, axes, dtype in self.states))
        return sum(count * dtype.itemsize for count, dtype in parts)

    def empty(self, ids: Tensor) -> Rows:
        """Rows of these ids ``[M]``, all zeros, in host memory."""
        many = len(ids)
        states = {name: torch.zeros(many, *axes, dtype=dtype) for name, axes, dtype in self.states}
        weight = torch.zeros(many, self.columns, dtype=self.dtype)
        return Rows(ids, torch.zeros_like(ids), torch.zeros_like(ids), weight, states)

    def packed(self, rows: Rows) -> Tensor:
        """``[M, record bytes]`` uint8: scores, touched, weight and states of each row one after the other."""
        parts = [rows.scores, rows.touched, rows.weight, *(rows.states[name] for name, _, _ in self.states)]
        flat = [part.contiguous().view(-1).view(torch.uint8) for part in parts]
        return torch.cat([part.view(len(rows.ids), part.numel() // max(1, len(rows.ids))) for part in flat], dim=1)

    def unpacked(self, ids: Tensor, records: Tensor) -> Rows:
        """The rows of ids ``[M]`` with these records ``[M, record bytes]``."""
        many, first = len(ids), 0

        def part(axes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            nonlocal first
            start, first = first, first + torch.Size(axes).numel() * dtype.itemsize
            own = torch.empty(many, first - start, dtype=torch.uint8).copy_(records[:, start:first])
            return own.view(-1).view(dtype).view(many, *axes)

        scores, touched = part((), torch.int64), part((), torch.int64)
        weight = part((self.columns,), self.dtype)
        return Rows(ids, scores, touched, weight, {name: part(axes, dtype) for name, axes, dtype in self.states})

    @property
    def record_bytes(self) -> int:
        """Bytes of a record of `packed`."""
        return 16 + self.row_bytes

    def __str__(self) -> str:
        states = "".join(f", {name} {dtype} {list(axes)}" for name, axes, dtype in self.states)
        return f"weight {self.dtype} [{self.columns}]{states}"


@dataclass
class StoreCounters:
    """What a store has counted since it was made. ``hits + misses == lookups``.

    ``inserts - evictions - erasures`` is the size, less that at opening.

    Attributes:
        lookups, hits, misses: ids of `RowStore.get`.
        inserts: ids that the store did not have before.
        evictions: ids that a full store lost.
        erasures: ids that were deleted, and ids whose row moved to the fast tier.
        refusals: rows of `RowStore.put` that found no place. They go to the next tier.
        bytes_read, bytes_written: of weights and optimizer states.
    """

    lookups: int = 0
    hits: int = 0
    misses: int = 0
    inserts: int = 0
    evictions: int = 0
    erasures: int = 0
    refusals: int = 0
    bytes_read: int = 0
    bytes_written: int = 0

    def as_dict(self) -> dict[str, int]:
        """Name -> count."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


class Stored(NamedTuple):
    """What a store did with rows.

    Attributes:
        inserts: ids that it did not have before.
        evictions: ids that it lost because it is full, those with outdated copies included.
        refusals: rows that found no place.
        lost: the rows of evictions and refusals without outdated copies, whose row is in a faster tier. None for none.
    """

    inserts: int
    evictions: int = 0
    refusals: int = 0
    lost: Rows | None = None


class RowStore(ABC):
    """A tier below the fast one. All tensors are in host memory. Ids of a call are distinct.

    Errors of a subclass, except for ``ValueError``, become a `TierError` that names the tier.

    A subclass has ``_get``, ``_put``, ``_delete``, ``_batches`` and ``__len__``. They have the arguments of the public
    methods, which count and emulate the cost. One thread at a time may call a store.

    Args:
        format: of all rows.
        name: in counters and errors.
        mode: ``"hybrid"``: `drop` deletes. ``"cache"``: it does not.
        cost: the least time of an access.

    Attributes:
        counters: see `StoreCounters`.
    """

    def __init__(
        self, format: RowFormat, *, name: str = "store", mode: str = "hybrid", cost: EmulatedCost | None = None
    ) -> None:
        self.format, self.name, self.mode, self.cost = format, name, mode, cost
        self.counters = StoreCounters()

    # ---- calls ----

    def get(self, ids: Tensor) -> tuple[Rows, Tensor]:
        """The rows of ids ``[M]``, undefined for absent ones, and ``[M]`` bool which are present."""
        with self._access() as access:
            rows, found = self._get(ids)
            hits = int(found.sum())
            access[0] = hits * self.format.row_bytes
        self.counters.lookups += len(ids)
        self.counters.hits += hits
        self.counters.misses += len(ids) - hits
        self.counters.bytes_read += access[0]
        return rows, found

    def drop(self, ids: Tensor) -> None:
        """Rows of ids ``[M]``, which are present, are in the fast tier now. Call it after they were stored there."""
        if self.mode == "cache":
            self._outdate(ids)
            return
        with self._access():
            removed = self._drop(ids)
        self.counters.erasures += removed

    def contains(self, ids: Tensor) -> Tensor:
        """``[M]`` bool: which ids are present. It is not counted as a lookup."""
        with self._access():
            return self._contains(ids)

    def put(self, rows: Rows) -> Rows | None:
        """Stores or overwrites rows. Returns those that the store lost because it is full, None for none."""
        with self._access() as access:
            access[0] = len(rows.ids) * self.format.row_bytes
            stored = self._put(rows)
        self.counters.inserts += stored.inserts
        self.counters.evictions += stored.evictions
        self.counters.refusals += stored.refusals
        self.counters.bytes_written += access[0]
        return stored.lost

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Rows that are stored inside, in any number of calls, are not evicted before the end."""
        yield

    def delete(self, ids: Tensor) -> int:
        """Removes ids ``[M]`` that are present. Returns how many."""
        with self._access():
            removed = self._delete(ids)
        self.counters.erasures += removed
        return removed

    def batches(self, size: int = 1 << 16) -> Iterator[Rows]:
        """Everything in the store, up to ``size`` rows at a time. Do not call the store before the end."""
        return self._batches(size)

    def clear(self) -> None:
        """Removes everything, also what tells other shards that this one is here."""
        for ids in [rows.ids for rows in self.batches()]:
            self.delete(ids)
        self.close()

    def places(self, ids: Tensor) -> Tensor:
        """``[M, 2]`` int64: of each id its slot, counted from the first one of the table, and the buckets of each
        partition. -1 where a store has no slots."""
        return torch.full((len(ids), 2), -1)

    def reserve(self, ids: Tensor, scores: Tensor, touched: Tensor, places: Tensor) -> Tensor:
        """Prepares an empty store for the rows of these ids ``[M]``, which `put` stores next.

        Args:
            ids, scores, touched: as in `Rows`.
            places: ``[M, 2]`` what `places` returned when they were stored before.

        Returns:
            ``[M]`` bool: which have a place.
        """
        return torch.ones(len(ids), dtype=torch.bool)

    def state(self) -> dict[str, Any]:
        """What `load_state` needs. Stores that outlive the process write their rows out, and the state names them."""
        raise NotImplementedError(f"{type(self).__name__} has no state")

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Becomes the store that `state` was read from."""
        raise NotImplementedError(f"{type(self).__name__} has no state")

    def close(self) -> None:  # noqa: B027, memory needs none
        """Writes everything out and frees files and connections. The next call opens them again."""

    # ---- of a subclass ----

    @abstractmethod
    def __len__(self) -> int:
        """Rows in the store."""

    @abstractmethod
    def _get(self, ids: Tensor) -> tuple[Rows, Tensor]:
        """As `get`."""

    @abstractmethod
    def _put(self, rows: Rows) -> Stored:
        """As `put`."""

    @abstractmethod
    def _delete(self, ids: Tensor) -> int:
        """As `delete`."""

    @abstractmethod
    def _batches(self, size: int) -> Iterator[Rows]:
        """As `batches`."""

    def _drop(self, ids: Tensor) -> int:
        """As `delete`, of ids that are present and whose rows are in a faster tier. It may do so with the next call."""
        return self._delete(ids)

    def _contains(self, ids: Tensor) -> Tensor:
        """As `contains`."""
        return self._get(ids)[1]

    def _outdate(self, ids: Tensor) -> None:  # noqa: B027, a store that loses nothing need not know
        """Records that the copies of these ids are outdated until the next put: the rows are in a faster tier."""

    @contextmanager
    def _access(self) -> Iterator[list[int]]:
        """Waits at the end until the emulated cost has passed. The one entry is the bytes.

        Raises:
            TierError: any error of the subclass, unless it is for the caller to read as it is.
        """
        began, access = time.perf_counter(), [0]
        try:
            yield access
        except (ValueError, ImportError, ConnectionError, TierError):
            raise
        except Exception as error:
            raise TierError(
                f"tier {self.name!r} failed ({type(error).__name__}: {error}): no row is lost, and rows that could not "
                f"be written wait in memory. Fix: repair the tier, then repeat the batch"
            ) from error
        if self.cost is not None:
            left = began + self.cost.seconds(access[0]) - time.perf_counter()
            if left > 0:
                time.sleep(left)
