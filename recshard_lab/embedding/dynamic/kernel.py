"""A lookup kernel whose ids have any value: an index of each shard's ids in front of a kernel on their rows.

Shape letters: N ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from recshard_lab.embedding.dynamic.config import DynamicEmbeddingConfig
from recshard_lab.embedding.dynamic.index import Span
from recshard_lab.embedding.dynamic.table import DynamicTable, Memory
from recshard_lab.embedding.kernels import KernelSpec, LookupKernel
from recshard_lab.embedding.kernels.mapped import MappedKernel


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
        none = [None] * len(configs)
        self.tables = [
            DynamicTable(config, spec.device, memory=partial(self._grown, number), partitions=own, columns=cols)
            for number, (config, own, cols) in enumerate(zip(configs, partitions or none, columns or none, strict=True))
        ]
        super().__init__(spec, inner, self.tables)

    def _start(self) -> None:
        super()._start()
        for table in self.tables:
            table.lock = self._lock  # one for all: a table that grows moves them all

    # ---- memory ----

    def _memory_for(self, number: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The inner kernel's memory for the slots of a table."""
        weight, states = self._memory_of(number, slice(self.tables[number].capacity))
        return weight, self._inner.optimizer_states()[number] | states

    def _bind(self, moved: int | None = None) -> None:
        for number, table in enumerate(self.tables):
            if number != moved:
                table.weight, table.states = self._memory_for(number)

    def _grown(self, number: int) -> Memory:
        """Memory for a table whose index grew. The other tables move to the new inner kernel as they are."""
        self._rebuild(moved=number)
        return self._memory_for(number)

    # ---- rows of batches ----

    def _scores(self, ids: Tensor, spans: Sequence[Span]) -> Tensor | None:
        if not any(callable(table.config.evict) for table in self.tables):
            return None
        own = [(self.tables[number].scores_of(ids[first:end]), ids[first:end]) for number, first, end in spans]
        return torch.cat([torch.zeros_like(some) if scores is None else scores for scores, some in own])

    # ---- memory and settings of the inner kernel ----

    def weights(self) -> list[Tensor]:
        """Per shard ``[capacity, num_cols]``. A table that grows gets new memory."""
        return [self._memory_for(number)[0] for number in range(len(self.tables))]

    def optimizer_states(self) -> list[dict[str, Tensor]]:
        """Per shard its states, by row."""
        return [self._memory_for(number)[1] for number in range(len(self.tables))]

    def touched_rows(self, ids: Tensor, shard: int) -> Tensor:
        """As of `LookupKernel`. Staging rows come last."""
        table = self.tables[shard]
        slots = table.index.find(ids)
        absent = slots < 0
        if bool(absent.any()):
            slots[absent] = table.capacity + self._without_row(table, ids[absent], train=True).places
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
