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
from recshard_lab.distributed.step.output_dist.base import widths_of
from recshard_lab.distributed.step.output_dist.columns import ColumnMap, Ints, Numbers, Run
from recshard_lab.distributed.step.output_dist.stacks import SourceStack
from recshard_lab.distributed.step.types import LocalBatch, LookupInput, TouchedRows


class Replicas:
    """Packs and unpacks these gradients, for pooled collections.

    Args:
        layout: the wiring.
        step: a size of which the other rows in a message are multiples.
    """

    def __init__(self, layout: Layout, step: int) -> None:
        self.features = layout.replicated_features
        self.widths = widths_of(self.features)
        self._blocks = [feature.block for feature in self.features]
        self._stack = SourceStack(self.widths, [step])
        blocks = layout.blocks
        by_rows = [
            Run(0, blocks[block].start, 0, blocks[block].dim, number) for number, block in enumerate(self._blocks)
        ]
        self._of_rows = ColumnMap(by_rows, [layout.output_width], self.widths)
        by_block = [Run(block, 0, 0, blocks[block].dim, number) for number, block in enumerate(self._blocks)]
        self._of_blocks = ColumnMap(by_block, [block.dim for block in blocks], self.widths, keep=1)

    def sends(self, local_batch: LocalBatch) -> list[int]:
        """Rows of each shard feature that every rank receives from this one."""
        bags = [local_batch.lengths[block].numel() for block in self._blocks]
        return [n if touch is None else touch.rows.numel() for n, touch in zip(bags, local_batch.touched, strict=True)]

    def tails(self, lookup_input: LookupInput) -> Ints:
        """Elements from each source."""
        return self._stack.sizes(lookup_input.copy_bags)

    def of_rows(self, grad: Tensor, scale: float, local_batch: LocalBatch) -> Tensor:
        """What every rank receives of ``grad [B, output width]``, means divided, times ``scale``; flat."""
        rows = [local_batch.batch_size] * len(self.features)
        flat = self._of_rows(grad.view(-1), [0], rows, scale)
        return sum_touched(flat, rows, self.widths, local_batch.touched)

    def of_blocks(self, grad: Tensor, starts: Numbers, scale: float, local_batch: LocalBatch) -> Tensor:
        """The same of a variable batch's flat gradient, whose blocks begin at ``starts``."""
        rows = [local_batch.lengths[block].numel() for block in self._blocks]
        return sum_touched(self._of_blocks(grad, starts, rows, scale), rows, self.widths, local_batch.touched)

    def join(self, received: Tensor, begins: Numbers, lookup_input: LookupInput) -> Tensor:
        """``[T, columns of all shard features]`` of what arrived; each source's gradients begin at ``begins``."""
        return self._stack(received, begins, lookup_input.copy_bags)


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
        for n, gradients in zip(
            numbers, _sums(table.view(-1, width), [touch for _, touch in summed], shifts), strict=True
        ):
            parts[n] = gradients
    return torch.cat(parts)


def _sums(table: Tensor, touched: Sequence[TouchedRows], shifts: Sequence[int]) -> Sequence[Tensor]:
    """The summed gradients of each, flat; its members count from row ``shifts`` of ``table``."""
    sizes = [touch.rows.numel() * table.shape[1] for touch in touched]
    if not sum(sizes):
        return table.new_empty(0).split(sizes)
    begins = list(accumulate((touch.members.numel() for touch in touched[:-1]), initial=0))
    members = torch.cat(torch._foreach_add([touch.members for touch in touched], list(shifts)))
    bags = torch.cat(torch._foreach_add([touch.starts[:-1] for touch in touched], begins))
    weights = [touch.weights for touch in touched if touch.weights is not None]
    scales = torch.cat(weights).to(table.dtype) if weights else None
    return torch.embedding_bag(table, members, bags, mode=0, per_sample_weights=scales)[0].view(-1).split(sizes)
