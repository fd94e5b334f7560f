"""One dynamic table: an index of ids, and the rows and optimizer states in its slots.

A row belongs to one id at a time. When an id gets a slot, its row and optimizer states come up from the tiers below if
one of them has the id. Else the row becomes the initial row of that id and the states become 0, so that no id ever
reads what another one left. An id that loses its slot takes its row and states to the tiers. So does an id that finds
no slot because a batch has too many of them.

Shape letters: N ids, M distinct ids, C slots, D columns, A ids without a slot.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from recshard_lab.embedding.dynamic.admission import Admission, initial_rows, of_ids, stream_of
from recshard_lab.embedding.dynamic.config import DynamicEmbeddingConfig
from recshard_lab.embedding.dynamic.index import Counters, Inserted, ScoredIndex
from recshard_lab.embedding.dynamic.stores import Chain, open_stores
from recshard_lab.embedding.dynamic.stores.base import RowFormat, Rows, RowStore, copy_rows, joined
from recshard_lab.embedding.kernels import TORCH_DTYPES

Memory = tuple[Tensor, Mapping[str, Tensor]]
"""The weight ``[C, D]`` and the optimizer states of a table."""

P = ParamSpec("P")
R = TypeVar("R")
Method = Callable[Concatenate[Any, P], R]


def _alone(method: Method[P, R]) -> Method[P, R]:
    """Calls from several threads, such as a pipeline's prefetch, run one after the other."""

    @wraps(method)
    def locked(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.lock:
            return method(self, *args, **kwargs)

    return cast(Method[P, R], locked)


class DynamicTable:
    """Rows of ids of any int64 value. Operations are those of HierarchicalKV, with torch tensors.

    Args:
        config: the table.
        device: where rows and index are stored.
        memory: returns weight and optimizer states for the index's capacity, when it has grown. The caller also sets
            `weight` and `states` at first. Default: a weight without states.
        partitions: of the table, those of this shard, see `ScoredIndex`. Default: all.
        columns: first column of the rows stored here, and the one after the last. Default: all.
        backend: of `ScoredIndex`.
        stores: returns the tiers below for rows of a format, fastest first. Default: those of ``config.tiers``.

    Attributes:
        index: the `ScoredIndex` of the fast tier.
        weight: ``[C, D]``. states: name -> optimizer state; those with one entry per row are reset with it.
        on_evict: is passed the `Rows` of ids that the table loses: without tiers, of every id that loses its slot;
            with tiers, those that the last tier loses. None for nothing. A pipeline that prefetches may call it in
            another thread.
        lock: is held by every operation.

    >>> table = DynamicTable(DynamicEmbeddingConfig("user", 4, capacity=128))
    >>> rows = table.find_or_insert(torch.tensor([10**12, -5]))
    >>> table.size, bool((table.find(torch.tensor([-5]))[0] == rows[1]).all())
    (2, True)
    """

    def __init__(
        self,
        config: DynamicEmbeddingConfig,
        device: torch.device | str = "cpu",
        *,
        memory: Callable[[], Memory] | None = None,
        partitions: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
        backend: str | None = None,
        stores: Callable[[RowFormat], Sequence[RowStore]] | None = None,
    ) -> None:
        self.config, self.device = config, torch.device(device)
        self.columns = (0, config.embedding_dim) if columns is None else columns
        # reentrant: operations call each other
        self.lock = threading.RLock()
        evict = "custom" if callable(config.evict) else config.evict
        self.index = ScoredIndex(
            config.capacity,
            config.max_capacity,
            evict=evict,
            choices=config.choices,
            shard=partitions,
            device=device,
            backend=backend,
        )
        self._admit = None if config.admit is None else Admission(config, self.index)
        self._stream = stream_of(config.seed, config.name)
        self._stores = stores or self._configured
        self._tiers: Chain | None = None
        self._has_tiers = stores is not None or bool(config.tiers)
        self._memory = memory or self._weight_alone
        self.weight: Tensor
        self.states: Mapping[str, Tensor]
        if memory is None:
            self.weight, self.states = self._memory()
        self.on_evict: Callable[[Rows], object] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # a lock cannot be copied or pickled
        return {name: value for name, value in self.__dict__.items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.lock = threading.RLock()

    @property
    def tiers(self) -> Chain | None:
        """The tiers below, opened with the first use. None without tiers."""
        # not in the constructor: the format needs the optimizer states, which the caller sets later
        if self._tiers is None and self._has_tiers:
            self._tiers = Chain(self._stores(RowFormat.of(self.weight, dict(self._by_row()))))
        return self._tiers

    def _configured(self, format: RowFormat) -> list[RowStore]:
        return open_stores(self.config, format, self.index.partitions, self.index.shard, self.columns)

    # ---- size ----

    @property
    def size(self) -> int:
        """Ids that have a slot in the fast tier."""
        return self.index.size

    @property
    def total_size(self) -> int:
        """Ids that have a row in any tier. It reads every tier that keeps copies (``mode="cache"``)."""
        with self.lock:
            if self.tiers is None:
                return self.size
            if not self.tiers.has_copies:
                self._lose(self.tiers.store_waiting())
                return self.size + sum(len(store) for store in self.tiers.stores)
            return self.size + sum(len(rows.ids) for rows in self.tiers.batches(1 << 16, self._in_fast))

    @property
    def capacity(self) -> int:
        """Slots of the fast tier."""
        return self.index.capacity

    @property
    def load_factor(self) -> float:
        """`size` as a share of `capacity`."""
        return self.index.load_factor

    @property
    def counters(self) -> Counters:
        """What the index of the fast tier has counted."""
        return self.index.counters

    @property
    def admission_counts(self) -> ScoredIndex | None:
        """The occurrences of ids without a row; None if admission does not depend on them."""
        return None if self._admit is None else self._admit.counts

    @_alone
    def tier_counters(self) -> dict[str, dict[str, int]]:
        """Name of a tier, ``"fast"`` first -> what it has counted, and ``size``. See `Counters`, `StoreCounters`."""
        own = self.index.counters
        # by the counters: counting tags would wait for the device
        size = own.inserts - own.evictions - own.erasures
        below = {} if self.tiers is None else self.tiers.counters()
        return {"fast": own.as_dict() | {"size": size}} | below

    # ---- slots, for lookups ----

    @_alone
    def slots_of(self, ids: Tensor) -> Tensor:
        """``[N]`` the slot of each id, -1 for absent ones. Inserts and evicts nothing, and changes no score."""
        return self.index.find(ids)

    @_alone
    def slots_for(
        self, ids: Tensor, *, pinned_from: int | None = None, located: tuple[Tensor, int] | None = None
    ) -> Tensor:
        """``[N]`` the slot of each id, as one training step: absent ids are inserted if they are admitted.

        Ids that a tier has are admitted.

        Args:
            ids: ``[N]`` int64.
            pinned_from: ids of this step of the index and of later ones are not evicted. Default: those of the batch.
            located: slots ``[N]`` and the number of absent ids, if `access_all` has begun this step.
        """
        scores, how = self.scores_of(ids), dict[str, Any](admit=self._admission(), pinned_from=pinned_from)
        if located is None:
            found = self.index.find_or_insert(ids, scores, **how)
        else:
            found = self.index.insert_absent(ids, *located, scores, **how)
        self._settle(found)
        return found.slots

    def scores_of(self, ids: Tensor) -> Tensor | None:
        """``[N]`` what a function that the table evicts by returns for ids. None without a function."""
        evict = self.config.evict
        return of_ids(evict, ids, torch.int64, f"table {self.config.name!r}: evict(ids)") if callable(evict) else None

    def initial(self, ids: Tensor) -> Tensor:
        """``[N, D]`` the initial rows of ids, in the table's number format."""
        rows = initial_rows(ids.to(self.device, torch.int64), self._stream, self.columns, self.config.init_range)
        return rows.to(self.weight.dtype)

    @_alone
    def absent_rows(self, ids: Tensor, train: bool) -> tuple[Tensor | None, Tensor | None]:
        """What distinct ids without a slot ``[A]`` read: rows ``[A, D]`` of the tiers, else ``config.absent``.

        Nothing moves. In a training batch, an id may have a slot again.

        Returns:
            The rows, None if all are zeros. If ``train``, also ``[A]`` bool which of them a tier has: they are trained.
            None if there are none.
        """
        if self.tiers is None or not train:
            return self._below(ids)[0], None
        slots = self.index._find(ids)
        rows, below = self._below(ids)
        known = below | (slots >= 0)
        if not bool(known.any()):
            return rows, None
        rows = self.weight.new_zeros(len(ids), self.weight.shape[1]) if rows is None else rows
        # another call may have given them a slot since the lookup
        rows[slots >= 0] = self.weight[slots[slots >= 0]]
        return rows, known

    @_alone
    def read_rows(self, ids: Tensor) -> Rows:
        """Everything that belongs to distinct ids ``[M]``, from any tier. Absent ones have initial rows, states 0."""
        ids = ids.to(self.device, torch.int64)
        slots = self.index._find(ids)
        # absent ids read slot 0, and are overwritten below
        some = slots.clamp(min=0)
        rows = self._rows(ids, self.index.scores[some], self.index.touched[some], some)
        absent = (slots < 0).nonzero().squeeze(1)
        if len(absent):
            below, _ = self._from_tiers(ids[absent])
            copy_rows(below, rows, absent)
        return rows

    @_alone
    def write_rows(self, rows: Rows) -> None:
        """Overwrites weights and optimizer states of distinct ids, where they are. Absent ids go to the tiers."""
        slots = self.index._find(rows.ids)
        there = slots >= 0
        self.weight[slots[there]] = rows.weight[there]
        for name, state in self._by_row():
            state[slots[there]] = rows.states[name][there]
        rows = rows.at(~there)
        with self._batch_below():
            self._put_below(self._overwritten(rows._replace(touched=torch.full_like(rows.ids, self.index.step))))

    # ---- the operations of HierarchicalKV ----

    @_alone
    def find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """``[N, D]`` rows and ``[N]`` bool whether each id has one, in any tier. Absent ids read ``config.absent``."""
        return self._read(ids, self.slots_of(ids))

    @_alone
    def find_or_insert(self, ids: Tensor) -> Tensor:
        """``[N, D]`` rows. Absent ids are inserted with their initial row if they are admitted."""
        return self._read(ids, self.slots_for(ids))[0]

    @_alone
    def insert_and_evict(self, ids: Tensor, rows: Tensor, *, pinned_from: int | None = None) -> Rows:
        """Inserts or overwrites rows ``[N, D]``, and returns those that the table lost: see `on_evict`.

        Of several rows for one id, the last one is stored. An id that has a row is not lost in this call, unless the
        table grows and finds no slot for it. The table then loses the new row. ``pinned_from``: as of `slots_for`.
        """
        ids, rows = _last_of_each(ids.long(), rows)
        found = self.index.find_or_insert(ids, self.scores_of(ids), admit=self._admission(), pinned_from=pinned_from)
        lost = self._settle(found, (ids, rows))
        assert lost is not None
        stored = found.slots >= 0
        self.weight[found.slots[stored]] = rows[stored].to(self.weight.dtype)
        self._change_below(ids[~stored], rows[~stored], add=False)
        return lost

    @_alone
    def assign(self, ids: Tensor, rows: Tensor) -> Tensor:
        """Overwrites the rows of ids that have one. Returns ``[N]`` bool which these are. Scores are updated."""
        slots = self.index.access(ids, self.scores_of(ids))
        # an assignment with the same slot twice has no order
        last = _last_positions(slots)
        self.weight[slots[last]] = rows[last].to(self.weight.dtype)
        known = slots >= 0
        absent = (~known).nonzero().squeeze(1)
        distinct, last_rows = _last_of_each(ids[absent], rows[absent])
        below = self._change_below(distinct, last_rows, add=False)
        known[absent] = torch.isin(ids[absent], distinct[below])
        return known

    @_alone
    def accum_or_assign(self, ids: Tensor, rows: Tensor, present: Tensor) -> Tensor:
        """Adds to rows of ids that have one, and inserts others. Their scores are updated.

        Args:
            ids: ``[N]`` int64.
            rows: ``[N, D]`` what is added where ``present``, else the new row.
            present: ``[N]`` bool: what the caller expects. Where it is wrong, nothing happens to the id.

        Returns:
            ``[N]`` bool: for which ids something happened.
        """
        first = self.index.step + 1  # ids that are added to are of the same batch as ids that are inserted
        with self._batch_below():
            slots = self.index.find(ids)
            add = present & (slots >= 0)
            if bool(add.any()):
                self.index.access(ids[add], self.scores_of(ids[add]))
            self.weight.index_add_(0, slots[add], rows[add].to(self.weight.dtype))
            absent = (present & (slots < 0)).nonzero().squeeze(1)
            distinct, inverse = ids[absent].unique(return_inverse=True)
            # tiers are passed distinct ids
            sums = rows.new_zeros(len(distinct), rows.shape[1]).index_add_(0, inverse, rows[absent])
            add[absent] = self._change_below(distinct, sums, add=True)[inverse]
            new = ~present & (slots < 0)
            # an id that a tier has is present, against what the caller expected
            new[new.clone()] = ~self._in_tiers(ids[new])
            if bool(new.any()):
                self.insert_and_evict(ids[new], rows[new], pinned_from=first)
                # admission may have refused some
                new[new.clone()] = (self.index.find(ids[new]) >= 0) | self._in_tiers(ids[new])
            return add | new

    @_alone
    def erase(self, ids: Tensor) -> int:
        """Removes ids that have a row, from every tier. Returns how many."""
        # erasing changes tags and accesses alone, so the keys are still there
        erased = self.index.keys[self.index.erase(ids)]
        if self.tiers is None:
            return len(erased)
        distinct = ids.to(self.device, torch.int64).unique()
        below = self.tiers.delete(distinct.cpu()).to(self.device)
        return int((below | torch.isin(distinct, erased)).sum())

    @_alone
    def erase_if(self, condition: Callable[[Tensor, Tensor], Tensor]) -> int:
        """Removes the ids for which ``condition(ids [M], scores [M])`` is True, from every tier. Returns how many."""
        if self.tiers is None:
            return len(self.index.erase_if(condition))
        # all are chosen before any is erased: erasing changes what the iteration reads
        chosen = [rows.ids[condition(rows.ids, rows.scores)] for rows in self.export_batches()]
        return sum(self.erase(ids) for ids in chosen)

    def export_batches(self, size: int = 1 << 16, since: int | None = None) -> Iterator[Rows]:
        """Everything that the table holds, up to ``size`` ids at a time. Rows of the fast tier come first.

        Args:
            size: of a batch.
            since: only ids touched at this step of the index or later. Of the other tiers: ids that left the fast tier
                then.
        """
        for ids, scores, slots in self.index.export_batches(size, since):
            yield self._rows(ids, scores, self.index.touched[slots], slots)
        if self.tiers is not None:
            for rows in self.tiers.batches(size, self._in_fast):
                recent = rows.at(rows.touched >= since) if since is not None else rows
                if len(recent.ids):
                    yield recent.to(self.device)

    @_alone
    def flush(self) -> None:
        """Moves every row to the last tier. A tier on disk or in Redis then has the whole table for the next run.

        Raises:
            ValueError: the table has no tiers.
        """
        if self.tiers is None:
            raise ValueError(f"table {self.config.name!r} has no tiers to flush to. Fix: pass tiers= to its config")
        for ids, scores, slots in self.index.export_batches():
            # stored before it is erased: an error loses no row
            self._put_below(self._leaving(ids, scores, slots))
            self.index.erase(ids)
        self._lose(self.tiers.sink())
        self.tiers.close()

    @_alone
    def grow(self, buckets: int) -> None:
        """Grows to this many buckets of each partition, if it has fewer. Every id keeps its row."""
        if buckets > self.index.buckets:
            self._settle(self.index.grow(buckets))

    @_alone
    def clear(self, buckets: int) -> None:
        """Removes every id of the fast tier, in memory for this many buckets of each partition."""
        self.index.clear(buckets)
        if len(self.weight) != self.index.capacity:
            self.weight, self.states = self._memory()

    # ---- state ----

    @_alone
    def state(self) -> dict[str, Any]:
        """The index, the weight, the optimizer states, the admission and the tiers, for `load_state`.

        Tensors are not copied. Of tiers on disk and in Redis the state has the place, not the rows: loading it gives a
        table with the rows that are there then.
        """
        counts = None if self.admission_counts is None else self.admission_counts.state()
        if self.tiers is not None:
            self._lose(self.tiers.store_waiting())
        state = {"index": self.index.state(), "weight": self.weight, "states": dict(self.states), "admission": counts}
        return state if self.tiers is None else state | {"tiers": [store.state() for store in self.tiers.stores]}

    @_alone
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Becomes the table that `state` was read from, in memory of its size.

        Raises:
            ValueError: the state has other tiers.
        """
        stores = [] if self.tiers is None else self.tiers.stores
        if len(stores) != len(state.get("tiers", ())):
            raise ValueError(
                f"table {self.config.name!r} has {len(stores)} tiers, and the state has {len(state.get('tiers', ()))}. "
                f"Fix: build the table with the tiers of the state"
            )
        for store, own in zip(stores, state.get("tiers", ()), strict=True):
            store.load_state(own)
        self.index.load_state(state["index"])
        if len(self.weight) != self.index.capacity:
            self.weight, self.states = self._memory()
        self.weight.copy_(state["weight"])
        for name, own_state in self.states.items():
            own_state.copy_(state["states"][name])
        if self.admission_counts is not None:
            self.admission_counts.load_state(state["admission"])

    def recount(self) -> None:
        """After others have written the index: the ids that were there count as erasures, those of now as inserts."""
        counted = self.index.counters
        counted.erasures += counted.inserts - counted.evictions - counted.erasures
        counted.inserts += self.size

    def index_tensors(self) -> dict[str, Tensor]:
        """The tensors of the index and, with the prefix ``admission_``, of the counts of ids without a row."""
        counts = {} if self.admission_counts is None else self.admission_counts.tensors()
        return self.index.tensors() | {f"admission_{name}": tensor for name, tensor in counts.items()}

    # ---- inside ----

    def _weight_alone(self) -> Memory:
        dtype = TORCH_DTYPES[self.config.data_type]
        return torch.zeros(self.capacity, self.columns[1] - self.columns[0], dtype=dtype, device=self.device), {}

    def _admission(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """What decides which absent ids are inserted: those that a tier has, and those that admission admits."""
        admit = self._admit
        if admit is None or self.tiers is None:
            return admit

        def admitted(ids: Tensor, counts: Tensor) -> Tensor:
            known = self._in_tiers(ids)
            # only these are counted as occurrences of ids without a row
            known[~known] = admit(ids[~known], counts[~known])
            return known

        return admitted

    def _in_fast(self, ids: Tensor) -> Tensor:
        """``[M]`` bool in host memory: which ids have a slot."""
        return self.index.contains(ids).cpu()

    def _in_tiers(self, ids: Tensor) -> Tensor:
        """``[M]`` bool: which ids are in a tier below."""
        if self.tiers is None:
            return torch.zeros_like(ids, dtype=torch.bool)
        return self.tiers.contains(ids.cpu()).to(ids.device)

    def _change_below(self, ids: Tensor, rows: Tensor, *, add: bool) -> Tensor:
        """Overwrites, or adds to, the rows of distinct ids ``[M]`` in the tiers. Returns which are there."""
        if self.tiers is None or not len(ids):
            return torch.zeros_like(ids, dtype=torch.bool)
        # tiers take CPU tensors
        given = rows.to("cpu", self.weight.dtype)

        def change(own: Rows, at: Tensor) -> Rows:
            weight = own.weight + given[at] if add else given[at]
            # touched, so that an export of recent rows has it
            return own._replace(weight=weight, touched=torch.full_like(own.ids, self.index.step))

        return self.tiers.change(ids.to("cpu", torch.int64), change).to(ids.device)

    def _read(self, ids: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        # absent ids read slot 0, and are overwritten below
        rows, found = self.weight[slots.clamp(min=0)], slots >= 0
        absent = (~found).nonzero().squeeze(1)
        if len(absent):
            below, found[absent] = self._below(ids[absent])
            rows[absent] = 0.0 if below is None else below
        return rows, found

    def _below(self, ids: Tensor) -> tuple[Tensor | None, Tensor]:
        """``[A, D]`` what ids without a slot read, and ``[A]`` bool which ids are in a tier."""
        is_initial = self.config.absent == "initial"
        if self.tiers is None or not len(ids):
            none = torch.zeros(len(ids), dtype=torch.bool, device=self.device)
            return self.initial(ids) if is_initial else None, none
        # tiers are slow: each id is read once
        distinct, inverse = ids.to(self.device, torch.int64).unique(return_inverse=True)
        rows, found = self._from_tiers(distinct)
        if not is_initial:
            rows.weight[~found] = 0
        return rows.weight[inverse], found[inverse]

    def _by_row(self) -> Iterator[tuple[str, Tensor]]:
        """The optimizer states with one entry per row."""
        return ((name, state) for name, state in self.states.items() if state.shape[0] == len(self.weight))

    def _rows(self, ids: Tensor, scores: Tensor, touched: Tensor, slots: Tensor) -> Rows:
        states = {name: state.index_select(0, slots) for name, state in self._by_row()}
        return Rows(ids, scores, touched, self.weight.index_select(0, slots), states)

    @torch.no_grad()
    def _settle(self, found: Inserted, values: tuple[Tensor, Tensor] | None = None) -> Rows | None:
        """Moves rows after an insertion: to their new slots, to the tiers, and from them.

        Args:
            found: the insertion.
            values: ids ``[N]``, ascending, and rows ``[N, D]`` that the caller stores in the slots. Those without one
                are stored in the tiers here.

        Returns:
            The rows that the table lost; None if nothing has read them.
        """
        read = values is not None
        # rows that leave are copied only if they are read
        wanted = read or self.on_evict is not None or self._has_tiers
        down = []
        if found.lost_slots is not None and wanted and len(found.lost_slots):
            assert found.lost_ids is not None
            assert found.lost_scores is not None
            down.append(self._leaving(found.lost_ids, found.lost_scores, found.lost_slots))
            if values is not None:  # an id of the batch may be among them
                at = torch.searchsorted(values[0], found.lost_ids).clamp(max=len(values[0]) - 1)
                given = values[0][at] == found.lost_ids
                down[0].weight[given] = values[1][at[given]].to(self.weight.dtype)
        # after the copy of lost rows, before the copy of evicted ones: their slots are those of the larger memory
        if found.moved is not None:
            self._resize(*found.moved)
        if wanted and (len(found.evicted_slots) or (read and not down)):
            down.append(self._leaving(found.evicted_ids, found.evicted_scores, found.evicted_slots))
        lost = joined(down) if down else None
        over = found.over_ids
        with self._batch_below():  # rows that leave the fast tier do not replace rows of the batch
            try:
                if len(found.new_slots):
                    self._fill(found.new_ids, found.new_slots)
                if self.tiers is not None and over is not None and len(over):
                    assert found.over_scores is not None
                    rows = self._without_slot(over, found.over_scores)
                    if values is not None:
                        rows.weight[:] = values[1][torch.searchsorted(values[0], over)]
                    # what remains is in no tier yet: it is stored with the rows that leave
                    rows = self._overwritten(rows)
                    lost = rows if lost is None else joined([lost, rows])
            finally:  # also if a tier could not be read
                lost = self._put_below(lost)
        return lost

    def _batch_below(self) -> AbstractContextManager[None]:
        """Tiers do not evict rows that are stored or changed inside."""
        return nullcontext() if self.tiers is None else self.tiers.batch()

    def _without_slot(self, ids: Tensor, scores: Tensor) -> Rows:
        """The rows of ids of a batch that found no slot, with scores that include this batch."""
        rows, found = self._from_tiers(ids)
        scores = scores.clone()
        # as `_fill` does for ids that get a slot
        scores[found] = self.index.added_scores(rows.scores[found], scores[found])
        return rows._replace(scores=scores, touched=torch.full_like(ids, self.index.step))

    def _overwritten(self, rows: Rows) -> Rows:
        """Overwrites rows in the tiers that have them. Returns the others."""
        if self.tiers is None or not len(rows.ids):
            return rows
        own = rows.to("cpu")
        return rows.at(~self.tiers.change(own.ids, lambda _, at: own.at(at)).to(self.device))

    def _from_tiers(self, ids: Tensor) -> tuple[Rows, Tensor]:
        """Rows of distinct ids ``[M]`` that the tiers have, else initial rows and zeros; ``[M]`` bool which they have.

        Nothing moves.
        """
        if self.tiers is None:
            rows = RowFormat.of(self.weight, dict(self._by_row())).empty(ids.cpu()).to(self.device)
            found = torch.zeros_like(ids, dtype=torch.bool)
        else:
            below, found = self.tiers.get(ids.cpu())
            rows, found = below.to(self.device), found.to(self.device)
        self._reset(rows, ids, ~found)
        return rows, found

    def _reset(self, rows: Rows, ids: Tensor, which: Tensor) -> None:
        """Makes rows initial ones, with states 0."""
        if bool(which.any()):
            rows.weight[which] = self.initial(ids[which])
            for state in rows.states.values():
                state[which] = 0

    def _put_below(self, rows: Rows | None) -> Rows | None:
        """Stores rows in the tiers, if there are any. Returns those that the table loses, after `on_evict`."""
        if rows is not None and len(rows.ids) and self.tiers is not None:
            rows = (self.tiers.put(rows.to("cpu")) or rows.at(slice(0))).to(self.device)
        self._lose(rows)
        return rows

    def _leaving(self, ids: Tensor, scores: Tensor, slots: Tensor) -> Rows:
        """The rows of ids that lost these slots."""
        return self._rows(ids, scores, torch.full_like(ids, self.index.step), slots)

    def _lose(self, rows: Rows | None) -> None:
        """Passes rows that no tier has to `on_evict`."""
        if rows is not None and len(rows.ids) and self.on_evict is not None:
            self.on_evict(rows.to(self.device))

    def _fill(self, ids: Tensor, slots: Tensor) -> None:
        """Fills the slots of distinct ids that were inserted: from the tiers, else with initial rows and zeros.

        Raises:
            Exception: as of a tier. The index then has none of the ids.
        """
        try:
            taken = None if self.tiers is None else self.tiers.take(ids.cpu())
        except BaseException:
            self.index.erase(ids)
            raise
        if taken is None or not bool(taken.found.any()):
            self.weight[slots] = self.initial(ids)
            for _, state in self._by_row():
                state[slots] = 0
            return
        rows, found = taken.rows.to(self.device), taken.found.to(self.device)
        self._reset(rows, ids, ~found)
        self.weight.index_copy_(0, slots, rows.weight)
        for name, state in self._by_row():
            state.index_copy_(0, slots, rows.states[name])
        # accesses before the id left the fast tier count, too
        self.index.add_scores(slots[found], rows.scores[found])
        assert self.tiers is not None
        # last: until here an error leaves the rows in the tier
        self.tiers.drop(taken)

    def _resize(self, before: Tensor, after: Tensor) -> None:
        """New memory, with the rows of slots ``before`` in the slots ``after``."""
        weight, states = self.weight, dict(self.states)
        # by the old size: `_by_row` compares with the weight, which changes below
        by_row = {name for name, _ in self._by_row()}
        self.weight, self.states = self._memory()
        kept = after >= 0
        before, after = before[kept], after[kept]
        self.weight[after] = weight[before]
        for name, state in self.states.items():
            if name in by_row:
                state[after] = states[name][before]
            else:
                state.copy_(states[name])


def _last_positions(slots: Tensor) -> Tensor:
    """The last position of each slot that is not -1."""
    present = (slots >= 0).nonzero().squeeze(1)
    _, inverse = slots[present].unique(return_inverse=True)
    count = int(inverse.max()) + 1 if len(inverse) else 0
    return present.new_full((count,), -1).scatter_reduce_(0, inverse, present, "amax")


def _last_of_each(ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct ids, and the last of the rows of each."""
    distinct, inverse = ids.unique(return_inverse=True)
    positions = torch.arange(len(ids), device=ids.device)
    last = inverse.new_full((len(distinct),), -1).scatter_reduce_(0, inverse, positions, "amax")
    return distinct, rows[last]
