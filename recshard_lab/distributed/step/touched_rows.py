"""Data-parallel lanes: every rank looks its own batch up at home and learns from everybody's.

A table is never summed whole over the ranks. What travels, to every rank, is the smaller of two things, chosen for
each lane of each batch by its sender:

::

    bags    ids of the bags going forward, gradients of the pooled rows [S, D] coming back
    rows    the distinct ids [U] going forward, their summed gradients [U, D] coming back; always so where nothing
            is pooled. To a kernel these are U bags of one id each.

All ranks step the same kernels on the same bags in the same order, so replicas stay equal to the last bit.

Shape letters: S bags of a lane, n its ids, U distinct ones, T bags of the longest lane of all ranks together.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from recshard_lab.distributed.step.route_ids import BlockIds, join
from recshard_lab.sparse.ops import complete_cumsum


@dataclass(slots=True)
class TouchedRows:
    """A lane that travels as rows.

    Attributes:
        rows: ``[U]`` distinct ids, ascending.
        starts: ``[U + 1]`` where each row's members begin.
        members: ``[n]`` the bags (the ids, where nothing is pooled) that read each row, row after row.
        weights: ``[n]`` per-sample weights of the members.
    """

    rows: Tensor
    starts: Tensor
    members: Tensor
    weights: Tensor | None

    def sum_gradients(self, grad: Tensor) -> Tensor:
        """``[S, D]`` (``[n, D]`` where nothing is pooled) -> ``[U, D]``."""
        if not self.rows.numel():
            return grad.new_empty(0, grad.shape[1])
        weights = None if self.weights is None else self.weights.to(grad.dtype)
        summed: Tensor = torch.embedding_bag(grad, self.members, self.starts, False, 0, False, weights, True)[0]
        return summed


def touched_rows(lane: BlockIds, num_rows: int, dim: int, pooled: bool) -> TouchedRows | None:
    """The lane as rows; None where its bags are smaller.

    Args:
        lane: its part of the local batch.
        num_rows: of the table.
        dim: D.
        pooled: False where nothing is pooled: then rows are never more than ids.
    """
    ids, lengths = join([lane.ids]), join([lane.lengths])
    count, bags = ids.numel(), lengths.numel()
    if pooled and min(num_rows, count) > 2 * bags:
        return None  # hardly fewer rows than bags: not worth looking
    ordered, order = ids.sort()
    rows, counts = torch.unique_consecutive(ordered, return_counts=True)
    if pooled and rows.numel() * (dim + 1) >= bags * (dim + 1) + count:
        return None
    members = order
    if pooled:
        members = torch.repeat_interleave(lengths.long(), output_size=count).index_select(0, order)
    weights = None if lane.weights is None else join([lane.weights]).index_select(0, order)
    return TouchedRows(rows, complete_cumsum(counts), members, weights)
