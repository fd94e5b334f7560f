"""torch operators on every device: rows are read, decoded to fp32 and pooled. Reads the same bytes as fbgemm.

Shape letters: F features, B batch, N ids, G features of one class (number format and width), n their ids, D columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recshard_lab.embedding.kernels.transposed import FeatureGroups
from recshard_lab.embedding.quantized.formats import rows_in, unpack
from recshard_lab.embedding.quantized.kernels import Feature, QuantKernel, register_quant_kernel


@register_quant_kernel
class NativeQuantKernel(QuantKernel):
    """`QuantKernel` on torch operators."""

    name = "native"

    @classmethod
    def refuses(cls, feature: Feature, device: torch.device) -> str | None:
        return None

    def __init__(
        self, features: Sequence[Feature], device: torch.device, output_dtype: torch.dtype, pooling: str
    ) -> None:
        super().__init__(features, device, output_dtype, pooling)
        classes: dict[int, list[int]] = {}
        for number, feature in enumerate(features):
            classes.setdefault(feature.place.class_start, []).append(number)
        dims = [feature.place.dim for feature in features]
        self._groups = FeatureGroups(dims, list(classes.values()), device)
        self.needs_counts = not self._groups.whole
        self._firsts: list[int | Tensor] = []
        for members in classes.values():
            places = [features[number].place for number in members]
            firsts = [(place.start - place.class_start) // place.stride for place in places]
            alike = len(set(firsts)) == 1
            self._firsts.append(firsts[0] if alike else torch.tensor(firsts, device=device))

    def forward(
        self,
        flat: Tensor,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        counts: Sequence[int] | None = None,
    ) -> Tensor:
        pooled = self.pooling != "none"
        batch = (offsets.numel() - 1) // len(self.features) if pooled else 1
        spans = [] if self._groups.whole else self._groups.spans(offsets, pooled, counts)[0]
        outputs = []
        for index in range(len(self._groups.groups)):
            own_ids = self._groups.take(ids, index, spans)
            own_offsets = self._groups.take_offsets(offsets, index, batch)
            own_weights = None if weights is None else self._groups.take(weights, index, spans)
            rows = self._decoded(flat, index, own_ids, own_offsets, batch)
            if not pooled:
                outputs.append(rows)
                continue
            outputs.append(self._pooled(rows, own_offsets, own_weights, len(self._groups.groups[index]), batch))
        if not pooled:
            rows = self._groups.join_flat(outputs, spans).view(-1, self.features[0].place.dim)
            return rows.to(self.output_dtype)
        parts = [output.unbind(1) for output in outputs]
        return self._groups.join_pooled(parts).to(self.output_dtype)

    def _decoded(self, flat: Tensor, index: int, ids: Tensor, offsets: Tensor, batch: int) -> Tensor:
        """``[n, D]`` fp32."""
        place = self.features[self._groups.groups[index][0]].place
        table = rows_in(flat, place.class_start, place.class_rows, place)
        first: int | Tensor = self._firsts[index]
        if isinstance(first, Tensor):
            ends = offsets.index_select(0, torch.arange(len(first) + 1, device=offsets.device) * batch)
            first = first.repeat_interleave(ends.diff(), output_size=ids.shape[0])
        rows = unpack(table.index_select(0, (ids + first).clamp(min=0).long()), place.kind)
        return torch.where((ids >= 0).unsqueeze(1), rows, 0)

    def _pooled(self, rows: Tensor, offsets: Tensor, weights: Tensor | None, count: int, batch: int) -> Tensor:
        """``[B, G, D]`` fp32, for ``count`` G."""
        numbers = torch.arange(rows.shape[0], dtype=offsets.dtype, device=rows.device)
        bags = torch.embedding_bag(rows, numbers, offsets, False, 0, False, weights, True)[0]
        if self.pooling == "mean":
            bags = bags / offsets.diff().clamp(min=1).unsqueeze(1)
        return bags.view(count, batch, rows.shape[1]).transpose(0, 1)
