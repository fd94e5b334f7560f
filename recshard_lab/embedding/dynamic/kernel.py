"""A lookup kernel whose ids have any value: an index of each shard's ids in front of a kernel on their rows.

Ids without a slot are looked up in staging rows: those that a slower tier has, because a batch has more distinct ids
than the fast tier, and those without a row, which read an initial one or zeros. Each pass fills the staging rows first.
After a backward pass, those of a slower tier are written back.

Shape letters: N ids, D columns, A ids of a batch without a slot, M distinct ones of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from recshard_lab.embedding.dynamic.config import DynamicEmbeddingConfig
from recshard_lab.embedding.dynamic.index import Span, access_all, find_all
from recshard_lab.embedding.dynamic.stores.base import Rows
from recshard_lab.embedding.dynamic.table import DynamicTable, Memory
from recshard_lab.embedding.kernels import KernelInput, KernelSpec, LookupKernel, RowNorms
from recshard_lab.embedding.kernels.mapped import Found, MappedKernel, Saved

_STAGING = 128  # least number of staging rows


class Staged(NamedTuple):
    """The ids of a batch that have no slot of a table.

    Attributes:
        positions: ``[A]`` of the ids in the batch.
        places: ``[A]`` their staging rows, from 0 on.
        ids: ``[M]``: of each staging row.
        rows: ``[M, D]`` what they read. None for zeros: M is 1 then, one row serves all ids.
        trained: ``[M]`` bool: which of them a tier has, so that they are trained. None for none.
        read: everything that belongs to the ids, during a backward pass with ``trained``.
    """

    positions: Tensor
    places: Tensor
    ids: Tensor
    rows: Tensor | None
    trained: Tensor | None
    read: Rows | None = None


class DynamicKernel(MappedKernel):
    """A `LookupKernel` for dynamic tables. Ids are int64 of any value.

    Args:
        spec: as of `LookupKernel`.
        inner: the class of the kernel on the rows.
        configs: the table of each shard.
        partitions: for each shard its partitions of the table, see `ScoredIndex`. Default: all.
        columns: for each shard its first column and the one after its last. Default: all.

    Attributes:
        tables: the `DynamicTable` of each shard.
        on_grown: is called after `weights` and `optimizer_states` have become other tensors. None for nothing.

    A table may grow between the two passes of a batch: backward then looks the batch's slots up again.
    """

    def __init__(
        self,
        spec: KernelSpec,
        inner: type[LookupKernel],
        configs: Sequence[DynamicEmbeddingConfig],
        partitions: Sequence[tuple[int, int] | None] | None = None,
        columns: Sequence[tuple[int, int] | None] | None = None,
    ) -> None:
        self.on_grown: Callable[[], None] | None = None
        none = [None] * len(configs)
        self._staging = [0] * len(configs)
        self.tables = [
            DynamicTable(config, spec.device, memory=partial(self._grown, number), partitions=own, columns=cols)
            for number, (config, own, cols) in enumerate(zip(configs, partitions or none, columns or none, strict=True))
        ]
        super().__init__(spec, inner)

    def _start(self) -> None:
        super()._start()
        for table in self.tables:
            table.lock = self._lock  # one for all: a table that grows moves them all

    # ---- memory ----

    def _sizes(self) -> list[int]:
        return [table.capacity + rows for table, rows in zip(self.tables, self._staging, strict=True)]

    def _memory_of(self, number: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The inner kernel's memory for the slots of a table, without staging rows."""
        weight, rows = self._inner.weights()[number], self.tables[number].capacity
        states = self._inner.optimizer_states()[number]
        return weight[:rows], {name: s[:rows] if len(s) == len(weight) else s for name, s in states.items()}

    def _bind(self, moved: int | None = None) -> None:
        for number, table in enumerate(self.tables):
            if number != moved:
                table.weight, table.states = self._memory_of(number)

    def _grown(self, number: int) -> Memory:
        """Memory for a table whose index grew. The other tables move to the new inner kernel as they are."""
        self._rebuild(moved=number)
        if self.on_grown is not None:
            self.on_grown()
        return self._memory_of(number)

    # ---- rows of batches ----

    def _find(self, batch: KernelInput, train: bool, pins_last: bool = False) -> Found:
        indexes, spans = [table.index for table in self.tables], self._spans(batch)
        with self._lock:
            ids = batch.ids.to(self.device, torch.int64).contiguous()
            if not train:
                slots, misses = find_all(indexes, ids, spans)
                return Found(slots, None, *self._staged(ids, slots, spans, misses, train))
            pinned = [self._pinned(number) for number in range(len(indexes))]
            if pins_last:
                steps = [index.step for index in indexes]
                pinned = [step if own is None else min(own, step) for own, step in zip(pinned, steps, strict=True)]
            slots, misses = access_all(indexes, ids, spans, self._scores(ids, spans))
            for number, missed in enumerate(misses):
                if missed:
                    at = self._positions(number, spans)
                    located = slots[at], missed
                    slots[at] = self.tables[number].slots_for(ids[at], pinned_from=pinned[number], located=located)
            step = self._begun([index.step for index in indexes])
            return Found(slots, step, *self._staged(ids, slots, spans, misses, train))

    def _positions(self, number: int, spans: Sequence[Span]) -> Tensor:
        """Those of the ids of a table."""
        return torch.cat([torch.arange(*span, device=self.device) for own, *span in spans if own == number])

    def _scores(self, ids: Tensor, spans: Sequence[Span]) -> Tensor | None:
        """``[N]`` the scores of ids of tables that evict by a function; None if none does."""
        if not any(callable(table.config.evict) for table in self.tables):
            return None
        own = [(self.tables[number].scores_of(ids[first:end]), ids[first:end]) for number, first, end in spans]
        return torch.cat([torch.zeros_like(some) if scores is None else scores for scores, some in own])

    def _staged(
        self, ids: Tensor, slots: Tensor, spans: Sequence[Span], misses: Sequence[int], train: bool
    ) -> tuple[int, dict[int, Staged]]:
        """The staging rows of ids without a slot, also as their ``slots``, and the memory that has room for them.

        Args:
            misses: 0 for tables whose ids all have a slot.
        """
        staged = {}
        for number, table in enumerate(self.tables):
            at = self._positions(number, spans) if misses[number] else ids[:0]
            at = at[slots[at] < 0]
            if len(at):
                staged[number] = own = self._without_slot(table, ids[at], train)._replace(positions=at)
                slots[at] = table.capacity + own.places
        sizes = [len(staged[number].ids) if number in staged else 0 for number in range(len(self.tables))]
        if any(size > rows for size, rows in zip(sizes, self._staging, strict=True)):
            for number, (size, rows) in enumerate(zip(sizes, self._staging, strict=True)):
                self._staging[number] = max(size, 2 * rows, _STAGING) if size > rows else rows
            self._rebuild()
            if self.on_grown is not None:
                self.on_grown()
        return self._memory, staged

    @staticmethod
    def _without_slot(table: DynamicTable, ids: Tensor, train: bool) -> Staged:
        distinct, places = ids.unique(return_inverse=True)
        rows, trained = table.overflowed(distinct) if train else (table.rows_below(distinct), None)
        if rows is None:
            distinct, places = distinct[:1], torch.zeros_like(places)
        return Staged(ids, places, distinct, rows, trained)

    def _refreshed(self, found: Found) -> Found:
        """Backward has changed rows of slower tiers since."""
        staged = dict[int, Staged](found.staged)
        for number, own in staged.items():
            if own.trained is not None:
                rows, trained = self.tables[number].overflowed(own.ids)
                staged[number] = own._replace(rows=rows, trained=trained)
        return found._replace(staged=staged)

    def _found_again(self, found: Found, batch: KernelInput) -> Found:
        """As of `MappedKernel`. Ids that have got a slot since are still without one."""
        with self._lock:
            ids, spans = batch.ids.to(self.device, torch.int64), self._spans(batch)
            slots = torch.cat([self.tables[number].index._find(ids[first:end]) for number, first, end in spans])
            for number, own in found.staged.items():
                slots[own.positions] = self.tables[number].capacity + own.places
            if not bool((slots < 0).any()):
                return found._replace(rows=slots, memory=self._memory)
            for own in found.staged.values():  # an id found no slot, as the hash is very uneven
                slots[own.positions] = -1
            every = [1] * len(self.tables)
            memory, staged = self._staged(ids, slots, spans, every, found.step is not None)
            return found._replace(rows=slots, memory=memory, staged=staged)

    # ---- staging rows ----

    def _memory_for(self, number: int, own: Staged) -> tuple[Tensor, dict[str, Tensor]]:
        """The staging rows of ids, and their optimizer states."""
        weight, states = self._inner.weights()[number], self._inner.optimizer_states()[number]
        rows = slice(self.tables[number].capacity, self.tables[number].capacity + len(own.ids))
        return weight[rows], {name: state[rows] for name, state in states.items() if len(state) == len(weight)}

    def _before(self, found: Found, steps: bool) -> None:
        for number, own in found.staged.items():
            weight, states = self._memory_for(number, own)
            weight.copy_(own.rows) if own.rows is not None else weight.zero_()
            for name, state in states.items() if steps else ():
                state.copy_(own.read.states[name]) if own.read is not None else state.zero_()

    def _after_step(self, found: Found) -> None:
        for number, own in found.staged.items():
            if own.read is not None:
                weight, states = self._memory_for(number, own)
                self.tables[number].write_rows(own.read._replace(weight=weight, states=states).at(own.trained))

    def backward(self, saved: Saved, grad: Tensor, row_norms: RowNorms | None = None) -> Tensor | None:
        """As of `LookupKernel`. Ids that admission refused are not trained; their per-sample weights get gradients.

        Ids of tiers that found no slot are trained like others.
        """
        trains = any(own.trained is not None for own in saved.found.staged.values())
        with self._lock if trains else nullcontext():
            if saved.found.staged:
                if saved.found.memory != self._memory:
                    saved.found = self._found_again(saved.found, saved.batch)
                saved.found, saved.inner = saved.found._replace(staged=self._read(saved.found)), None
            return super().backward(saved, grad, row_norms)

    def _read(self, found: Found) -> dict[int, Staged]:
        """Weights and states of the rows that are trained, from their tiers."""
        staged = dict[int, Staged](found.staged)
        for number, own in staged.items():
            if own.trained is not None:
                read = self.tables[number].read_rows(own.ids)
                assert own.rows is not None
                rows = torch.where(own.trained[:, None], read.weight, own.rows.to(read.weight.dtype))
                staged[number] = own._replace(rows=rows, read=read)
        return staged

    # ---- memory and settings of the inner kernel ----

    def weights(self) -> list[Tensor]:
        """Per shard ``[capacity, num_cols]``. A table that grows gets new memory."""
        return [self._memory_of(number)[0] for number in range(len(self.tables))]

    def optimizer_states(self) -> list[dict[str, Tensor]]:
        """Per shard its states, by row."""
        return [self._memory_of(number)[1] for number in range(len(self.tables))]

    def touched_rows(self, ids: Tensor, shard: int) -> Tensor:
        """As of `LookupKernel`. Staging rows come last."""
        table = self.tables[shard]
        slots = table.index.find(ids)
        absent = slots < 0
        if bool(absent.any()):
            slots[absent] = table.capacity + self._without_slot(table, ids[absent], train=True).places
        return self._inner.touched_rows(slots, shard)

    def flush_tiers(self) -> None:
        """Moves every row of the tables with tiers to the last one: see `DynamicTable.flush`."""
        for table in self.tables:
            if table.config.tiers:
                table.flush()

    def pending(self) -> list[int | None]:
        """Per shard the first step of its index whose backward is to come; None for none."""
        return [self._pinned(number) for number in range(len(self.tables))]

    def index_tensors(self) -> list[dict[str, Tensor]]:
        """As of `LookupKernel`, see `DynamicTable.index_tensors`."""
        return [table.index_tensors() for table in self.tables]

    def counters(self) -> list[dict[str, float]]:
        """Per shard what the index of its fast tier has counted, see `Counters`."""
        return [dict(table.counters.as_dict()) for table in self.tables]

    def tier_counters(self) -> list[dict[str, dict[str, int]]]:
        """Per shard what each tier has counted, see `DynamicTable.tier_counters`."""
        return [table.tier_counters() for table in self.tables]
