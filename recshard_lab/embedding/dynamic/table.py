"""One dynamic table: an index of ids, and the rows and optimizer states in its slots.

A row belongs to one id at a time. When an id gets a slot, its row becomes the initial row of that id and its optimizer
states become 0, so that no id ever reads what another one left.

Shape letters: N ids, M distinct ids, C slots, D columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from recshard_lab.embedding.dynamic.admission import admission_of, of_ids
from recshard_lab.embedding.dynamic.config import DynamicEmbeddingConfig
from recshard_lab.embedding.dynamic.index import Counters, Inserted, ScoredIndex
from recshard_lab.embedding.dynamic.initial import initial_rows, stream_of
from recshard_lab.embedding.dynamic.stores.base import Rows as Rows
from recshard_lab.embedding.kernels import TORCH_DTYPES

Memory = tuple[Tensor, Mapping[str, Tensor]]
"""The weight ``[C, D]`` and the optimizer states of a table."""


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

    Attributes:
        index: the `ScoredIndex`.
        weight: ``[C, D]``. states: name -> optimizer state; those with one entry per row are reset with it.
        on_evict: is passed the `Rows` of every id that loses its slot, before they are reset; None for nothing.

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
    ) -> None:
        self.config, self.device = config, torch.device(device)
        self.columns = (0, config.embedding_dim) if columns is None else columns
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
        self._admit = admission_of(config, self.index.max_capacity, device)
        self._stream = stream_of(config.seed, config.name)
        self._memory = memory or self._weight_alone
        self.weight: Tensor
        self.states: Mapping[str, Tensor]
        if memory is None:
            self.weight, self.states = self._memory()
        self.on_evict: Callable[[Rows], object] | None = None

    # ---- size ----

    @property
    def size(self) -> int:
        """Ids that have a row."""
        return self.index.size

    @property
    def capacity(self) -> int:
        """Rows."""
        return self.index.capacity

    @property
    def load_factor(self) -> float:
        """`size` as a share of `capacity`."""
        return self.index.load_factor

    @property
    def counters(self) -> Counters:
        """What the index has counted."""
        return self.index.counters

    # ---- slots, for lookups ----

    def slots_of(self, ids: Tensor) -> Tensor:
        """``[N]`` the slot of each id, -1 for absent ones. Inserts and evicts nothing, and changes no score."""
        return self.index.find(ids)

    def slots_for(self, ids: Tensor, *, pinned_from: int | None = None) -> Tensor:
        """``[N]`` the slot of each id, as one training step: absent ids are inserted if they are admitted.

        Args:
            ids: ``[N]`` int64.
            pinned_from: ids of this step of the index and of later ones are not evicted. Default: those of the batch.
        """
        found = self.index.find_or_insert(ids, self._scores(ids), admit=self._admit, pinned_from=pinned_from)
        self._settle(found)
        return found.slots

    def initial(self, ids: Tensor) -> Tensor:
        """``[N, D]`` the initial rows of ids, in the table's number format."""
        rows = initial_rows(ids.to(self.device, torch.int64), self._stream, self.columns, self.config.init_range)
        return rows.to(self.weight.dtype)

    # ---- the operations of HierarchicalKV ----

    def find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """``[N, D]`` rows and ``[N]`` bool whether each id has one. Absent ids read ``config.absent``."""
        slots = self.slots_of(ids)
        return self._read(ids, slots), slots >= 0

    def find_or_insert(self, ids: Tensor) -> Tensor:
        """``[N, D]`` rows. Absent ids are inserted with their initial row if they are admitted."""
        return self._read(ids, self.slots_for(ids))

    def insert_and_evict(self, ids: Tensor, rows: Tensor) -> Rows:
        """Inserts or overwrites rows ``[N, D]``, and returns those of the ids that lost their slot.

        Of several rows for one id, the last one is stored.
        """
        ids, rows = _last_of_each(ids, rows)
        found = self.index.find_or_insert(ids, self._scores(ids), admit=self._admit)
        evicted = self._settle(found, read=True)
        assert evicted is not None
        stored = found.slots >= 0
        self.weight[found.slots[stored]] = rows[stored].to(self.weight.dtype)
        return evicted

    def assign(self, ids: Tensor, rows: Tensor) -> Tensor:
        """Overwrites the rows of ids that have one. Returns ``[N]`` bool which these are. Scores are updated."""
        slots = self.index.access(ids, self._scores(ids))
        last = _last_positions(slots)
        self.weight[slots[last]] = rows[last].to(self.weight.dtype)
        return slots >= 0

    def accum_or_assign(self, ids: Tensor, rows: Tensor, present: Tensor) -> Tensor:
        """Adds to rows of ids that have one, and inserts others.

        Args:
            ids: ``[N]`` int64.
            rows: ``[N, D]`` what is added where ``present``, else the new row.
            present: ``[N]`` bool: what the caller expects. Where it is wrong, nothing happens to the id.

        Returns:
            ``[N]`` bool: for which ids something happened.
        """
        slots = self.index.find(ids)
        add = present & (slots >= 0)
        self.weight.index_add_(0, slots[add], rows[add].to(self.weight.dtype))
        new = ~present & (slots < 0)
        if bool(new.any()):
            self.insert_and_evict(ids[new], rows[new])
            new &= self.index.find(ids) >= 0
        return add | new

    def erase(self, ids: Tensor) -> int:
        """Removes ids that have a row. Returns how many."""
        return len(self.index.erase(ids))

    def erase_if(self, condition: Callable[[Tensor, Tensor], Tensor]) -> int:
        """Removes the ids for which ``condition(ids [M], scores [M])`` is True. Returns how many."""
        return len(self.index.erase_if(condition))

    def export_batches(self, size: int = 1 << 16, since: int | None = None) -> Iterator[Rows]:
        """Everything that the table holds, up to ``size`` ids at a time.

        Args:
            size: of a batch.
            since: only ids touched at this step of the index or later.
        """
        for ids, scores, slots in self.index.export_batches(size, since):
            yield self._rows(ids, scores, self.index.touched[slots], slots)

    # ---- state ----

    def state(self) -> dict[str, Any]:
        """The index, the weight, the optimizer states and the admission, for `load_state`. Tensors are not copied."""
        admission = {} if self._admit is None else self._admit.state()
        return {"index": self.index.state(), "weight": self.weight, "states": dict(self.states), "admit": admission}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Becomes the table that `state` was read from, in memory of its size."""
        self.index.load_state(state["index"])
        if len(self.weight) != self.index.capacity:
            self.weight, self.states = self._memory()
        copy_memory((state["weight"], state["states"]), (self.weight, self.states))
        if self._admit is not None:
            self._admit.load_state(state["admit"])

    # ---- inside ----

    def _weight_alone(self) -> Memory:
        dtype = TORCH_DTYPES[self.config.data_type]
        return torch.zeros(self.capacity, self.columns[1] - self.columns[0], dtype=dtype, device=self.device), {}

    def _scores(self, ids: Tensor) -> Tensor | None:
        evict = self.config.evict
        return of_ids(evict, ids, torch.int64, f"table {self.config.name!r}: evict(ids)") if callable(evict) else None

    def _read(self, ids: Tensor, slots: Tensor) -> Tensor:
        rows = self.weight[slots.clamp(min=0)]
        absent = slots < 0
        if self.config.absent == "zero":
            return rows.masked_fill_(absent[:, None], 0.0)
        rows[absent] = self.initial(ids[absent])
        return rows

    def _by_row(self) -> Iterator[tuple[str, Tensor]]:
        """The optimizer states with one entry per row."""
        return ((name, state) for name, state in self.states.items() if state.shape[0] == len(self.weight))

    def _rows(self, ids: Tensor, scores: Tensor, touched: Tensor, slots: Tensor) -> Rows:
        return Rows(ids, scores, touched, self.weight[slots], {name: state[slots] for name, state in self._by_row()})

    @torch.no_grad()
    def _settle(self, found: Inserted, read: bool = False) -> Rows | None:
        """Moves rows after growth, reads those of evicted ids on request, and resets new ones."""
        if found.moved is not None:
            self._resize(*found.moved)
        evicted = None
        if read or (self.on_evict is not None and len(found.evicted_ids)):
            touched = torch.full_like(found.evicted_ids, self.index.step)
            evicted = self._rows(found.evicted_ids, found.evicted_scores, touched, found.evicted_slots)
            if self.on_evict is not None and len(found.evicted_ids):
                self.on_evict(evicted)
        if len(found.new_slots):
            self.weight[found.new_slots] = self.initial(found.new_ids)
            for _, state in self._by_row():
                state[found.new_slots] = 0
        return evicted

    def _resize(self, before: Tensor, after: Tensor) -> None:
        """New memory, with the rows of slots ``before`` in the slots ``after``."""
        weight, states = self.weight, dict(self.states)
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


def copy_memory(source: Memory, target: Memory) -> None:
    """Copies rows and optimizer states to memory of the same size."""
    target[0].copy_(source[0])
    for name, state in target[1].items():
        state.copy_(source[1][name])


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
