"""Packed rows as a `LookupKernel`: shards of served tables, for devices and ranks. Forward only.

Shape letters: F shard features, B batch, N ids, R bytes of a packed row, d columns of a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.embedding.kernels import NO_WEIGHTS, LookupKernel, RowNorms, Slot, register_kernel
from recshard_lab.embedding.kernels.transposed import FeatureGroups
from recshard_lab.embedding.optimizers import OptimizerSpec
from recshard_lab.embedding.quantized.formats import PackedTables, row_bytes
from recshard_lab.embedding.quantized.kernels import Feature, QuantKernel, choose_quant_kernel


@register_kernel
class PackedKernel(LookupKernel):
    """`LookupKernel` on packed rows. `weights` are bytes ``[num_rows, R]`` uint8; all bytes zero is a row of zeros."""

    name = "packed"
    trains = False

    @classmethod
    def refuses(
        cls,
        slots: Sequence[Slot],
        optimizer: OptimizerSpec | None,
        *,
        pooled: bool,
        weighted: bool,
        exchanges_row_norms: bool,
        device: torch.device | str,
    ) -> str | None:
        if weighted and not pooled:
            return NO_WEIGHTS
        try:
            for slot in slots:
                row_bytes(_config(slot, slot.table))
        except ValueError as error:
            return str(error).partition(". Fix")[0]
        return None

    def _allocate(self) -> None:
        tables = [_config(slot, f"{number}") for number, slot in enumerate(self.slots)]
        self._packed = PackedTables(tables, self.device)
        features = [
            Feature(str(at), self.slots[slot].table, self._packed.places[slot])
            for at, slot in enumerate(self.feature_slots)
        ]
        groups: dict[Any, list[int]] = {}
        for at, feature in enumerate(features):
            width = 0 if self.pooled else feature.place.dim
            groups.setdefault((choose_quant_kernel(feature, self.device), width), []).append(at)
        pooling = "sum" if self.pooled else "none"
        self._kernels: list[QuantKernel] = [
            kernel([features[at] for at in members], self.device, torch.float32, pooling)
            for (kernel, _), members in groups.items()
        ]
        dims = [feature.place.dim for feature in features]
        self._groups = FeatureGroups(dims, list(groups.values()), self.device)

    def weights(self) -> list[Tensor]:
        return [self._packed.rows_of(number) for number in range(len(self.slots))]

    def optimizer_states(self) -> list[dict[str, Tensor]]:
        return [{} for _ in self.slots]

    def set_learning_rate(self, lr: float) -> None:
        """Nothing is trained."""

    def forward(
        self, ids: Tensor, offsets: Tensor, weights: Tensor | None, counts: Sequence[int] | None = None
    ) -> tuple[Tensor, Any]:
        self.check_weights(weights)
        spans, batch = self._groups.spans(offsets, self.pooled, counts)
        outputs = []
        for index, kernel in enumerate(self._kernels):
            own = self._groups.take(ids, index, spans).contiguous()
            places = self._groups.take_offsets(offsets, index, batch).to(own.dtype).contiguous()
            sizes = [spans[at][1] - spans[at][0] for at in self._groups.groups[index]]
            of_ids = None if weights is None else self._groups.take(weights, index, spans).float().contiguous()
            outputs.append(kernel.forward(self._packed.flat, own, places, of_ids, sizes))
        if not self.pooled:
            return self._groups.join_flat(outputs, spans), None
        if len(outputs) == 1:
            return outputs[0], None
        dims = [[self._groups.feature_dims[at] for at in group] for group in self._groups.groups]
        return self._groups.join_pooled([out.split(own, 1) for out, own in zip(outputs, dims, strict=True)]), None

    def backward(self, saved: Any, grad: Tensor, row_norms: RowNorms | None = None) -> Tensor | None:
        raise RuntimeError("served tables have no gradients. Fix: train the model, then quantize it")


def _config(slot: Slot, name: str) -> BaseEmbeddingConfig:
    return BaseEmbeddingConfig(slot.num_rows, slot.num_cols, name, slot.data_type)
