"""Gradients of replicated shard features: every rank receives them, behind those of the exchanged shard features.

A shard feature travels as bags or as rows. Its sender decides when it sends the ids (``touched_rows.py``). On the
wire, shard features are sorted by width, so that one kernel sums the rows of all that have one width.

Shape letters: L shard features, S bags (or touched rows) of one from one source, T those of the longest from all
sources, W sources.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from recshard_lab.distributed.step.input_dist import LocalBatch, LookupInput
from recshard_lab.distributed.step.layout import Layout
from recshard_lab.distributed.step.output_dist.columns import ColumnMap, Run, starts_of
from recshard_lab.distributed.step.output_dist.stacks import SourceStack
from recshard_lab.distributed.step.output_dist.wire import Parcel
from recshard_lab.distributed.step.touched_rows import TouchedRows


class Replicas:
    """Packs and unpacks these gradients, for pooled collections.

    Args:
        layout: the wiring.
        step: a size of which the other rows in a message are multiples.
    """

    def __init__(self, layout: Layout, step: int) -> None:
        self.features = layout.replicated_features
        widths = [feature.shard.num_cols for feature in self.features]
        self._order = sorted(range(len(widths)), key=widths.__getitem__)
        self.widths = [widths[number] for number in self._order]
        self._blocks = [self.features[number].block for number in self._order]
        self._stack = SourceStack(widths, self._order, [step])
        blocks = [layout.blocks[block] for block in self._blocks]
        by_rows = [Run(0, block.start, 0, block.dim, number) for number, block in enumerate(blocks)]
        self._of_rows = ColumnMap(by_rows, [layout.output_width], self.widths)
        by_block = [
            Run(block, 0, 0, width, n) for n, (block, width) in enumerate(zip(self._blocks, self.widths, strict=True))
        ]
        self._of_blocks = ColumnMap(by_block, [block.dim for block in layout.blocks], self.widths)

    def sends(self, local_batch: LocalBatch) -> list[Parcel]:
        """What every rank receives from this one."""
        touched = [local_batch.touched[number] for number in self._order]
        rows = [
            local_batch.lengths[block].numel() if own is None else own.rows.numel()
            for block, own in zip(self._blocks, touched, strict=True)
        ]
        return [Parcel(n, (width,)) for n, width in zip(rows, self.widths, strict=True)]

    def receives(self, lookup_input: LookupInput) -> list[list[Parcel]]:
        """What this rank receives from each source."""
        order = list(zip(self._order, self.widths, strict=True))
        return [[Parcel(own[number], (width,)) for number, width in order] for own in lookup_input.copy_bags]

    def tails(self, lookup_input: LookupInput) -> list[int]:
        """Elements from each source."""
        return self._stack.sizes(lookup_input.copy_bags)

    def of_rows(self, grad: Tensor, scale: float, local_batch: LocalBatch) -> Tensor:
        """What every rank receives of ``grad [B, output width]``, means divided, times ``scale``; flat."""
        rows = [local_batch.batch_size] * len(self.features)
        return self._summed(self._of_rows(grad.view(-1), [0], rows, scale), rows, local_batch)

    def of_blocks(self, grad: Tensor, starts: Sequence[int], scale: float, local_batch: LocalBatch) -> Tensor:
        """The same of a variable batch's flat gradient, whose blocks begin at ``starts``."""
        rows = [local_batch.lengths[block].numel() for block in self._blocks]
        return self._summed(self._of_blocks(grad, starts, rows, scale), rows, local_batch)

    def _summed(self, flat: Tensor, rows: Sequence[int], local_batch: LocalBatch) -> Tensor:
        """Gradients of bags -> of touched rows, where the shard feature travels as rows."""
        touched = [local_batch.touched[number] for number in self._order]
        return sum_touched(flat, rows, self.widths, touched)

    def join(self, received: Tensor, begins: Sequence[int], lookup_input: LookupInput) -> Tensor:
        """``[T, columns of all shard features]`` of what arrived; each source's gradients begin at ``begins``."""
        return self._stack(received, begins, lookup_input.copy_bags)


def sum_touched(
    flat: Tensor, rows: Sequence[int], widths: Sequence[int], touched: Sequence[TouchedRows | None]
) -> Tensor:
    """Sums the gradients of bags (or ids) that read one row. One embedding bag for all areas of one width.

    Args:
        flat: areas end to end, sorted by width.
        rows: of each area.
        widths: of each area, ascending.
        touched: for each area the rows that it is summed to; None leaves it as it is.
    """
    if all(own is None for own in touched):
        return flat
    starts = starts_of(rows, widths)
    ends = [*starts[1:], flat.numel()]
    parts = [flat[start:end] for start, end in zip(starts, ends, strict=True)]
    for width in sorted(set(widths)):
        first, count = widths.index(width), widths.count(width)
        summed = [(n, own) for n in range(first, first + count) if (own := touched[n]) is not None]
        if not summed:
            continue
        table = flat[starts[first] : ends[first + count - 1]].view(-1, width)
        shifts = [(starts[n] - starts[first]) // width for n, _ in summed]
        left = iter(_sums(table, [own for _, own in summed], shifts))
        parts[first : first + count] = [
            part if touched[n] is None else next(left) for n, part in enumerate(parts[first : first + count], first)
        ]
    return torch.cat(parts)


def _sums(table: Tensor, touched: Sequence[TouchedRows], shifts: Sequence[int]) -> Sequence[Tensor]:
    """The summed gradients of each, flat; its members count from row ``shifts`` of ``table``."""
    sizes = [own.rows.numel() * table.shape[1] for own in touched]
    if not sum(sizes):
        return table.new_empty(0).split(sizes)
    begins = list(accumulate((own.members.numel() for own in touched[:-1]), initial=0))
    members = torch.cat(torch._foreach_add([own.members for own in touched], list(shifts)))
    bags = torch.cat(torch._foreach_add([own.starts[:-1] for own in touched], begins))
    weights = [own.weights for own in touched if own.weights is not None]
    scales = torch.cat(weights).to(table.dtype) if weights else None
    return torch.embedding_bag(table, members, bags, mode=0, per_sample_weights=scales)[0].view(-1).split(sizes)
