"""Gradients of replicated lanes: the same parcels to every rank, behind those of the exchanged lanes.

What a lane travels as, bags or rows, its sender has decided when the ids went (``touched_rows.py``).

Shape letters: S bags (or touched rows) of a lane from one source, T those of the longest lane from all sources.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from recshard_lab.distributed.step.input_dist import LocalBatch, LookupInput
from recshard_lab.distributed.step.layout import Layout
from recshard_lab.distributed.step.output_dist.wire import Parcel


class Replicas:
    """Packs and unpacks these parcels, of pooled lanes.

    Args:
        layout: the wiring.
    """

    def __init__(self, layout: Layout) -> None:
        self.lanes = layout.replicated_features
        self.widths = [lane.shard.num_cols for lane in self.lanes]
        self.total_width = sum(self.widths)

    def sends(self, local_batch: LocalBatch) -> list[Parcel]:
        """What every rank is sent."""
        touched = zip(self.lanes, self.widths, local_batch.touched, strict=True)
        return [
            Parcel(local_batch.lengths[lane.block].numel() if own is None else own.rows.numel(), (width,))
            for lane, width, own in touched
        ]

    def receives(self, lookup_input: LookupInput) -> list[list[Parcel]]:
        """What comes from each source."""
        return [
            [Parcel(n, (width,)) for n, width in zip(own, self.widths, strict=True)] for own in lookup_input.copy_bags
        ]

    def write(self, grads: Sequence[Tensor], scale: float, local_batch: LocalBatch, out: Tensor) -> None:
        """Writes one rank's parcels.

        Args:
            grads: for each lane ``[S, D]``, means divided.
            scale: multiplies them.
            local_batch: the local batch.
            out: flat.
        """
        position = 0
        for grad, own in zip(grads, local_batch.touched, strict=True):
            rows = grad if own is None else own.sum_gradients(grad)
            torch.mul(rows, scale, out=out[position : position + rows.numel()].view(rows.shape))
            position += rows.numel()

    def join(self, arrived: Sequence[Tensor], lookup_input: LookupInput) -> Tensor:
        """What came from each source, flat -> ``[T, columns of all lanes]``, zeros where a lane has fewer bags."""
        totals = [sum(own) for own in zip(*lookup_input.copy_bags, strict=True)]
        most = max(totals, default=0)
        even = all(total == most for total in totals)
        joined = (arrived[0].new_empty if even else arrived[0].new_zeros)(most, self.total_width)
        parts = [
            flat.split([parcel.size for parcel in parcels])
            for flat, parcels in zip(arrived, self.receives(lookup_input), strict=True)
        ]
        for lane, columns in enumerate(joined.split(self.widths, 1) if self.widths else []):
            ends = accumulate((own[lane] for own in lookup_input.copy_bags), initial=0)
            for own, (start, end) in zip(parts, pairwise(ends), strict=True):
                columns[start:end] = own[lane].view(end - start, self.widths[lane])
        return joined
