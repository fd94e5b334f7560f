"""Which chunks of rows on the wire belong to which places of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import numpy as np
import torch
from torch import Tensor

from recshard_lab.distributed.step.layout import ShardFeature
from recshard_lab.distributed.step.output_dist.columns import Indices, Ints, to_device
from recshard_lab.distributed.step.types import LocalBatch, segment_index
from recshard_lab.sparse.ops import complete_cumsum


class Chunks:
    """The columns of shard features in chunks, which divide all of their edges.

    Args:
        features: the shard features, in the order of their rows on the wire.
        dims: columns of each block.

    Attributes:
        size: columns of a chunk.
        blocks: the block of each shard feature.
        of_blocks: for each block, the chunks of its row.
    """

    def __init__(self, features: Sequence[ShardFeature], dims: Sequence[int]) -> None:
        columns = [feature.shard.cols for feature in features]
        self.size = gcd(*dims, *(edge for span in columns for edge in span)) or 1
        self.blocks = np.array([feature.block for feature in features], dtype=np.int64)
        self.of_blocks = np.array(dims, dtype=np.int64) // self.size
        self._first = np.array([first for first, _ in columns], dtype=np.int64) // self.size
        self._counts = np.array([end - first for first, end in columns], dtype=np.int64) // self.size

    def of(self, place: Tensor, starts: Ints, strides: Ints, rows: Ints, local_batch: LocalBatch) -> Indices:
        """For each chunk of rows on the wire, the chunks elsewhere of its places: one, or a bag of them.

        Args:
            place: ``[n]`` of each id of these shard features.
            starts: for each block, the chunk where place 0 begins.
            strides: for each block, the chunks from a place to the next.
            rows: rows of each shard feature on the wire.
            local_batch: has the number of places of each shard feature and of each row.
        """
        sizes, uses, device = local_batch.num_places, local_batch.uses, place.device
        assert sizes is not None
        if not len(place):
            return Indices(place.long(), None, None)
        table = np.stack([sizes, starts[self.blocks] + self._first, strides[self.blocks], self._counts])
        number, first, stride, counts = to_device(table, device)
        feature = torch.repeat_interleave(number, output_size=len(place))
        place = place * stride[feature] + first[feature]
        bags = None if uses is None else complete_cumsum(uses)[:-1]
        if (self._counts == 1).all():
            return Indices(place, bags, None)
        total, total_places = int(rows @ self._counts), int(sizes @ self._counts)
        chunks = counts[feature if bags is None else feature.index_select(0, bags)]
        row = torch.repeat_interleave(chunks, output_size=total)
        within = torch.arange(total, device=device) - (chunks.cumsum(0) - chunks)[row]
        if uses is None or bags is None:
            return Indices(place[row] + within, None, None)
        uses = uses[row]  # of each chunk: a bag of the same chunk of all its places
        index = segment_index(bags[row], uses, total_places)
        within = torch.repeat_interleave(within, uses, output_size=total_places)
        return Indices(place[index] + within, complete_cumsum(uses)[:-1], None)


def first_ids(local_batch: LocalBatch) -> Ints:
    """For each block, the place in the batch of its first id."""
    return np.array([start for start, _ in local_batch.spans], dtype=np.int64)


def inverse_of(found: Indices, total: int) -> Tensor:
    """``[total]``: for each chunk elsewhere, the chunk on the wire; the number of these where it has none."""
    rows = torch.arange(len(found.chunks if found.bags is None else found.bags), device=found.chunks.device)
    if found.bags is not None:
        ends = torch.nn.functional.pad(found.bags[1:], (0, 1), value=len(found.chunks))
        rows = torch.repeat_interleave(rows, ends - found.bags, output_size=len(found.chunks))
    count = len(found.chunks if found.bags is None else found.bags)
    return found.chunks.new_full((total,), count).index_copy_(0, found.chunks, rows)
