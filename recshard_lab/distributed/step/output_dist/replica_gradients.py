"""Gradients of replicated shard features: every rank receives them, behind those of the exchanged shard features.

A shard feature travels as bags or as rows. Its sender decides when it sends the ids (``touched_rows.py``).

Shape letters: L shard features, S bags (or touched rows) of one from one source, T those of the longest from all
sources, W sources.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from recshard_lab.distributed.step.layout import Layout
from recshard_lab.distributed.step.output_dist.base import Target, runs_of, widths_of
from recshard_lab.distributed.step.output_dist.columns import ColumnMap
from recshard_lab.distributed.step.output_dist.kernel_orders import Stacked
from recshard_lab.distributed.step.types import LocalBatch, TouchedRows


class Replicas:
    """Packs and unpacks these gradients, for pooled collections.

    Args:
        layout: the wiring.
        sources: W.
        target: the output, whose gradients are sent.
        steps: sizes of which the other rows in a message are multiples.
    """

    def __init__(self, layout: Layout, sources: int, target: Target, steps: Sequence[int]) -> None:
        self.features = layout.replicated_features
        self.widths = widths_of(self.features)
        self.order = Stacked(self.widths, sources, steps)
        runs = [runs_of([feature], number, target.places)[0].reversed() for number, feature in enumerate(self.features)]
        self._areas = [target.places[feature.block][0] for feature in self.features]
        self._target, keep = target, 1 if target.variable else 8
        self._take = ColumnMap(runs, target.widths, self.widths, keep=keep)

    def bags(self, local_batch: LocalBatch) -> list[int]:
        """Bags of each shard feature in the local batch."""
        rows = self._target.rows(local_batch)
        return [rows[area] for area in self._areas]

    def sends(self, local_batch: LocalBatch) -> list[int]:
        """Rows of each shard feature that every rank receives from this one."""
        pairs = zip(self.bags(local_batch), local_batch.touched, strict=True)
        return [bags if touch is None else touch.rows.numel() for bags, touch in pairs]

    def gradients(self, grad: Tensor, scale: float, local_batch: LocalBatch) -> Tensor:
        """What every rank receives of the output's gradient, flat, means divided, times ``scale``; flat."""
        bags = self.bags(local_batch)
        flat = self._take(grad, self._target.rows(local_batch), bags, scale)
        return sum_touched(flat, bags, self.widths, local_batch.touched)


def sum_touched(
    flat: Tensor, rows: Sequence[int], widths: Sequence[int], touched: Sequence[TouchedRows | None]
) -> Tensor:
    """Sums the gradients of bags (or ids) that read one row. One embedding bag serves all areas of one width.

    Args:
        flat: areas end to end.
        rows: of each area.
        widths: of each area.
        touched: for each area the rows that it is summed to; None copies it.
    """
    if all(touch is None for touch in touched):
        return flat
    parts = list(flat.split([n * width for n, width in zip(rows, widths, strict=True)]))
    for width in sorted(set(widths)):
        summed = [(n, touch) for n, touch in enumerate(touched) if touch is not None and widths[n] == width]
        if not summed:
            continue
        numbers = [n for n, _ in summed]
        table = flat if len(numbers) == len(parts) else torch.cat([parts[n] for n in numbers])
        shifts = list(accumulate((rows[n] for n in numbers[:-1]), initial=0))
        sums = _sums(table.view(-1, width), [touch for _, touch in summed], shifts)
        if len(numbers) == len(parts):
            return sums
        sizes = [width * touch.rows.numel() for _, touch in summed]
        for n, own in zip(numbers, sums.split(sizes), strict=True):
            parts[n] = own
    return torch.cat(parts)


def _sums(table: Tensor, touched: Sequence[TouchedRows], shifts: Sequence[int]) -> Tensor:
    """The summed gradients, flat; the members of each count from row ``shifts`` of ``table``."""
    if not any(touch.rows.numel() for touch in touched):
        return table.new_empty(0)
    begins = list(accumulate((touch.members.numel() for touch in touched[:-1]), initial=0))
    members = torch.cat(torch._foreach_add([touch.members for touch in touched], list(shifts)))
    bags = torch.cat(torch._foreach_add([touch.starts for touch in touched], begins))
    weights = [touch.weights for touch in touched if touch.weights is not None]
    scales = torch.cat(weights).to(table.dtype) if weights else None
    return torch.embedding_bag(table, members, bags, mode=0, per_sample_weights=scales)[0].view(-1)
