"""The base of kernels with a map in front of an inner kernel: from the ids of a batch to rows of that kernel.

::

    dynamic/kernel.py               ids of any value -> slots of an index
    dynamic/cached.py               rows of a shard  -> slots of a cache
    managed_collision/kernel.py     ids of any value -> rows that they own

Ids without a row are looked up in *staging rows* behind the others: those of a slower tier, because a batch has more
ids than there are rows, and those that read an initial row or zeros. Each pass fills the staging rows first. After a
backward pass, those of a slower tier are written back.

A map that needs more rows gets a new inner kernel, also while batches wait for their backward.

Shape letters: N ids of a batch, A of them without a row, M distinct ones of these, D columns.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from recshard_lab.embedding.dynamic.index import ScoredIndex, Span, access_all, find_all
from recshard_lab.embedding.dynamic.stores.base import Rows
from recshard_lab.embedding.kernels.base import KernelInput, KernelSpec, LookupKernel, RowNorms

_STAGING = 128  # least number of staging rows


class Step:
    """A training batch whose backward is to come. While it exists, its ids keep their rows.

    Attributes:
        numbers: the step of each map.
    """

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers


class Staged(NamedTuple):
    """The ids of a batch that have no row of a map.

    Attributes:
        positions: ``[A]`` of the ids in the batch.
        places: ``[A]`` their staging rows, from 0 on.
        ids: ``[M]``: of each staging row.
        rows: ``[M, D]`` what they read. None for zeros: M is 1 then, one row serves all ids.
        trained: ``[M]`` bool: which of them a slower tier has, so that they are trained. None for none.
        read: weights and states of all ids, by `RowMap.read_rows`, during a backward pass with ``trained``.
    """

    positions: Tensor
    places: Tensor
    ids: Tensor
    rows: Tensor | None
    trained: Tensor | None
    read: Rows | None = None


class RowMap(Protocol):
    """What `MappedKernel` needs of a map whose ids may be without a row."""

    index: ScoredIndex

    def slots_for(self, ids: Tensor, *, pinned_from: int | None, located: tuple[Tensor, int]) -> Tensor:
        """``[N]`` the row of each id, -1 for none, after ids that had none got one, as of `DynamicTable`."""

    def absent_rows(self, ids: Tensor, train: bool) -> tuple[Tensor | None, Tensor | None]:
        """``rows`` and ``trained`` of `Staged`, of distinct ids ``[M]``."""

    def read_rows(self, ids: Tensor) -> Rows:
        """Weights and states of distinct ids ``[M]``, from any tier."""

    def write_rows(self, rows: Rows) -> None:
        """Overwrites them, where the ids are now."""


class Located(NamedTuple):
    """Where the rows of a batch are.

    Attributes:
        rows: ``[N]`` rows of the inner kernel.
        step: keeps them there. None after a lookup without backward.
        memory: the number of the inner kernel.
        staged: number of a map -> its ids without a row.
    """

    rows: Tensor
    step: Step | None
    memory: int
    staged: Mapping[int, Staged] = {}


@dataclass
class Saved:
    """What backward needs: the batch, its rows, and what the inner kernel needs. None: it is another kernel by now."""

    batch: KernelInput
    found: Located
    inner: Any

    def rows(self) -> KernelInput:
        """The batch of the inner kernel."""
        return self.batch._replace(ids=self.found.rows, prefetched=None)


class MappedKernel(LookupKernel):
    """A `LookupKernel` that maps the ids of its batches to rows of an inner kernel.

    `prefetch` may run in another thread than the other methods. The maps change under ``_lock``, and the inner kernel
    computes and is replaced under ``_in_use``. A thread that has only ``_in_use`` requests no other lock.

    Args:
        spec: as of `LookupKernel`.
        inner: the class of the inner kernel.
        tables: the map of each shard, of maps that may be without rows for ids.

    Attributes:
        on_grown: is called after the inner kernel was replaced. None for nothing.
    """

    def __init__(self, spec: KernelSpec, inner: type[LookupKernel], tables: Sequence[RowMap] = ()) -> None:
        self._class, self.name = inner, inner.name  # type: ignore[misc]
        self._serve(spec)
        self._maps, self._staging, self._memory = list(tables), [0] * len(spec.shards), 0
        self.on_grown: Callable[[], None] | None = None
        self._start()
        self._build()
        self._bind()

    def _start(self) -> None:
        """What a copied kernel does not share with the original."""
        self._pending: weakref.WeakSet[Step] = weakref.WeakSet()
        self._lock, self._in_use = threading.RLock(), threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_pending", "_lock", "_in_use")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()
        self._bind()  # unpickled tensors share no memory

    # ---- of each kind of map ----

    def _find(self, batch: KernelInput, train: bool, pins_last: bool = False) -> Located:
        """The rows of a batch. If ``train``, as one step of each map, in which ids may get rows.

        ``pins_last``: ids of the step before keep their rows, whether its backward has ended or not: so timing affects
        nothing.
        """
        indexes, spans = [table.index for table in self._maps], self._spans(batch)
        with self._lock:
            ids = batch.ids.to(self.device, torch.int64).contiguous()
            if not train:
                slots, misses = find_all(indexes, ids, spans)
                return self._stage(ids, slots, spans, misses, None)
            pinned = [self._pinned(number) for number in range(len(indexes))]
            if pins_last:
                steps = [index.step for index in indexes]
                pinned = [step if own is None else min(own, step) for own, step in zip(pinned, steps, strict=True)]
            slots, misses = access_all(indexes, ids, spans, self._scores(ids, spans))
            for number, missed in enumerate(misses):
                if missed:
                    at = self._positions(number, spans)
                    located = slots[at], missed
                    slots[at] = self._maps[number].slots_for(ids[at], pinned_from=pinned[number], located=located)
            return self._stage(ids, slots, spans, misses, self._begun([index.step for index in indexes]))

    def _scores(self, ids: Tensor, spans: Sequence[Span]) -> Tensor | None:
        """``[N]`` the scores of ids, for maps that evict by a function. None for none."""
        return None

    def _bind(self, moved: int | None = None) -> None:
        """Gives the maps the memory of the inner kernel, but not map ``moved``, which is about to move its rows."""

    # ---- the inner kernel ----

    def _build(self) -> None:
        shards = list(self.shards)
        for number, table in enumerate(self._maps):
            shards[number] = replace(shards[number], num_rows=table.index.capacity + self._staging[number])
        self._inner = self._class(self.spec._replace(shards=shards, optimizer=self.optimizer))

    def _rebuild(self, moved: int | None = None) -> None:
        """A new inner kernel with more rows, and the rows of the one before. Those of map ``moved`` are left out."""
        with self._in_use:
            if self.device.type == "cuda":  # passes and prefetches may run on streams of which only the host knows
                torch.cuda.synchronize(self.device)
            before = [*zip(self._inner.weights(), self._inner.optimizer_states(), strict=True)]
            self._build()
            self._memory += 1
            after = zip(before, self._inner.weights(), self._inner.optimizer_states(), strict=True)
            for number, ((weight, states), larger, larger_states) in enumerate(after):
                if number != moved:
                    larger[: len(weight)] = weight
                    for name, state in states.items():
                        larger_states[name][: len(state)] = state
            self._bind(moved)
        if self.on_grown is not None:
            self.on_grown()

    def _spans(self, batch: KernelInput) -> list[Span]:
        """Of each shard feature its map, and where its ids begin and end."""
        return [(number, *span) for number, span in zip(self.features, batch.spans(), strict=True)]

    def _pinned(self, number: int) -> int | None:
        """The first step of a map whose backward is to come. None for none."""
        return min((step.numbers[number] for step in self._pending), default=None)

    def _begun(self, numbers: list[int]) -> Step:
        """A step with these numbers, whose ids keep their rows."""
        step = Step(numbers)
        self._pending.add(step)
        return step

    # ---- staging rows ----

    def _positions(self, number: int, spans: Sequence[Span]) -> Tensor:
        """Those of the ids of a map."""
        return torch.cat([torch.arange(*span, device=self.device) for own, *span in spans if own == number])

    def _stage(
        self,
        ids: Tensor,
        rows: Tensor,
        spans: Sequence[Span],
        misses: Sequence[int],
        step: Step | None,
    ) -> Located:
        """A batch with staging rows for the ids of which ``rows`` has -1. It replaces these.

        Args:
            misses: 0 for maps whose ids all have a row.
        """
        if not any(misses) or not bool((rows < 0).any()):
            return Located(rows, step, self._memory)
        staged = {}
        for number, table in enumerate(self._maps):
            at = self._positions(number, spans) if misses[number] else ids[:0]
            at = at[rows[at] < 0]
            if len(at):
                staged[number] = own = self._without_row(table, ids[at], step is not None)._replace(positions=at)
                rows[at] = table.index.capacity + own.places
        sizes = {number: len(own.ids) for number, own in staged.items() if len(own.ids) > self._staging[number]}
        for number, size in sizes.items():
            self._staging[number] = max(size, 2 * self._staging[number], _STAGING)
        if sizes:
            self._rebuild()
        return Located(rows, step, self._memory, staged)

    @staticmethod
    def _without_row(table: RowMap, ids: Tensor, train: bool) -> Staged:
        distinct, places = ids.unique(return_inverse=True)
        rows, trained = table.absent_rows(distinct, train)
        if rows is None:
            distinct, places = distinct[:1], torch.zeros_like(places)
        return Staged(ids, places, distinct, rows, trained)

    def _refreshed(self, found: Located) -> Located:
        """A prefetched batch just before its lookup: backward has changed rows of slower tiers since."""
        staged = dict(found.staged)
        for number, own in staged.items():
            if own.trained is not None:
                with self._lock:
                    rows, trained = self._maps[number].absent_rows(own.ids, True)
                staged[number] = own._replace(rows=rows, trained=trained)
        return found._replace(staged=staged)

    def _found_again(self, found: Located, batch: KernelInput) -> Located:
        """The same batch in the inner kernel of now. Ids that have got a row since are still without one."""
        with self._lock:
            ids, spans = batch.ids.to(self.device, torch.int64), self._spans(batch)
            rows = torch.cat([self._maps[number].index._find(ids[first:end]) for number, first, end in spans])
            for number, own in found.staged.items():
                rows[own.positions] = self._maps[number].index.capacity + own.places
            if not bool((rows < 0).any()):
                return found._replace(rows=rows, memory=self._memory)
            for own in found.staged.values():  # an id found no slot, as the hash is very uneven
                rows[own.positions] = -1
            return self._stage(ids, rows, spans, [1] * len(self._maps), found.step)

    def _memory_of(self, number: int, rows: slice) -> tuple[Tensor, dict[str, Tensor]]:
        """Some rows of a shard in the inner kernel, and their states. States of the whole table are left out."""
        weight, states = self._inner.weights()[number], self._inner.optimizer_states()[number]
        return weight[rows], {name: state[rows] for name, state in states.items() if len(state) == len(weight)}

    def _staging_of(self, number: int, own: Staged) -> tuple[Tensor, dict[str, Tensor]]:
        first = self._maps[number].index.capacity
        return self._memory_of(number, slice(first, first + len(own.ids)))

    @torch.no_grad()
    def _before(self, found: Located, steps: bool) -> None:
        """Is called before each pass of the inner kernel. ``steps``: the pass is a backward."""
        for number, own in found.staged.items():
            weight, states = self._staging_of(number, own)
            weight.copy_(own.rows) if own.rows is not None else weight.zero_()
            for name, state in states.items() if steps else ():
                state.copy_(own.read.states[name]) if own.read is not None else state.zero_()

    def _after_step(self, found: Located) -> None:
        """Is called after each backward pass of the inner kernel."""
        for number, own in found.staged.items():
            if own.read is not None and own.trained is not None:
                weight, states = self._staging_of(number, own)
                self._maps[number].write_rows(own.read._replace(weight=weight, states=states).at(own.trained))

    def _read(self, found: Located) -> Located:
        """The batch with weights and states of the staging rows that are trained."""
        staged = dict(found.staged)
        for number, own in staged.items():
            if own.trained is not None:
                read = self._maps[number].read_rows(own.ids)
                assert own.rows is not None
                rows = torch.where(own.trained[:, None], read.weight, own.rows.to(read.weight.dtype))
                staged[number] = own._replace(rows=rows, read=read)
        return found._replace(staged=staged)

    # ---- the two passes ----

    def prefetch(self, batch: KernelInput) -> Located | None:
        """As of `LookupKernel`. Ids get rows here."""
        return self._find(batch, train=True, pins_last=True)

    def forward(self, batch: KernelInput, train: bool) -> tuple[Tensor, Any]:
        """As of `LookupKernel`. If ``train``, ids may get rows first."""
        return self._pass(batch, train, lambda own: self._inner.forward(own, train))

    def remember(self, batch: KernelInput, train: bool = True) -> Any:
        """As of `LookupKernel`. If ``train``, ids may get rows."""
        return self._pass(batch, train, lambda own: (None, self._inner.remember(own)))[1]

    def _pass(
        self, batch: KernelInput, train: bool, run: Callable[[KernelInput], tuple[Any, Any]]
    ) -> tuple[Any, Saved]:
        found = batch.prefetched
        with nullcontext() if train or found is not None else self._lock:  # nothing else keeps the rows
            found = self._find(batch, train) if found is None else self._refreshed(found)
            saved = Saved(batch._replace(prefetched=None), found, None)
            rows, saved.inner = self._on_rows(saved, run, steps=False)
            return rows, saved

    def backward(self, saved: Any, grad: Tensor, row_norms: RowNorms | None = None) -> Tensor | None:
        """As of `LookupKernel`. Ids without a row in any tier are not trained. Their weights get gradients."""
        trains = any(own.trained is not None for own in saved.found.staged.values())
        with self._lock if trains else nullcontext():
            if saved.found.staged:
                if saved.found.memory != self._memory:
                    saved.found = self._found_again(saved.found, saved.batch)
                saved.found, saved.inner = self._read(saved.found), None
            of_weights = self._on_rows(saved, partial(self._step, saved, grad, row_norms), steps=True)
        saved.found = saved.found._replace(step=None)  # ids of this batch may now lose their rows
        return of_weights

    def _step(self, saved: Saved, grad: Tensor, row_norms: RowNorms | None, rows: KernelInput) -> Tensor | None:
        inner = self._inner.remember(rows) if saved.inner is None else saved.inner
        of_weights = self._inner.backward(inner, grad, row_norms)
        self._after_step(saved.found)
        return of_weights

    def _on_rows(self, saved: Saved, run: Callable[[KernelInput], Any], steps: bool) -> Any:
        """Runs a pass of the inner kernel. If that is a new one, the rows of the batch are found again before."""
        while True:
            with self._in_use:
                if saved.found.memory == self._memory:
                    self._before(saved.found, steps)
                    return run(saved.rows())
            saved.found, saved.inner = self._found_again(saved.found, saved.batch), None

    # ---- memory and settings of the inner kernel ----

    @classmethod
    def refuses(cls, spec: KernelSpec) -> str | None:
        """Nothing: the inner kernel was chosen for this."""
        return None

    def weights(self) -> list[Tensor]:
        """As of `LookupKernel`."""
        return self._inner.weights()

    def optimizer_states(self) -> list[dict[str, Tensor]]:
        """As of `LookupKernel`."""
        return self._inner.optimizer_states()

    def set_learning_rate(self, lr: float) -> None:
        """As of `LookupKernel`."""
        super().set_learning_rate(lr)
        self._inner.set_learning_rate(lr)
