"""A lookup kernel whose ids have any value: an index of each slot's ids in front of a kernel on their rows.

Ids without a slot do not reach the inner kernel. Their rows, which are initial ones or in a slower tier, are added to
its result. In training, the rows of a slower tier are trained in a second kernel, and written back (`overflow`).

Shape letters: F shard features, B bags of each, N ids, D columns.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from recshard_lab.embedding.dynamic.config import DynamicEmbeddingConfig
from recshard_lab.embedding.dynamic.index import Span, access_all, find_all
from recshard_lab.embedding.dynamic.table import DynamicTable, Memory, copy_memory
from recshard_lab.embedding.kernels import LookupKernel, RowNorms, Slot
from recshard_lab.embedding.optimizers import OptimizerSpec

# Ids of a training batch that find no slot, because a batch has more distinct ids than the fast tier of its table.
#
# Shape letters: F shard features, B bags of each, N ids of the batch, K of them without a slot.


ABOVE = 1 << 62  # numbers of the second kernel's rows, above those of the first one's and their padding


class Absent(NamedTuple):
    """Ids of a shard feature without a slot. Shape letter A: these ids.

    Attributes:
        feature: its number.
        positions: ``[A]`` of the ids in the batch.
        rows: ``[A, D]``.
        overflowed: ``[A]`` bool: whose rows are trained. None for none.
    """

    feature: int
    positions: Tensor
    rows: Tensor
    overflowed: Tensor | None


class Overflow(NamedTuple):
    """The ids of a batch that have no slot and are trained.

    Attributes:
        ids, positions: ``[K]``: in the order of the batch, and where they are in it.
        batch: offsets, per-sample weights and counts of these ids alone, as `LookupKernel.forward` takes them.
    """

    ids: Tensor
    positions: Tensor
    batch: tuple[Tensor, Tensor | None, list[int]]

    def _spans(self) -> list[tuple[int, int]]:
        return list(pairwise(accumulate(self.batch[2], initial=0)))

    def ids_of(self, slot: int, feature_slots: Sequence[int]) -> Tensor:
        """The distinct ids of a slot, ascending."""
        spans = zip(feature_slots, self._spans(), strict=True)
        return torch.cat([self.ids[:0], *(self.ids[first:end] for own, (first, end) in spans if own == slot)]).unique()

    def local_ids(self, distinct: Sequence[Tensor], feature_slots: Sequence[int]) -> Tensor:
        """``[K]`` the position of each id among the distinct ones of its slot."""
        spans = zip(feature_slots, self._spans(), strict=True)
        return torch.cat([torch.searchsorted(distinct[slot], self.ids[first:end]) for slot, (first, end) in spans])


class _Squares(Exception):
    """Ends a backward pass once its squares are known. It has changed nothing then."""


class JointNorms:
    """`RowNorms` of a kernel, with which the rows of a second kernel get theirs, in the same calls.

    The backward pass of the second kernel runs up to its next squares, once for each call, and the last time whole.
    Column shards have the same rows in both kernels.

    Args:
        step: the backward pass of the second kernel, which takes its `RowNorms`.
        row_norms: of both.
    """

    def __init__(self, step: Callable[[RowNorms], object], row_norms: RowNorms) -> None:
        self._step, self._row_norms = step, row_norms
        self._sums: list[list[Tensor]] = []  # of each call, per slot those of the second kernel
        self._found: tuple[list[Tensor], list[Tensor]] | None = None
        self._calls = 0

    def known(self, rows: list[Tensor], squares: list[Tensor]) -> list[Tensor]:
        """The `RowNorms` of the second kernel: sums of an earlier call."""
        self._calls += 1
        if self._calls > len(self._sums):
            self._found = rows, squares
            raise _Squares
        return self._sums[self._calls - 1]

    def __call__(self, rows: list[Tensor], squares: list[Tensor]) -> list[Tensor]:
        """Per slot the sums of the first kernel's rows."""
        self._calls = 0
        with suppress(_Squares):
            self._step(self.known)
        self._calls = 0
        assert self._found is not None
        others = [own + ABOVE for own in self._found[0]]
        joined = [torch.cat(pair) for pair in zip(squares, self._found[1], strict=True)]
        sums = self._row_norms([torch.cat(pair) for pair in zip(rows, others, strict=True)], joined)
        self._sums.append([own[len(first) :] for own, first in zip(sums, squares, strict=True)])
        return [own[: len(first)] for own, first in zip(sums, squares, strict=True)]


def overflow_of(
    ids: Tensor, offsets: Tensor, weights: Tensor | None, counts: Sequence[int], absent: Sequence[Absent]
) -> Overflow | None:
    """What of a batch is trained without a slot. None if nothing is.

    Args:
        ids, offsets, weights, counts: the batch, as `LookupKernel.forward` takes it.
        absent: its ids without a slot.
    """
    chosen = [own.positions[own.overflowed] for own in absent if own.overflowed is not None]
    if not chosen:
        return None
    positions = torch.cat(chosen)
    mask = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    mask[positions] = True
    before = pad(mask.cumsum(0), (1, 0))
    ends = before[[*accumulate(counts, initial=0)]].tolist()
    few = [end - start for start, end in pairwise(ends)]
    own_weights = None if weights is None else weights[positions]
    return Overflow(ids[positions], positions, (before[offsets], own_weights, few))


class _Step:
    """A batch whose backward is to come. While it exists, its ids keep their slots.

    Attributes:
        numbers: the step of each table's index.
    """

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers


class Prefetched(NamedTuple):
    """A batch whose rows are in the fast tier.

    Attributes:
        ids, slots: ``[N]``: its ids and their slots. complete: whether all have one.
        step: None after a lookup that inserted nothing.
        absent: of every shard feature with ids that have no slot.
        memory: the number of the kernel's memory in which the slots are. A table that grows gets new memory.
    """

    ids: Tensor
    slots: Tensor
    complete: bool
    step: _Step | None
    absent: list[Absent]
    memory: int


@dataclass
class _Saved:
    """What backward needs.

    Attributes:
        found: the batch.
        bounds: its offsets, per-sample weights, and the ids of each shard feature.
        inner: of the inner kernel.
        kept: ``[M]`` positions of the ids that have a row; None if all have one.
        bags: ``[N]`` the bag of each id, if ``found.absent`` needs them.
        overflow: the ids that have no slot and are trained; None for none.
    """

    found: Prefetched
    bounds: tuple[Tensor, Tensor | None, list[int]]
    inner: Any
    kept: Tensor | None
    bags: Tensor | None = None
    overflow: Overflow | None = None

    @property
    def counts(self) -> list[int]:
        """Ids of each shard feature."""
        return self.bounds[2]


class DynamicKernel(LookupKernel):
    """A `LookupKernel` for dynamic tables. Ids are int64 of any value.

    Args:
        inner: the class of the kernel on the rows.
        configs: the table of each slot.
        slots: the shards. Their number of rows is the capacity of their index.
        feature_slots, optimizer, pooled, device: as of `LookupKernel`.
        partitions: for each slot its partitions of the table, see `ScoredIndex`. Default: all.
        columns: for each slot its first column and the one after its last. Default: all.

    Attributes:
        tables: the `DynamicTable` of each slot.
        inserts: whether a forward inserts absent ids, and changes scores. The caller sets it.
        on_grown: is called after `weights` and `optimizer_states` have become other tensors. None for nothing.

    A table may grow between the two passes of a batch: backward then looks the batch's slots up again. `prefetch` may
    run in another thread than the other methods.
    """

    def __init__(
        self,
        inner: type[LookupKernel],
        configs: Sequence[DynamicEmbeddingConfig],
        slots: Sequence[Slot],
        feature_slots: Sequence[int],
        optimizer: OptimizerSpec | None,
        *,
        pooled: bool,
        device: torch.device | str,
        partitions: Sequence[tuple[int, int] | None] | None = None,
        columns: Sequence[tuple[int, int] | None] | None = None,
    ) -> None:
        self._class, self.name = inner, inner.name  # type: ignore[misc]
        self.device, self.pooled = torch.device(device), pooled
        self.feature_slots, self.optimizer = tuple(feature_slots), optimizer
        self.inserts = True
        self.on_grown: Callable[[], None] | None = None
        self._memory = 0
        self._pending: weakref.WeakSet[_Step] = weakref.WeakSet()
        none = [None] * len(slots)
        self.tables = [
            DynamicTable(config, device, memory=partial(self._grown, number), partitions=own, columns=cols)
            for number, (config, own, cols) in enumerate(zip(configs, partitions or none, columns or none, strict=True))
        ]
        self._share_lock()
        self._build(slots)
        self._bind()

    def _share_lock(self) -> None:
        """One lock for all tables: one that grows moves them all. A pass holds ``_in_use``, so that it ends before.

        A thread that holds ``_in_use`` requests no other lock.
        """
        self._lock, self._in_use = threading.RLock(), threading.Lock()
        for table in self.tables:
            table.lock = self._lock

    def _build(self, slots: Sequence[Slot]) -> None:
        """A new inner kernel, with the sizes of the indexes."""
        self.slots = tuple(
            replace(slot, num_rows=table.capacity) for slot, table in zip(slots, self.tables, strict=True)
        )
        self._inner = self._class(
            self.slots, self.feature_slots, self.optimizer, pooled=self.pooled, device=self.device
        )

    def _bind(self) -> None:
        """Makes the inner kernel's memory that of the tables."""
        for table, weight, states in zip(self.tables, self.weights(), self.optimizer_states(), strict=True):
            table.weight, table.states = weight, states

    def _grown(self, number: int) -> Memory:
        """Memory for a table whose index grew. The other tables move to the new inner kernel as they are."""
        before = [(table.weight, table.states) for table in self.tables]
        with self._in_use:
            self._wait_for_device()
            self._build(self.slots)
            self._memory += 1
            after = list(zip(self.weights(), self.optimizer_states(), strict=True))
            for other, table in enumerate(self.tables):
                if other != number:
                    copy_memory(before[other], after[other])
                    table.weight, table.states = after[other]
        if self.on_grown is not None:
            self.on_grown()
        return after[number]

    def _wait_for_device(self) -> None:
        """Passes and prefetches may run on different streams of a GPU, of which only the host knows."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_pending", "_lock", "_in_use")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._pending = weakref.WeakSet()
        self._share_lock()
        self._bind()  # unpickled tensors share no memory

    # ---- the two passes ----

    def prefetch(self, ids: Tensor, offsets: Tensor, counts: Sequence[int] | None = None) -> Prefetched:
        """Inserts the absent ids of a coming training batch, and moves their rows into the fast tier.

        Arguments are those of `forward`, which takes the result as ``prefetched=``. It may run in another thread.

        The ids of the batch before keep their rows, whether its backward has ended or not: timing affects nothing.
        """
        return self._look_up(ids, self._counts(offsets, counts), inserts=True, pins_last=True)

    def forward(
        self,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        counts: Sequence[int] | None = None,
        prefetched: Prefetched | None = None,
    ) -> tuple[Tensor, Any]:
        """As of `LookupKernel`. If `inserts`, absent ids that are admitted get rows first.

        ``prefetched`` is what `prefetch` has returned for this batch, if it was called.
        """
        counts = self._counts(offsets, counts)
        if prefetched is not None:
            absent = prefetched.absent
            if any(own.overflowed is not None for own in absent):  # backward has changed rows since
                absent = self._rows_below(prefetched.ids, prefetched.slots, counts, prefetched.step is not None)
            return self._forward(prefetched._replace(absent=absent), offsets, weights, counts)
        if self.inserts:
            return self._forward(self._look_up(ids, counts, inserts=True), offsets, weights, counts)
        with self._lock:  # nothing else keeps the slots
            return self._forward(self._look_up(ids, counts, inserts=False), offsets, weights, counts)

    def _forward(
        self, found: Prefetched, offsets: Tensor, weights: Tensor | None, counts: list[int]
    ) -> tuple[Tensor, Any]:
        """The rows of ids that have these slots."""
        while True:
            with self._in_use:
                if found.memory == self._memory:
                    return self._rows_of(found, (offsets, weights, counts))
            found = self._in_new_memory(found, counts)

    def _rows_of(self, found: Prefetched, bounds: tuple[Tensor, Tensor | None, list[int]]) -> tuple[Tensor, Any]:
        kept, batch = self._with_slots(found, bounds)
        rows, inner = self._inner.forward(*batch)
        saved = _Saved(found, bounds, inner, kept)
        if kept is None:
            return rows, saved
        (offsets, weights, counts), absent = bounds, found.absent
        if absent and self.pooled:
            bags = torch.arange(len(offsets) - 1, device=kept.device)
            saved.bags = torch.repeat_interleave(bags, offsets.diff(), output_size=len(found.slots))
        saved.overflow = overflow_of(found.ids, offsets, weights, counts, absent)
        return self._joined(rows, saved, weights), saved

    def _with_slots(
        self, found: Prefetched, bounds: tuple[Tensor, Tensor | None, list[int]]
    ) -> tuple[Tensor | None, tuple[Tensor, Tensor, Tensor | None, list[int]]]:
        """The positions of ids that have a slot, None for all, and their batch for the inner kernel."""
        offsets, weights, counts = bounds
        if found.complete:
            return None, (found.slots, *bounds)
        present = found.slots >= 0
        kept = present.nonzero().squeeze(1)
        before = pad(present.cumsum(0), (1, 0))  # [N + 1] ids that have a slot before each position
        ends = before[[*accumulate(counts, initial=0)]].tolist()
        few = [end - start for start, end in pairwise(ends)]
        return kept, (found.slots[kept], before[offsets], None if weights is None else weights[kept], few)

    def _in_new_memory(self, found: Prefetched, counts: Sequence[int]) -> Prefetched:
        """The same batch after a table has grown. Ids that have got a slot since are still without one."""
        with self._lock:
            self._wait_for_device()
            spans = pairwise(accumulate(counts, initial=0))
            slots = torch.cat(
                [
                    self.tables[number].index._find(found.ids[slice(*span)])
                    for number, span in zip(self.feature_slots, spans, strict=True)
                ]
            )
            slots = torch.where(found.slots < 0, found.slots, slots)
            lost = bool(((slots < 0) & (found.slots >= 0)).any())
            found = found._replace(slots=slots, memory=self._memory)
            if lost:  # an id found no slot, as the hash is very uneven
                absent = self._rows_below(found.ids, slots, counts, found.step is not None)
                found = found._replace(complete=False, absent=absent)
            return found

    def _counts(self, offsets: Tensor, counts: Sequence[int] | None) -> list[int]:
        """Ids of each shard feature."""
        if counts is not None:
            return list(counts)
        bags = (len(offsets) - 1) // len(self.feature_slots) if self.pooled else 1
        return offsets[::bags].diff().tolist()

    def _look_up(self, ids: Tensor, counts: Sequence[int], *, inserts: bool, pins_last: bool = False) -> Prefetched:
        """The slots of ids. If ``inserts``, as one step of each table, which inserts absent ids.

        ``pins_last``: ids of the step before are not evicted.
        """
        ends = pairwise(accumulate(counts, initial=0))
        spans = [(number, *span) for number, span in zip(self.feature_slots, ends, strict=True)]
        indexes = [table.index for table in self.tables]
        with self._lock:
            ids = ids.to(self.device, torch.int64).contiguous()
            if not inserts:
                slots, misses = find_all(indexes, ids, spans)
                return self._found(ids, slots, counts, complete=not any(misses), step=None)
            pinned = [self._pinned(number, pins_last) for number in range(len(indexes))]
            slots, misses = access_all(indexes, ids, spans, self._scores(ids, spans))
            for number, missed in enumerate(misses):
                if missed:
                    at = torch.cat([torch.arange(*span, device=self.device) for own, *span in spans if own == number])
                    located = slots[at], missed
                    slots[at] = self.tables[number].slots_for(ids[at], pinned_from=pinned[number], located=located)
            step = _Step([index.step for index in indexes])
            self._pending.add(step)
            return self._found(ids, slots, counts, not any(misses) or not bool((slots < 0).any()), step)

    def _found(
        self, ids: Tensor, slots: Tensor, counts: Sequence[int], complete: bool, step: _Step | None
    ) -> Prefetched:
        absent = [] if complete else self._rows_below(ids, slots, counts, step is not None)
        return Prefetched(ids, slots, complete, step, absent, self._memory)

    def _scores(self, ids: Tensor, spans: Sequence[Span]) -> Tensor | None:
        """``[N]`` the scores of ids of tables that evict by a function; None if none does."""
        if not any(callable(table.config.evict) for table in self.tables):
            return None
        own = [(self.tables[number].scores_of(ids[first:end]), ids[first:end]) for number, first, end in spans]
        return torch.cat([torch.zeros_like(some) if scores is None else scores for scores, some in own])

    def _pinned(self, number: int, pins_last: bool) -> int | None:
        """The first step of a table whose ids must keep their slots. None for the coming one."""
        steps = [step.numbers[number] for step in self._pending]
        if pins_last:
            steps.append(self.tables[number].index.step)
        return min(steps, default=None)

    def _rows_below(self, ids: Tensor, slots: Tensor, counts: Sequence[int], trains: bool) -> list[Absent]:
        """``absent`` of `Prefetched`. Shard features whose rows are all zeros are left out."""
        absent = []
        for feature, (start, count) in enumerate(zip(accumulate(counts, initial=0), counts, strict=False)):
            positions = start + (slots[start : start + count] < 0).nonzero().squeeze(1)
            if not len(positions):
                continue
            table, overflowed = self.tables[self.feature_slots[feature]], None
            if trains:
                rows, overflowed = table.overflowed(ids[positions])
            else:
                rows = table.rows_below(ids[positions])
            if rows is not None:
                rows = rows if rows.dtype == torch.float64 else rows.float()
                absent.append(Absent(feature, positions, rows, overflowed))
        return absent

    def _dims(self) -> list[int]:
        """Columns of each shard feature."""
        return [self.slots[slot].num_cols for slot in self.feature_slots]

    def _joined(self, rows: Tensor, saved: _Saved, weights: Tensor | None) -> Tensor:
        """The inner kernel's rows with those of absent ids."""
        if not self.pooled:
            return self._joined_sequence(rows, saved)
        first = [*accumulate(self._dims(), initial=0)]
        for feature, positions, own, _ in saved.found.absent:
            assert saved.bags is not None
            bag = saved.bags[positions] - feature * len(rows)
            scaled = own if weights is None else own * weights[positions][:, None]
            rows[:, first[feature] : first[feature + 1]].index_add_(0, bag, scaled.to(rows.dtype))
        return rows

    def _joined_sequence(self, rows: Tensor, saved: _Saved) -> Tensor:
        """The same of a sequence: the ``[n, d]`` rows of each shard feature, flat, one after the other."""
        absent = {feature: (positions, own) for feature, positions, own, _ in saved.found.absent}
        parts, used = [], 0
        assert saved.kept is not None
        for feature, (start, kept, count, dim) in enumerate(self._sequences(saved.kept, saved.counts)):
            whole = rows.new_zeros(count, dim)
            whole[kept] = rows[used : used + len(kept) * dim].view(-1, dim)
            used += len(kept) * dim
            if feature in absent:
                positions, own = absent[feature]
                whole[positions - start] = own.to(rows.dtype)
            parts.append(whole.flatten())
        return torch.cat(parts)

    def _gradient_at(self, positions: Tensor, counts: Sequence[int], grad: Tensor) -> Tensor:
        """The part of a sequence's flat gradient that belongs to the ids at these positions."""
        parts, used = [], 0
        for _, own, count, dim in self._sequences(positions, counts):
            parts.append(grad[used : used + count * dim].view(count, dim)[own].flatten())
            used += count * dim
        return torch.cat(parts)

    def _sequences(self, positions: Tensor, counts: Sequence[int]) -> Iterator[tuple[int, Tensor, int, int]]:
        """Of each shard feature: where its ids begin, which of them are chosen, how many they are, and columns."""
        for start, count, dim in zip(accumulate(counts, initial=0), counts, self._dims(), strict=False):
            yield start, positions[(positions >= start) & (positions < start + count)] - start, count, dim

    def remember(
        self, ids: Tensor, offsets: Tensor, weights: Tensor | None, counts: Sequence[int] | None = None
    ) -> Any:
        """As of `LookupKernel`: here, it looks the batch up."""
        return self.forward(ids, offsets, weights, counts)[1]

    def backward(self, saved: Any, grad: Tensor, row_norms: RowNorms | None = None) -> Tensor | None:
        """As of `LookupKernel`. Ids that admission refused get no gradient; their per-sample weights do.

        Ids of tiers that found no slot are trained like others. Their rows take part in ``row_norms`` after those of
        the inner kernel.
        """
        if saved.overflow is None:
            of_weights = self._step_present(saved, grad, row_norms)
        else:
            with self._lock:
                of_weights = self._step_with_overflow(saved, saved.overflow, grad, row_norms)
        saved.found = saved.found._replace(step=None)  # ids of this batch may now lose their slots
        if of_weights is None or saved.kept is None:
            return of_weights
        whole = of_weights.new_zeros(sum(saved.counts))
        whole[saved.kept] = of_weights
        first = [*accumulate(self._dims(), initial=0)]
        for feature, positions, rows, _ in saved.found.absent:
            assert saved.bags is not None
            bag = saved.bags[positions] - feature * len(grad)
            whole[positions] = (grad[bag, first[feature] : first[feature + 1]] * rows).sum(1).to(whole.dtype)
        return whole

    def _step_present(self, saved: _Saved, grad: Tensor, row_norms: RowNorms | None) -> Tensor | None:
        """Backward of the ids that have a slot."""
        while True:
            with self._in_use:
                if saved.found.memory == self._memory:
                    kept = saved.kept
                    own = grad if self.pooled or kept is None else self._gradient_at(kept, saved.counts, grad)
                    return self._inner.backward(saved.inner, own, row_norms)
            with self._lock:
                found = self._in_new_memory(saved.found, saved.counts)
                saved.found = found._replace(absent=saved.found.absent)
                saved.kept, batch = self._with_slots(saved.found, saved.bounds)
                saved.inner = self._inner.remember(*batch)

    def _step_with_overflow(
        self, saved: _Saved, over: Overflow, grad: Tensor, row_norms: RowNorms | None
    ) -> Tensor | None:
        """Steps the rows of ids without a slot too, in a kernel that has nothing else. The lock is held."""
        distinct = [over.ids_of(slot, self.feature_slots) for slot in range(len(self.slots))]
        sizes = [replace(own, num_rows=max(1, len(ids))) for own, ids in zip(self.slots, distinct, strict=True)]
        kernel = self._class(sizes, self.feature_slots, self.optimizer, pooled=self.pooled, device=self.device)
        rows = [table.read_rows(ids) for table, ids in zip(self.tables, distinct, strict=True)]
        for table, own, weight, states in zip(
            self.tables, rows, kernel.weights(), kernel.optimizer_states(), strict=True
        ):
            weight[: len(own.ids)] = own.weight
            for name, state in states.items():
                if name in own.states:
                    state[: len(own.ids)] = own.states[name]
                else:
                    state.copy_(table.states[name])
        remembered = kernel.remember(over.local_ids(distinct, self.feature_slots), *over.batch)
        own_grad = grad if self.pooled else self._gradient_at(over.positions, saved.counts, grad)
        step = partial(kernel.backward, remembered, own_grad)
        if row_norms is None:
            step()
            of_weights = self._step_present(saved, grad, None)
        else:
            joint = JointNorms(step, row_norms)
            of_weights = self._step_present(saved, grad, joint)
            step(joint.known)
        for table, own, weight, states in zip(
            self.tables, rows, kernel.weights(), kernel.optimizer_states(), strict=True
        ):
            many = len(own.ids)
            if many:
                after = {name: states[name][:many] for name in own.states}
                table.write_rows(own._replace(weight=weight[:many], states=after))
        return of_weights

    # ---- memory and settings of the inner kernel ----

    @classmethod
    def refuses(cls, *_: Any, **__: Any) -> str | None:
        """Nothing: the inner kernel was chosen for these slots."""
        return None

    def weights(self) -> list[Tensor]:
        """Per slot ``[capacity, num_cols]``. A table that grows gets new memory."""
        return self._inner.weights()

    def optimizer_states(self) -> list[dict[str, Tensor]]:
        """Per slot its states, by row."""
        return self._inner.optimizer_states()

    def set_learning_rate(self, lr: float) -> None:
        """As of `LookupKernel`."""
        assert self.optimizer is not None
        self.optimizer = replace(self.optimizer, learning_rate=lr)
        self._inner.set_learning_rate(lr)

    def touched_rows(self, ids: Tensor, slot: int) -> Tensor:
        """As of `LookupKernel`, of ids that have a row. Those without a slot come last."""
        table = self.tables[slot]
        slots = table.index.find(ids)
        rows = self._inner.touched_rows(slots[slots >= 0], slot)
        below = int(table._in_tiers(ids[slots < 0].unique()).sum())
        return torch.cat([rows, torch.arange(below, device=rows.device) + ABOVE])

    def flush_tiers(self) -> None:
        """Moves every row of the tables with tiers to the last one: see `DynamicTable.flush`."""
        for table in self.tables:
            if table.config.tiers:
                table.flush()

    def pending(self) -> list[int | None]:
        """Per slot the first step of its index whose backward is to come; None for none."""
        return [self._pinned(number, False) for number in range(len(self.tables))]

    def index_tensors(self) -> list[dict[str, Tensor]]:
        """Per slot the tensors of its index, see `DynamicTable.index_tensors`. They move with the rows."""
        return [table.index_tensors() for table in self.tables]

    def counters(self) -> list[dict[str, float]]:
        """Per slot what the index of its fast tier has counted, see `Counters`."""
        return [dict(table.counters.as_dict()) for table in self.tables]

    def tier_counters(self) -> list[dict[str, dict[str, int]]]:
        """Per slot what each tier has counted, see `DynamicTable.tier_counters`."""
        return [table.tier_counters() for table in self.tables]
