"""A lookup kernel whose ids have any value: a managed collision module of each shard in front of a kernel on its rows.

Shape letters: N ids, E rows of a shard, D columns.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from recshard_lab.embedding.kernels import LookupKernel, RowNorms
from recshard_lab.embedding.managed_collision.collections import first_rows, reset_rows
from recshard_lab.embedding.managed_collision.modules import ManagedEmbeddingConfig, RowOwners


class _Step:
    """A batch whose backward is to come: the step of each module. While it exists, its rows keep their owners."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers


class ManagedKernel(LookupKernel):
    """A `LookupKernel` for shards of managed tables. Ids are int64 of any value.

    Args:
        inner: the kernel on the rows.
        configs: the table of each slot.
        rows: of each slot the first row of the table, and the one after the last.
        columns: of each slot the first column of the table, and the one after the last.

    Attributes:
        modules: the module of each slot.
        inserts: whether a forward gives rows to ids. The caller sets it.
        rows: ``[N]`` the rows of the ids of the last forward, as the tables number them.
    """

    def __init__(
        self,
        inner: LookupKernel,
        configs: Sequence[ManagedEmbeddingConfig],
        rows: Sequence[tuple[int, int]],
        columns: Sequence[tuple[int, int]],
    ) -> None:
        self._inner, self.name = inner, inner.name  # type: ignore[misc]
        self.device, self.pooled, self.slots = inner.device, inner.pooled, inner.slots
        self.feature_slots, self.optimizer = inner.feature_slots, inner.optimizer
        self.inserts = True
        self.rows = torch.empty(0, dtype=torch.int64, device=self.device)
        self._configs, self._columns = list(configs), list(columns)
        self._pending: weakref.WeakSet[_Step] = weakref.WeakSet()
        self.modules: list[RowOwners] = [
            config.module.rebuild_with_output_id_range(own, config.edges, self.device)
            for config, own in zip(configs, rows, strict=True)
        ]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pending": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._pending = weakref.WeakSet()

    # ---- the two passes ----

    def forward(
        self, ids: Tensor, offsets: Tensor, weights: Tensor | None, counts: Sequence[int] | None = None
    ) -> tuple[Tensor, Any]:
        """As of `LookupKernel`. If `inserts`, ids may get rows first, which are reset."""
        rows, step = self._rows(ids, self._counts(offsets, counts))
        looked_up, saved = self._inner.forward(rows, offsets, weights, counts)
        return looked_up, (saved, step)

    def _counts(self, offsets: Tensor, counts: Sequence[int] | None) -> list[int]:
        """Ids of each shard feature."""
        if counts is not None:
            return list(counts)
        bags = (len(offsets) - 1) // len(self.feature_slots) if self.pooled else 1
        return offsets[::bags].diff().tolist()

    def _rows(self, ids: Tensor, counts: Sequence[int]) -> tuple[Tensor, _Step | None]:
        """``[N]`` the rows of ids, and the step if ids could get rows."""
        parts = list(ids.long().split(list(counts)))
        for number, module in enumerate(self.modules):
            own = [at for at, slot in enumerate(self.feature_slots) if slot == number]
            module.pinned_from = min((step.numbers[number] for step in self._pending), default=None)
            found = module.shard_rows(torch.cat([parts[at] for at in own]), self.inserts, [counts[at] for at in own])
            self._reset(number)
            for at, part in zip(own, found.split([counts[at] for at in own]), strict=True):
                parts[at] = part
        rows = torch.cat(parts)
        offsets = [self.modules[slot].offset for slot in self.feature_slots]
        self.rows = torch.cat([part + first for part, first in zip(parts, offsets, strict=True)])
        if not self.inserts:
            return rows, None
        step = _Step([module.step for module in self.modules])
        self._pending.add(step)
        return rows, step

    def _reset(self, number: int) -> None:
        """Resets the rows of a slot that have new owners."""
        module, weight = self.modules[number], self._inner.weights()[number]
        rows = module.evict()
        if rows is not None:
            values = first_rows(self._configs[number], module.owners_of(rows), self._columns[number], weight.dtype)
            states = self._inner.optimizer_states()[number].values()
            reset_rows(weight, rows - module.offset, values, states)

    def remember(
        self, ids: Tensor, offsets: Tensor, weights: Tensor | None, counts: Sequence[int] | None = None
    ) -> Any:
        """Not supported: rows may have other owners by now.

        Raises:
            ValueError: always.
        """
        names = ", ".join(repr(config.name) for config in self._configs)
        raise ValueError(
            f"the steps of {names} are deferred (fused_optimizer.defer_steps, GradientClippingOptimizer), and managed "
            f"collision gives their rows to other ids meanwhile. Fix: let these tables step in backward"
        )

    def backward(self, saved: Any, grad: Tensor, row_norms: RowNorms | None = None) -> Tensor | None:
        """As of `LookupKernel`. The caller drops ``saved`` afterwards, and rows of its batch may get other owners."""
        return self._inner.backward(saved[0], grad, row_norms)

    # ---- memory and settings of the inner kernel ----

    @classmethod
    def refuses(cls, *_: Any, **__: Any) -> str | None:
        """Nothing: the inner kernel was chosen for these slots."""
        return None

    def weights(self) -> list[Tensor]:
        """As of `LookupKernel`."""
        return self._inner.weights()

    def optimizer_states(self) -> list[dict[str, Tensor]]:
        """As of `LookupKernel`."""
        return self._inner.optimizer_states()

    def set_learning_rate(self, lr: float) -> None:
        """As of `LookupKernel`."""
        assert self.optimizer is not None
        self.optimizer = replace(self.optimizer, learning_rate=lr)
        self._inner.set_learning_rate(lr)

    def touched_rows(self, ids: Tensor, slot: int) -> Tensor:
        """As of `LookupKernel`, of ids that own a row."""
        rows = self.modules[slot].find(ids)
        return self._inner.touched_rows(rows[rows >= 0], slot)

    def index_tensors(self) -> list[dict[str, Tensor]]:
        """Per slot the state of its module. It moves with the rows."""
        return [module.tensors() for module in self.modules]

    def counters(self) -> list[dict[str, float]]:
        """Per slot what its module has counted, see `Counters`."""
        return [dict(module.counters.as_dict()) for module in self.modules]
