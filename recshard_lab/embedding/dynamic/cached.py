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

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recshard_lab.embedding.dynamic.config import EmulatedCost
from recshard_lab.embedding.dynamic.index import ScoredIndex, access_all, find_all
from recshard_lab.embedding.kernels import TORCH_DTYPES, KernelInput, KernelSpec, LookupKernel, RowNorms, ShardSpec
from recshard_lab.embedding.kernels.base import zeros
from recshard_lab.embedding.kernels.mapped import Found, MappedKernel

FREE, NOT_NEEDED = -1, -1  # of staging rows: no id; a step that no batch has
_STAGING = 128  # least number of staging rows


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

    def __init__(self, shard: ShardSpec, cache: Cache, link: _Link, device: torch.device) -> None:
        self.shard, self.cost, self._link = shard, cache.cost, link
        # a full bucket evicts one of 128 rows: a second bucket to choose from would double the time to find it
        self.index = ScoredIndex(cache.rows, evict=cache.evict, choices=1, partitions=1, device=device)
        dtype, host = TORCH_DTYPES[shard.data_type], torch.device("cpu")
        self.weight = zeros((shard.num_rows, shard.num_cols), dtype, host)
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
        self.staging = 0  # S of the next inner kernel
        self._grow: Callable[[], None]

    def bind(self, weight: Tensor, states: dict[str, Tensor], grow: Callable[[], None]) -> None:
        """Uses this memory as the fast tier. ``grow`` makes an inner kernel with `staging` rows more."""
        self.fast_weight, self.fast_states, self._grow = weight, states, grow
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

    def prepare(self, oldest: int) -> None:
        """Makes the fast tier ready for a lookup. Rows of steps from ``oldest`` on stay."""
        self.reload()
        self._release(oldest)

    def take(self, ids: Tensor, slots: Tensor, misses: int, step: int, oldest: int | None) -> None:
        """Moves rows that are not in the fast tier there, as step ``step``.

        Args:
            ids: ``[N]``.
            slots: ``[N]`` where the index has them, -1 for absent ones, of which there are ``misses``. They are
                replaced by where the rows are.
            oldest: rows of this step and later ones stay. None changes no slot: the rows can be read until the next
                call.
        """
        misses -= self._fill_staged(ids, slots, misses, step)
        self.counters.lookups += len(ids)
        self.counters.misses += misses
        self.counters.hits += len(ids) - misses
        if not misses:
            return
        new_slots, new_ids = [], []
        if oldest is not None:
            found = self.index.insert_absent(ids, slots, misses, pinned_from=oldest)
            self._write(found.evicted_slots, found.evicted_ids)
            new_slots, new_ids = [found.new_slots], [found.new_ids]
            self.counters.admissions += len(found.new_ids)
            self.counters.evictions += len(found.evicted_ids)
        lost = (slots < 0).nonzero().squeeze(1)
        without = ids[lost].unique()
        places = self._stage(without, step)
        self._read(torch.cat([*new_slots, places]), torch.cat([*new_ids, without]))
        slots[lost] = places[torch.searchsorted(without, ids[lost])]
        self.counters.staged += len(without) if oldest is not None else 0

    def ids_at(self) -> Tensor:
        """``[C + S]`` the id of each row of the fast tier."""
        return torch.cat([self.index.keys, self.staged_ids])

    # ---- staging rows ----

    def _fill_staged(self, ids: Tensor, slots: Tensor, misses: int, step: int) -> int:
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
        if step != NOT_NEEDED:
            self.staged_steps[rows] = step
        return len(rows)

    def _stage(self, ids: Tensor, step: int) -> Tensor:
        """``[M]`` free staging rows for distinct ids."""
        if not len(ids):
            return ids
        free = (self.staged_ids == FREE).nonzero().squeeze(1)
        if len(free) < len(ids):
            many = len(self.staged_ids)
            self.staging = max(2 * many, many - len(free) + len(ids), _STAGING)
            self._grow()
            more = self.staging - many
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
        super().__init__(spec, inner)

    def _sizes(self) -> list[int]:
        return [table.index.capacity + table.staging for table in self.tables]

    def _bind(self, moved: int | None = None) -> None:
        memory = zip(self.tables, self._inner.weights(), self._inner.optimizer_states(), strict=True)
        for table, weight, states in memory:
            table.bind(weight, states, self._rebuild)

    # ---- rows of batches ----

    def prefetch(self, batch: KernelInput) -> Found | None:
        """As of `LookupKernel`. None if others may be writing to the slow tier: the forward will move the rows."""
        with self._lock:
            return None if any(table.written for table in self.tables) else super().prefetch(batch)

    def _find(self, batch: KernelInput, train: bool, pins_last: bool = False) -> Found:
        with self._lock:
            ids, spans = batch.ids.to(self.device, torch.int64).contiguous(), self._spans(batch)
            pinned, step = self._pinned(0), self.tables[0].index.step + 1  # the indexes have one step number
            oldest = min(step - pins_last, step if pinned is None else pinned) if train else None
            for table in self.tables:
                table.prepare(0 if oldest is None else oldest)
            indexes = [table.index for table in self.tables]
            slots, misses = (access_all if train else find_all)(indexes, ids, spans)
            for number, (table, missed) in enumerate(zip(self.tables, misses, strict=True)):
                own = [slice(first, end) for shard, first, end in spans if shard == number]
                found = torch.cat([slots[span] for span in own])
                table.take(torch.cat([ids[span] for span in own]), found, missed, step if train else NOT_NEEDED, oldest)
                for span, part in zip(own, found.split([span.stop - span.start for span in own]), strict=True):
                    slots[span] = part
            self._link.wait()
            return Found(slots, self._begun([step] * len(self.tables)) if train else None, self._memory)

    def _refreshed(self, found: Found) -> Found:
        self._reload()
        return found

    def _reload(self) -> None:
        """The rows that others may have written since they were moved."""
        if any(table.written for table in self.tables):
            with self._lock:
                for table in self.tables:
                    table.reload()

    def backward(self, saved: Any, grad: Tensor, row_norms: RowNorms | None = None) -> Tensor | None:
        """As of `LookupKernel`."""
        self._reload()
        norms = None if row_norms is None else _ByRow(self, saved.batch.counts, row_norms)
        return super().backward(saved, grad, norms)

    def _before(self, found: Found, steps: bool) -> None:
        self._copy_table_states(to_slow=False)

    def _after_step(self, found: Found) -> None:
        self._copy_table_states(to_slow=True)

    @torch.no_grad()
    def _copy_table_states(self, *, to_slow: bool) -> None:
        """Copies states with one entry for a table, such as steps counted, from one tier to the other."""
        for table in self.tables:
            for fast, slow in table.table_states():
                if to_slow:
                    slow.copy_(fast)
                else:
                    fast.copy_(slow)

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
        """Per shard what its cache has counted, see `CacheCounters`, and ``slots`` and ``slots_in_use``."""
        return [
            asdict(table.counters) | {"slots": table.index.capacity, "slots_in_use": table.index.size}
            for table in self.tables
        ]


class _ByRow:
    """`RowNorms` of the inner kernel: its rows are slots, and those of the caller are rows of the shards."""

    def __init__(self, kernel: CachedKernel, counts: Sequence[int], row_norms: RowNorms) -> None:
        self.kernel, self.counts, self.row_norms = kernel, counts, row_norms

    def __call__(self, slots: list[Tensor], squares: list[Tensor]) -> list[Tensor]:
        rows, sums, orders = [], [], []
        for number, (table, own, own_squares) in enumerate(zip(self.kernel.tables, slots, squares, strict=True)):
            ids = table.ids_at()
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
        features = zip(self.counts, self.kernel.features, strict=True)
        return min(sum(count for count, shard in features if shard == number), self.kernel.shards[number].num_rows)
