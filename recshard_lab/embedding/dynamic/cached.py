"""A lookup kernel for static tables that are larger than the fast memory: it caches rows of the shards.

::

    fast tier   the inner kernel: rows in the slots of an index, then staging rows
    slow tier   the whole weight and optimizer states of each shard, in host memory

A training lookup moves the rows of its ids into the fast tier, and writes those that lose their slot back. An id that
finds no slot, because a batch has more distinct ids than the cache, gets a staging row until the backward of its batch.
The inner kernel therefore computes on the same rows as without a cache, and the result is the same.

Lookups without gradients move nothing. They copy rows that are not cached to staging rows, and drop them with the next
lookup.

Shape letters: N ids, M distinct ids, E rows of a shard, C slots, S staging rows.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recshard_lab.embedding.dynamic.config import EmulatedCost
from recshard_lab.embedding.dynamic.index import ScoredIndex, access_all, find_all
from recshard_lab.embedding.kernels import TORCH_DTYPES, LookupKernel, RowNorms, Slot
from recshard_lab.embedding.kernels.base import zeros
from recshard_lab.embedding.optimizers import OptimizerSpec

FREE, NOT_NEEDED = -1, -1  # of staging rows: no id; a step that no batch has
_STAGING = 128  # least number of staging rows


_Batch = tuple[Tensor, Tensor, Tensor | None, Sequence[int] | None]
"""Slots, offsets, per-sample weights and counts, as `LookupKernel.forward` takes them."""


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


@dataclass
class CacheCounters:
    """What the cache of one shard has counted since it was made. ``hits + misses == lookups``.

    Attributes:
        lookups, hits, misses: ids of batches, duplicates included, of training and evaluation.
        admissions: distinct ids that got a slot.
        evictions: distinct ids that lost theirs.
        write_backs: rows written to the slow tier.
        staged: distinct ids of training batches that found no slot.
        bytes_read, bytes_written: of the slow tier.
    """

    lookups: int = 0
    hits: int = 0
    misses: int = 0
    admissions: int = 0
    evictions: int = 0
    write_backs: int = 0
    staged: int = 0
    bytes_read: int = 0
    bytes_written: int = 0


class _Step:
    """A batch whose backward is to come. While it exists, its rows stay in the fast tier."""

    def __init__(self, number: int) -> None:
        self.number = number


class Prefetched(NamedTuple):
    """A batch whose rows are in the fast tier.

    Attributes:
        slots: ``[N]`` where.
        step: keeps them there.
    """

    slots: Tensor
    step: _Step


@dataclass
class _Saved:
    """What backward needs: the lookup of the inner kernel, and how to repeat it after the inner kernel was replaced."""

    inner: Any
    kernel: LookupKernel
    batch: _Batch
    step: _Step | None


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
        counters: see `CacheCounters`.
    """

    def __init__(self, slot: Slot, cache: Cache, link: _Link, device: torch.device) -> None:
        self.slot, self.cost, self._link = slot, cache.cost, link
        # a full bucket evicts one of 128 rows: a second bucket to choose from would double the time to find it
        self.index = ScoredIndex(cache.rows, evict=cache.evict, choices=1, partitions=1, device=device)
        dtype, host = TORCH_DTYPES[slot.data_type], torch.device("cpu")
        self.weight = zeros((slot.num_rows, slot.num_cols), dtype, host)
        self.states: dict[str, Tensor] = {}
        self.fast_weight: Tensor
        self.fast_states: dict[str, Tensor] = {}
        self.counters = CacheCounters()
        #: of each staging row the id and the last step that needs it
        self.staged_ids = torch.empty(0, dtype=torch.int64, device=device)
        self.staged_steps = torch.empty(0, dtype=torch.int64, device=device)
        self.clean = 0  # all rows touched up to this step are in the slow tier too
        self.written = False  # whether others may have written to the slow tier
        self._num_staged = 0
        self._grow: Callable[[int], None] = lambda rows: None

    @property
    def capacity(self) -> int:
        """C + S."""
        return self.index.capacity + len(self.staged_ids)

    def bind(self, weight: Tensor, states: dict[str, Tensor], grow: Callable[[int], None]) -> None:
        """Uses this memory as the fast tier. ``grow`` is called with a larger S."""
        self.fast_weight, self.fast_states, self._grow = weight, states, grow
        if not self.states:
            rows = {name: self.slot.num_rows if self._by_row(state) else 1 for name, state in states.items()}
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

    def prepare(self, oldest: int) -> None:
        """Makes the fast tier ready for a lookup. Rows of steps from ``oldest`` on stay."""
        self.reload()
        self._release(oldest)

    def take(self, ids: Tensor, slots: Tensor, misses: int, step: int, oldest: int) -> None:
        """Moves rows that are not in the fast tier there, as step ``step``.

        Args:
            ids: ``[N]``.
            slots: ``[N]`` where the index has them, -1 for absent ones, of which there are ``misses``. They are
                replaced by where the rows are.
            oldest: rows of this step and later ones stay.
        """
        misses -= self._fill_staged(ids, slots, misses, step)
        self._count(len(ids), misses)
        if not misses:
            return
        found = self.index.insert_absent(ids, slots, misses, pinned_from=oldest)
        self._write(found.evicted_slots, found.evicted_ids)
        lost = (slots < 0).nonzero().squeeze(1)
        without = ids[lost].unique()
        places = self._stage(without, step)
        self._read(torch.cat([found.new_slots, places]), torch.cat([found.new_ids, without]))
        slots[lost] = places[torch.searchsorted(without, ids[lost])]
        self.counters.admissions += len(found.new_ids)
        self.counters.evictions += len(found.evicted_ids)
        self.counters.staged += len(without)

    def look(self, ids: Tensor, slots: Tensor, misses: int) -> None:
        """The same for a lookup that changes no slot. The rows can be read until the next call."""
        misses -= self._fill_staged(ids, slots, misses)
        self._count(len(ids), misses)
        if misses:
            absent = (slots < 0).nonzero().squeeze(1)
            without = ids[absent].unique()
            places = self._stage(without, NOT_NEEDED)
            self._read(places, without)
            slots[absent] = places[torch.searchsorted(without, ids[absent])]

    def _count(self, lookups: int, misses: int) -> None:
        self.counters.lookups += lookups
        self.counters.misses += misses
        self.counters.hits += lookups - misses

    def ids_at(self) -> Tensor:
        """``[C + S]`` the id of each row of the fast tier."""
        return torch.cat([self.index.keys, self.staged_ids])

    # ---- staging rows ----

    def _fill_staged(self, ids: Tensor, slots: Tensor, misses: int, step: int | None = None) -> int:
        """Fills in the slots of ids with a staging row, which ``step`` needs. Returns how many these are."""
        if not self._num_staged or not misses:
            return 0
        held = (self.staged_ids != FREE).nonzero().squeeze(1)
        own, order = self.staged_ids[held].sort()
        absent = (slots < 0).nonzero().squeeze(1)
        at = torch.searchsorted(own, ids[absent]).clamp(max=len(own) - 1)
        known = own[at] == ids[absent]
        rows = held[order][at[known]]
        slots[absent[known]] = rows + self.index.capacity
        if step is not None:
            self.staged_steps[rows] = step
        return len(rows)

    def _stage(self, ids: Tensor, step: int) -> Tensor:
        """``[M]`` free staging rows for distinct ids."""
        if not len(ids):
            return ids
        free = (self.staged_ids == FREE).nonzero().squeeze(1)
        if len(free) < len(ids):
            many = len(self.staged_ids)
            self._grow(max(2 * many, many - len(free) + len(ids), _STAGING))
            more = len(self.fast_weight) - self.index.capacity - many
            self.staged_ids = torch.cat([self.staged_ids, self.staged_ids.new_full((more,), FREE)])
            self.staged_steps = torch.cat([self.staged_steps, self.staged_steps.new_zeros(more)])
            free = (self.staged_ids == FREE).nonzero().squeeze(1)
        rows = free[: len(ids)]
        self.staged_ids[rows], self.staged_steps[rows] = ids, step
        self._num_staged += len(ids)
        return rows + self.index.capacity

    def _release(self, oldest: int) -> None:
        """Frees the staging rows that no step from ``oldest`` on needs. Those of training are written back."""
        if not self._num_staged:
            return
        done = ((self.staged_ids != FREE) & (self.staged_steps < oldest)).nonzero().squeeze(1)
        trained = done[self.staged_steps[done] > NOT_NEEDED]
        self._write(trained + self.index.capacity, self.staged_ids[trained])
        self.staged_ids[done] = FREE
        self._num_staged -= len(done)

    # ---- moves ----

    @torch.no_grad()
    def _read(self, slots: Tensor, ids: Tensor) -> None:
        """Copies rows from the slow tier to the fast one."""
        if not len(ids):
            return
        moved, host = 0, ids.cpu()
        for fast, slow in self._pairs():
            rows = slow.index_select(0, host)
            moved += rows.nbytes
            fast.index_copy_(0, slots, _on(rows, fast.device))
        self.counters.bytes_read += moved
        self._link.use(self.cost, moved)

    @torch.no_grad()
    def _write(self, slots: Tensor, ids: Tensor) -> None:
        """Copies rows from the fast tier to the slow one."""
        if not len(ids):
            return
        moved, host = 0, ids.cpu()
        for fast, slow in self._pairs():
            rows = fast.index_select(0, slots).to(slow.device)
            moved += rows.nbytes
            slow.index_copy_(0, host, rows)
        self.counters.write_backs += len(ids)
        self.counters.bytes_written += moved
        self._link.use(self.cost, moved)

    def flush(self, oldest: int) -> None:
        """Writes what training has changed to the slow tier. Rows of steps from ``oldest`` on may change again."""
        if self.written:  # nothing was looked up or stepped since
            return
        slots = self.index.slots()
        slots = slots[self.index.touched[slots] > self.clean]
        self._write(slots, self.index.keys[slots])
        staged = ((self.staged_ids != FREE) & (self.staged_steps > self.clean)).nonzero().squeeze(1)
        self._write(staged + self.index.capacity, self.staged_ids[staged])
        self.clean = oldest - 1
        self.written = True

    def reload(self) -> None:
        """Reads the fast tier anew if others may have written to the slow one."""
        if self.written:
            self.written = False
            staged = (self.staged_ids != FREE).nonzero().squeeze(1)
            slots = torch.cat([self.index.slots(), staged + self.index.capacity])
            self._read(slots, self.ids_at()[slots])


def _on(rows: Tensor, device: torch.device) -> Tensor:
    """Rows of host memory on a device. The copy to a GPU is pinned, so the host does not wait for it."""
    return rows if device.type == "cpu" else rows.pin_memory().to(device, non_blocking=True)


class CachedKernel(LookupKernel):
    """A `LookupKernel` for shards whose rows are cached. See the module's description.

    `weights` and `optimizer_states` are the slow tier. Call `flush` before you read them: it writes cached rows back.
    After it, you may also write to them.

    `prefetch` may run in another thread than the other methods.

    Args:
        inner: the class of the kernel on the cached rows. fbgemm's keeps a batch's rows in autograd's graph, which no
            other batch may change, so it cannot be one.
        caches: of each slot.
        slots, feature_slots, optimizer, pooled, device: as of `LookupKernel`. A table on the dense kernel has no cache.

    Attributes:
        tables: of each slot.
        inserts: whether a forward moves rows into the cache. The caller sets it.
    """

    def __init__(
        self,
        inner: type[LookupKernel],
        caches: Sequence[Cache],
        slots: Sequence[Slot],
        feature_slots: Sequence[int],
        optimizer: OptimizerSpec | None,
        *,
        pooled: bool,
        device: torch.device | str,
    ) -> None:
        if optimizer is None or inner.name == "fbgemm":
            what = "the dense kernel" if optimizer is None else "fbgemm's kernel"
            raise ValueError(f"{what} cannot compute on cached rows. Fix: compute_kernel='fused_uvm'")
        self._class, self.name = inner, inner.name  # type: ignore[misc]
        self.device, self.pooled = torch.device(device), pooled
        self.slots, self.feature_slots, self.optimizer = tuple(slots), tuple(feature_slots), optimizer
        self.inserts = True
        self._link = _Link()
        self.tables = [
            CachedRows(slot, cache, self._link, self.device) for slot, cache in zip(slots, caches, strict=True)
        ]
        self._lock = threading.RLock()  # of the tables
        self._rows_lock = threading.RLock()  # of the inner kernel: held while it computes, and while it is replaced
        self._step = 0
        self._pending: list[weakref.ref[_Step]] = []
        self._staging = [0] * len(self.slots)
        self._build()

    def _build(self) -> None:
        """A new inner kernel, with the sizes of the tables."""
        slots = [
            replace(slot, num_rows=table.index.capacity + staging)
            for slot, table, staging in zip(self.slots, self.tables, self._staging, strict=True)
        ]
        self._inner = self._class(slots, self.feature_slots, self.optimizer, pooled=self.pooled, device=self.device)
        self._inner.deterministic = self.deterministic
        for number, (table, weight, states) in enumerate(
            zip(self.tables, self._inner.weights(), self._inner.optimizer_states(), strict=True)
        ):
            table.bind(weight, states, lambda rows, number=number: self._grow(number, rows))  # type: ignore[misc]

    def _grow(self, number: int, rows: int) -> None:
        """More staging rows for a table."""
        with self._rows_lock:
            before = [(table.fast_weight, table.fast_states) for table in self.tables]
            self._staging[number] = rows
            self._build()
            for (weight, states), table in zip(before, self.tables, strict=True):
                table.fast_weight[: len(weight)] = weight
                for name, state in table.fast_states.items():
                    state[: len(states[name])] = states[name]

    # ---- rows of batches ----

    def prefetch(self, ids: Tensor, offsets: Tensor, counts: Sequence[int] | None = None) -> Prefetched | None:
        """As of `LookupKernel`. None if others may be writing to the slow tier: the forward will move the rows."""
        with self._lock:
            if any(table.written for table in self.tables):
                return None
            return self._take(ids, self._counts(offsets, counts), pins_last=True)

    def _counts(self, offsets: Tensor, counts: Sequence[int] | None) -> list[int]:
        """Ids of each shard feature."""
        if counts is not None:
            return list(counts)
        bags = (len(offsets) - 1) // len(self.feature_slots) if self.pooled else 1
        return offsets[::bags].diff().tolist()

    def _take(self, ids: Tensor, counts: Sequence[int], pins_last: bool = False) -> Prefetched:
        """Moves rows. ``pins_last``: those of the step before stay, whether its backward has ended or not.

        So timing does not affect which rows leave.
        """
        with self._lock:
            self._step += 1
            step = _Step(self._step)
            alive = [(reference, own) for reference in self._pending if (own := reference()) is not None]
            self._pending = [reference for reference, _ in alive] + [weakref.ref(step)]
            oldest = min((own.number for _, own in alive), default=self._step)
            oldest = min(oldest, self._step - 1) if pins_last else oldest

            def take(table: CachedRows, own: Tensor, slots: Tensor, misses: int) -> None:
                table.take(own, slots, misses, step.number, oldest)

            return Prefetched(self._each(access_all, ids, counts, take, oldest), step)

    def _each(
        self,
        find: Callable[..., tuple[Tensor, list[int]]],
        ids: Tensor,
        counts: Sequence[int],
        action: Callable[[CachedRows, Tensor, Tensor, int], None],
        oldest: int = 0,
    ) -> Tensor:
        """``[N]`` where the rows of ids are: what ``find`` returns for all indexes, after ``action`` on each table."""
        ids = ids.to(self.device, torch.int64).contiguous()
        for table in self.tables:
            table.prepare(oldest)
        ends = [*accumulate(counts, initial=0)]
        spans = [*zip(self.feature_slots, ends, ends[1:], strict=False)]
        slots, misses = find([table.index for table in self.tables], ids, spans)
        for number, (table, missed) in enumerate(zip(self.tables, misses, strict=True)):
            own = [slice(first, end) for slot, first, end in spans if slot == number]
            if len(own) == 1:
                action(table, ids[own[0]], slots[own[0]], missed)
                continue
            found = torch.cat([slots[span] for span in own])
            action(table, torch.cat([ids[span] for span in own]), found, missed)
            for span, part in zip(own, found.split([span.stop - span.start for span in own]), strict=True):
                slots[span] = part
        self._link.wait()
        return slots

    # ---- the two passes ----

    def forward(
        self,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        counts: Sequence[int] | None = None,
        prefetched: Prefetched | None = None,
    ) -> tuple[Tensor, Any]:
        """As of `LookupKernel`. ``prefetched`` is what `prefetch` has returned for this batch, if it was called."""
        counts = self._counts(offsets, counts)
        if prefetched is None and not self.inserts:
            with self._lock:  # the next call may drop the rows
                slots = self._each(find_all, ids, counts, CachedRows.look)
                return self._forward((slots, offsets, weights, counts), None)
        slots, step = self._take(ids, counts) if prefetched is None else prefetched
        self._reload()
        return self._forward((slots, offsets, weights, counts), step)

    def _forward(self, batch: _Batch, step: _Step | None) -> tuple[Tensor, Any]:
        with self._rows_lock:
            self._copy_table_states(to_slow=False)
            rows, inner = self._inner.forward(*batch)
            return rows, _Saved(inner, self._inner, batch, step)

    def _reload(self) -> None:
        """The rows that others may have written since they were moved."""
        if any(table.written for table in self.tables):
            with self._lock:
                for table in self.tables:
                    table.reload()

    def remember(
        self, ids: Tensor, offsets: Tensor, weights: Tensor | None, counts: Sequence[int] | None = None
    ) -> Any:
        """As of `LookupKernel`. Moves the rows into the cache."""
        counts = self._counts(offsets, counts)
        slots, step = self._take(ids, counts)
        with self._rows_lock:
            batch = (slots, offsets, weights, counts)
            return _Saved(self._inner.remember(*batch), self._inner, batch, step)

    def backward(self, saved: Any, grad: Tensor, row_norms: RowNorms | None = None) -> Tensor | None:
        """As of `LookupKernel`."""
        self._reload()
        with self._rows_lock:
            if saved.kernel is not self._inner:
                saved.inner = self._inner.remember(*saved.batch)
            norms = None if row_norms is None else _ByRow(self, saved, row_norms)
            self._copy_table_states(to_slow=False)
            found = self._inner.backward(saved.inner, grad, norms)
            self._copy_table_states(to_slow=True)
            saved.step = None  # these rows may now leave the cache
            return found

    @torch.no_grad()
    def _copy_table_states(self, *, to_slow: bool) -> None:
        """Copies states with one entry for a table, such as steps counted, from one tier to the other."""
        for table in self.tables:
            for fast, slow in table.table_states():
                if to_slow:
                    slow.copy_(fast)
                else:
                    fast.copy_(slow)

    # ---- memory and settings ----

    @classmethod
    def refuses(cls, *_: Any, **__: Any) -> str | None:
        """Nothing: the inner kernel was chosen for these slots."""
        return None

    def weights(self) -> list[Tensor]:
        """Per slot ``[E, num_cols]`` in host memory, after `flush`."""
        return [table.weight for table in self.tables]

    def optimizer_states(self) -> list[dict[str, Tensor]]:
        """Per slot its states in host memory, after `flush`."""
        return [table.states for table in self.tables]

    def flush(self, slot: int) -> None:
        """As of `LookupKernel`."""
        with self._lock:
            numbers = [own.number for reference in self._pending if (own := reference()) is not None]
            self.tables[slot].flush(min(numbers, default=self._step + 1))
            self._link.wait()

    def set_learning_rate(self, lr: float) -> None:
        """As of `LookupKernel`."""
        assert self.optimizer is not None
        self.optimizer = replace(self.optimizer, learning_rate=lr)
        self._inner.set_learning_rate(lr)

    def fast_bytes(self) -> tuple[int, int]:
        """Bytes of cached and staging rows, and of their optimizer states."""
        states = (state for table in self.tables for state in table.fast_states.values())
        return sum(table.fast_weight.nbytes for table in self.tables), sum(state.nbytes for state in states)

    def counters(self) -> list[dict[str, float]]:
        """Per slot what its cache has counted, see `CacheCounters`, and ``slots`` and ``slots_in_use``."""
        return [
            {field.name: getattr(table.counters, field.name) for field in fields(CacheCounters)}
            | {"slots": table.index.capacity, "slots_in_use": table.index.size}
            for table in self.tables
        ]


class _ByRow:
    """`RowNorms` of the inner kernel: its rows are slots, and those of the caller are rows of the shards."""

    def __init__(self, kernel: CachedKernel, saved: _Saved, row_norms: RowNorms) -> None:
        self.kernel, self.counts, self.row_norms = kernel, saved.batch[3], row_norms

    def __call__(self, slots: list[Tensor], squares: list[Tensor]) -> list[Tensor]:
        rows, sums, orders = [], [], []
        for number, (table, own, own_squares) in enumerate(zip(self.kernel.tables, slots, squares, strict=True)):
            ids = table.ids_at()
            real = own < len(ids)
            ordered, order = ids[own[real]].sort()
            padding = 0 if own.device.type == "cpu" else max(0, self._most(number) - len(ordered))
            rows.append(torch.cat([ordered, ordered.new_full((padding,), table.slot.num_rows)]))
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
        features = zip(self.counts or (), self.kernel.feature_slots, strict=True)
        return min(sum(count for count, slot in features if slot == number), self.kernel.slots[number].num_rows)
