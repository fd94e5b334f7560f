"""A lookup kernel for static tables that are larger than the fast memory: it caches rows of the shards.

::

    fast tier   the inner kernel: rows in the slots of an index, then staging rows
    slow tier   the whole weight and optimizer states of each shard, in host memory

A training lookup moves the rows of its ids into the fast tier, and writes those that lose their slot back. An id that
finds no slot, because a batch has more distinct ids than the cache, gets a staging row for the two passes of its batch.
The inner kernel therefore computes on the same rows as without a cache, and the result is the same.

Lookups without gradients move nothing. They copy rows that are not cached to staging rows.

Shape letters: N ids, M distinct ids, E rows of a shard, C slots, S staging rows.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recshard_lab.embedding.dynamic.config import EmulatedCost
from recshard_lab.embedding.dynamic.index import ScoredIndex
from recshard_lab.embedding.dynamic.stores.base import Rows
from recshard_lab.embedding.kernels import TORCH_DTYPES, KernelInput, KernelSpec, LookupKernel, RowNorms, ShardSpec
from recshard_lab.embedding.kernels.base import zeros
from recshard_lab.embedding.kernels.mapped import Located, MappedKernel, Saved


class Cache(NamedTuple):
    """The cache of one shard.

    Attributes:
        rows: C, rounded up to whole buckets of 128.
        evict: ``"lru"`` or ``"lfu"``, see `ScoredIndex`.
        cost: of an access to the slow tier, if it is emulated.
    """

    rows: int
    evict: str = "lru"
    cost: EmulatedCost | None = None


class _Link:
    """The way to the slow tiers of a kernel, if its cost is emulated: accesses pass it one after the other.

    The processor goes on meanwhile, as beside a copy between memories. `wait` returns when all have passed.
    """

    def __init__(self) -> None:
        self._free_at = 0.0

    def use(self, cost: EmulatedCost | None, num_bytes: int) -> None:
        """Begins an access."""
        if cost is not None:
            self._free_at = max(self._free_at, time.perf_counter()) + cost.seconds(num_bytes)

    def wait(self) -> None:
        """Waits for all accesses."""
        left = self._free_at - time.perf_counter()
        if left > 0:
            time.sleep(left)


class CachedRows:
    """The index of one shard's cache, and what moves rows between both tiers.

    Attributes:
        weight, states: the slow tier, ``[E, d]`` and the optimizer states.
        fast_weight, fast_states: the same of the inner kernel, ``[C + S, d]``. The kernel sets them.
    """

    def __init__(self, shard: ShardSpec, cache: Cache, link: _Link, device: torch.device) -> None:
        self.shard, self.cost, self._link = shard, cache.cost, link
        # a full bucket evicts one of 128 rows: a second bucket to choose from would double the time to find it
        self.index = ScoredIndex(cache.rows, evict=cache.evict, choices=1, partitions=1, device=device)
        dtype, host = TORCH_DTYPES[shard.data_type], torch.device("cpu")
        self.weight = zeros((shard.num_rows, shard.num_cols), dtype, host)
        self.states: dict[str, Tensor] = {}
        self.fast_weight: Tensor
        self.fast_states: dict[str, Tensor] = {}
        self._moved = {"write_backs": 0, "bytes_read": 0, "bytes_written": 0}
        self.clean = 0  # all rows touched up to this step are in the slow tier too
        self.written = False  # whether others may have written to the slow tier

    def bind(self, weight: Tensor, states: dict[str, Tensor]) -> None:
        """Uses this memory as the fast tier."""
        self.fast_weight, self.fast_states = weight, states
        if not self.states:
            rows = {name: self.shard.num_rows if self._by_row(state) else 1 for name, state in states.items()}
            self.states = {
                name: zeros((rows[name], *state.shape[1:]), state.dtype, torch.device("cpu"))
                for name, state in states.items()
            }

    def _by_row(self, fast_state: Tensor) -> bool:
        return fast_state.shape[0] == len(self.fast_weight)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Fast and slow memory of everything that has one entry for each row."""
        yield self.fast_weight, self.weight
        for name, state in self.fast_states.items():
            if self._by_row(state):
                yield state, self.states[name]

    def table_states(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The same of the states with one entry for the table."""
        for name, state in self.fast_states.items():
            if not self._by_row(state):
                yield state, self.states[name]

    # ---- lookups ----

    @property
    def counters(self) -> dict[str, float]:
        """What the cache has counted since it was made. ``hits + misses == lookups``.

        ``lookups``, ``hits``, ``misses``: ids of batches, duplicates included, of training and evaluation.
        ``admissions``, ``evictions``: distinct ids that got a slot, and that lost theirs. ``staged``: distinct ids of
        training batches that found no slot. ``write_backs``: rows written to the slow tier. ``bytes_read``,
        ``bytes_written``: of the slow tier. ``slots``, ``slots_in_use``: C, and how many have a row.
        """
        own = self.index.counters
        ids: dict[str, float] = {
            "lookups": own.lookups,
            "hits": own.hits,
            "misses": own.misses,
            "admissions": own.inserts,
        }
        ids |= {"evictions": own.evictions, "staged": own.overflows}
        return ids | self._moved | {"slots": self.index.capacity, "slots_in_use": self.index.size}

    # ---- lookups ----

    def slots_for(self, ids: Tensor, *, pinned_from: int | None, located: tuple[Tensor, int]) -> Tensor:
        """As of `RowMap`. Moves rows to the fast tier."""
        found = self.index.insert_absent(ids, *located, pinned_from=pinned_from)
        self._write(found.evicted_slots, found.evicted_ids)
        self._read(found.new_slots, found.new_ids)
        return found.slots

    def absent_rows(self, ids: Tensor, train: bool) -> tuple[Tensor, Tensor | None]:
        """As of `RowMap`: all ids have a row in the slow tier."""
        return self.read_rows(ids).weight, torch.ones_like(ids, dtype=torch.bool) if train else None

    def read_rows(self, ids: Tensor) -> Rows:
        """As of `RowMap`."""
        slots, read = self.index._find(ids), self._from_slow(ids)
        there = slots >= 0
        for rows, (fast, _) in zip(read, self._pairs(), strict=True):
            rows[there] = fast[slots[there]]
        names = (name for name, state in self.fast_states.items() if self._by_row(state))
        return Rows(ids, ids, ids, read[0], dict(zip(names, read[1:], strict=True)))  # no scores

    def write_rows(self, rows: Rows) -> None:
        """As of `RowMap`."""
        slots, written = self.index._find(rows.ids), [rows.weight, *rows.states.values()]
        there = slots >= 0
        for own, (fast, _) in zip(written, self._pairs(), strict=True):
            fast[slots[there]] = own[there]
        self._to_slow(rows.ids, written)

    # ---- moves ----

    def _from_slow(self, ids: Tensor) -> list[Tensor]:
        """Everything that has one entry for each row, of these ids."""
        host = ids.cpu()
        rows = [_on(slow.index_select(0, host), fast.device) for fast, slow in self._pairs()]
        self._count("bytes_read", rows)
        return rows

    def _to_slow(self, ids: Tensor, rows: Sequence[Tensor]) -> None:
        host = ids.cpu()
        for own, (_, slow) in zip(rows, self._pairs(), strict=True):
            slow.index_copy_(0, host, own.to(slow.device))
        self._moved["write_backs"] += len(ids)
        self._count("bytes_written", rows)

    def _count(self, what: str, rows: Sequence[Tensor]) -> None:
        moved = sum(own.nbytes for own in rows)
        self._moved[what] += moved
        self._link.use(self.cost, moved)

    def _read(self, slots: Tensor, ids: Tensor) -> None:
        """Copies rows from the slow tier to the fast one."""
        if len(ids):
            for rows, (fast, _) in zip(self._from_slow(ids), self._pairs(), strict=True):
                fast.index_copy_(0, slots, rows)

    def _write(self, slots: Tensor, ids: Tensor) -> None:
        """Copies rows from the fast tier to the slow one."""
        if len(ids):
            self._to_slow(ids, [fast.index_select(0, slots) for fast, _ in self._pairs()])

    def flush(self, oldest: int) -> None:
        """Writes what training has changed to the slow tier. Rows of steps from ``oldest`` on may change again."""
        if self.written:  # nothing was looked up or stepped since
            return
        slots = self.index.slots()
        slots = slots[self.index.touched[slots] > self.clean]
        self._write(slots, self.index.keys[slots])
        self.clean = oldest - 1
        self.written = True

    def reload(self) -> None:
        """Reads the fast tier anew if others may have written to the slow one."""
        if self.written:
            self.written = False
            slots = self.index.slots()
            self._read(slots, self.index.keys[slots])


def _on(rows: Tensor, device: torch.device) -> Tensor:
    """Rows of host memory on a device. The copy to a GPU is pinned, so the host does not wait for it."""
    return rows if device.type == "cpu" else rows.pin_memory().to(device, non_blocking=True)


class CachedKernel(MappedKernel):
    """A `LookupKernel` for shards whose rows are cached. See the module's description.

    `weights` and `optimizer_states` are the slow tier. Call `flush` before you read them: it writes cached rows back.
    After it, you may also write to them.

    Args:
        spec: as of `LookupKernel`. A table on the dense kernel has no cache.
        inner: the class of the kernel on the cached rows. fbgemm's keeps a batch's rows in autograd's graph, which no
            other batch may change, so it cannot be one.
        caches: of each shard.

    Attributes:
        tables: of each shard.
    """

    def __init__(self, spec: KernelSpec, inner: type[LookupKernel], caches: Sequence[Cache]) -> None:
        if spec.optimizer is None or inner.name == "fbgemm":
            what = "the dense kernel" if spec.optimizer is None else "fbgemm's kernel"
            raise ValueError(f"{what} cannot compute on cached rows. Fix: compute_kernel='fused_uvm'")
        self._link = _Link()
        self.tables = [
            CachedRows(shard, cache, self._link, spec.device) for shard, cache in zip(spec.shards, caches, strict=True)
        ]
        super().__init__(spec, inner, self.tables)

    def _bind(self, moved: int | None = None) -> None:
        memory = zip(self.tables, self._inner.weights(), self._inner.optimizer_states(), strict=True)
        for table, weight, states in memory:
            table.bind(weight, states)

    # ---- rows of batches ----

    def prefetch(self, batch: KernelInput) -> Located | None:
        """As of `LookupKernel`. None if others may be writing to the slow tier: the forward will move the rows."""
        with self._lock:
            return None if any(table.written for table in self.tables) else super().prefetch(batch)

    def _find(self, batch: KernelInput, train: bool, pins_last: bool = False) -> Located:
        with self._lock:
            for table in self.tables:
                table.reload()
            found = super()._find(batch, train, pins_last)
            self._link.wait()
            return found

    def _refreshed(self, found: Located) -> Located:
        self._reload()
        return super()._refreshed(found)

    def _reload(self) -> None:
        """The rows that others may have written since they were moved."""
        if any(table.written for table in self.tables):
            with self._lock:
                for table in self.tables:
                    table.reload()

    def backward(self, saved: Any, grad: Tensor, row_norms: RowNorms | None = None) -> Tensor | None:
        """As of `LookupKernel`."""
        self._reload()
        of_weights = super().backward(saved, grad, None if row_norms is None else _ByRow(self, saved, row_norms))
        self._link.wait()
        return of_weights

    @torch.no_grad()
    def _before(self, found: Located, steps: bool) -> None:
        super()._before(found, steps)
        for table in self.tables:
            for fast, slow in table.table_states():
                fast.copy_(slow)

    @torch.no_grad()
    def _after_step(self, found: Located) -> None:
        super()._after_step(found)
        for table in self.tables:
            for fast, slow in table.table_states():
                slow.copy_(fast)

    # ---- memory ----

    def weights(self) -> list[Tensor]:
        """Per shard ``[E, num_cols]`` in host memory, after `flush`."""
        return [table.weight for table in self.tables]

    def optimizer_states(self) -> list[dict[str, Tensor]]:
        """Per shard its states in host memory, after `flush`."""
        return [table.states for table in self.tables]

    def flush(self, shard: int) -> None:
        """As of `LookupKernel`."""
        with self._lock:
            pinned = self._pinned(shard)
            self.tables[shard].flush(self.tables[shard].index.step + 1 if pinned is None else pinned)
            self._link.wait()

    def fast_bytes(self) -> tuple[int, int]:
        """Bytes of cached and staging rows, and of their optimizer states."""
        states = (state for table in self.tables for state in table.fast_states.values())
        return sum(table.fast_weight.nbytes for table in self.tables), sum(state.nbytes for state in states)

    def counters(self) -> list[dict[str, float]]:
        """Per shard what its cache has counted, see `CachedRows.counters`."""
        return [table.counters for table in self.tables]


class _ByRow:
    """`RowNorms` of the inner kernel: its rows are slots, and those of the caller are rows of the shards."""

    def __init__(self, kernel: CachedKernel, saved: Saved, row_norms: RowNorms) -> None:
        self.kernel, self.saved, self.row_norms = kernel, saved, row_norms

    def __call__(self, slots: list[Tensor], squares: list[Tensor]) -> list[Tensor]:
        rows, sums, orders = [], [], []
        for number, (table, own, own_squares) in enumerate(zip(self.kernel.tables, slots, squares, strict=True)):
            staged = self.saved.found.staged.get(number)
            ids = table.index.keys if staged is None else torch.cat([table.index.keys, staged.ids])
            real = own < len(ids)
            ordered, order = ids[own[real]].sort()
            padding = 0 if own.device.type == "cpu" else max(0, self._most(number) - len(ordered))
            rows.append(torch.cat([ordered, ordered.new_full((padding,), table.shard.num_rows)]))
            sums.append(torch.cat([own_squares[real][order], own_squares.new_zeros(padding, *own_squares.shape[1:])]))
            orders.append(real.nonzero().squeeze(1)[order])
        totals = []
        for found, order, own_squares in zip(self.row_norms(rows, sums), orders, squares, strict=True):
            total = own_squares.new_zeros(own_squares.shape, dtype=found.dtype)
            total[order] = found[: len(order)]
            totals.append(total)
        return totals

    def _most(self, number: int) -> int:
        """Rows of a table that the caller exchanges off the CPU, padding included."""
        features = zip(self.saved.batch.counts, self.kernel.features, strict=True)
        return min(sum(count for count, shard in features if shard == number), self.kernel.shards[number].num_rows)
