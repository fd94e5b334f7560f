"""A lookup kernel whose ids have any value: a managed collision module of each shard in front of a kernel on its rows.

Shape letters: N ids, E rows of a shard, D columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recshard_lab.embedding.kernels import KernelInput, KernelSpec, LookupKernel
from recshard_lab.embedding.kernels.mapped import Located, MappedKernel
from recshard_lab.embedding.managed_collision.collections import first_rows, reset_rows
from recshard_lab.embedding.managed_collision.modules import ManagedEmbeddingConfig, RowOwners


class ManagedKernel(MappedKernel):
    """A `LookupKernel` for shards of managed tables. Ids are int64 of any value.

    Args:
        spec: as of `LookupKernel`.
        inner: the class of the kernel on the rows.
        configs: the table of each shard.
        rows: of each shard the first row of the table, and the one after the last.
        columns: of each shard the first column of the table, and the one after the last.

    Attributes:
        modules: the module of each shard.
        rows: ``[N]`` the rows of the ids of the last forward, as the tables number them.
    """

    def __init__(
        self,
        spec: KernelSpec,
        inner: type[LookupKernel],
        configs: Sequence[ManagedEmbeddingConfig],
        rows: Sequence[tuple[int, int]],
        columns: Sequence[tuple[int, int]],
    ) -> None:
        self.rows = torch.empty(0, dtype=torch.int64, device=spec.device)
        self._configs, self._columns = list(configs), list(columns)
        self.modules: list[RowOwners] = [
            config.module.rebuild_with_output_id_range(own, config.edges, spec.device)
            for config, own in zip(configs, rows, strict=True)
        ]
        super().__init__(spec, inner)

    def _find(self, batch: KernelInput, train: bool, pins_last: bool = False) -> Located:
        """Rows that ids get are reset."""
        parts = list(batch.ids.long().split(batch.counts))
        for number, (module, own) in enumerate(zip(self.modules, self.features_by_shard(), strict=True)):
            counts = [batch.counts[at] for at in own]
            module.pinned_from = self._pinned(number)
            found = module.shard_rows(torch.cat([parts[at] for at in own]), train, counts)
            self._reset(number)
            for at, part in zip(own, found.split(counts), strict=True):
                parts[at] = part
        offsets = [self.modules[shard].offset for shard in self.features]
        self.rows = torch.cat([part + first for part, first in zip(parts, offsets, strict=True)])
        step = self._begun([module.step for module in self.modules]) if train else None
        return Located(torch.cat(parts), step, self._memory)

    def _reset(self, number: int) -> None:
        """Resets the rows of a shard that have new owners."""
        module, weight = self.modules[number], self._inner.weights()[number]
        rows = module.evict()
        if rows is not None:
            values = first_rows(self._configs[number], module.owners_of(rows), self._columns[number], weight.dtype)
            states = self._inner.optimizer_states()[number].values()
            reset_rows(weight, rows - module.offset, values, states)

    def prefetch(self, batch: KernelInput) -> None:
        """As of `LookupKernel`: there is one memory."""

    def remember(self, batch: KernelInput, train: bool = True) -> Any:
        """Not supported: rows may have other owners by now.

        Raises:
            ValueError: always.
        """
        names = ", ".join(repr(config.name) for config in self._configs)
        raise ValueError(
            f"the steps of {names} are deferred (fused_optimizer.defer_steps, GradientClippingOptimizer), and managed "
            f"collision gives their rows to other ids meanwhile. Fix: let these tables step in backward"
        )

    def touched_rows(self, ids: Tensor, shard: int) -> Tensor:
        """As of `LookupKernel`, of ids that own a row."""
        rows = self.modules[shard].find(ids)
        return self._inner.touched_rows(rows[rows >= 0], shard)

    def index_tensors(self) -> list[dict[str, Tensor]]:
        """As of `LookupKernel`: the state of its module."""
        return [module.tensors() for module in self.modules]

    def counters(self) -> list[dict[str, float]]:
        """Per shard what its module has counted, see `Counters`."""
        return [dict(module.counters.as_dict()) for module in self.modules]
