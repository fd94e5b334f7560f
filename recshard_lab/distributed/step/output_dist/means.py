"""Mean pooling: sums over the bag lengths of the local batch, in a number of kernels that no table adds to."""

from math import gcd

import numpy as np
import torch
from torch import Tensor

from recshard_lab.distributed.step.layout import Layout
from recshard_lab.distributed.step.output_dist.columns import Memo, expand, to_device
from recshard_lab.distributed.step.types import LocalBatch


class Means:
    """Divides the columns of mean-pooled blocks.

    Args:
        layout: the wiring.
    """

    def __init__(self, layout: Layout) -> None:
        self.blocks = layout.mean_blocks
        dims = [block.dim for block in layout.blocks]
        self.chunk = gcd(*dims) or 1
        self._chunks = np.array(dims, dtype=np.int64) // self.chunk
        self._memo = Memo[Tensor]()

    def divide(self, rows: Tensor, local_batch: LocalBatch) -> Tensor:
        """Sums over the lengths of their bags, empty bags over 1.

        Args:
            rows: ``[B, output width]``, or flat in a variable batch, block after block.
            local_batch: has the lengths.
        """
        if not self.blocks or not rows.numel():
            return rows
        lengths = local_batch.lengths
        key = tuple(bags.numel() for bags in lengths), rows.dim() == 2, rows.device
        index = self._memo.get(key, lambda: self._compute(*key))
        divided = torch.cat([*(lengths[block] for block in self.blocks), lengths[0].new_ones(1)])
        divisors = divided.clamp(min=1).to(rows.dtype).index_select(0, index).unsqueeze(1)
        return (rows.view(-1, self.chunk) / divisors).view(rows.shape)

    def _compute(self, bags: tuple[int, ...], samples_first: bool, device: torch.device) -> Tensor:
        """For each chunk of the rows, the place of its length; of a sum, the place of the 1 at the end."""
        stride = np.isin(np.arange(len(bags)), self.blocks).astype(np.int64)
        sizes = np.array(bags, dtype=np.int64)
        ends = np.cumsum(sizes * stride)
        first = np.repeat(np.where(stride, ends - sizes, ends[-1]), self._chunks)
        stride = np.repeat(stride, self._chunks)
        if samples_first:
            return to_device(expand(first, stride, self._chunks.sum(keepdims=True), sizes[:1]), device)
        return to_device(expand(first, stride, self._chunks, sizes), device)
