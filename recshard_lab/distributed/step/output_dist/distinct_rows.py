"""``distinct_rows``: the row of each distinct id travels once, unpooled, and the source rank pools.

::

    ids       bags [3 9 3] [3]                 sent to the ranks of the rows: 3, 9
    forward   rows 3, 9                        bag 0 = 2 x row 3 + row 9, bag 1 = row 3
    backward  row 3 = 2 x grad 0 + grad 1      row 9 = grad 0

Bytes grow with distinct ids, not with bags and shards.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from recshard_lab.comm import QuantizedCommCodecs, ShardingEnv
from recshard_lab.distributed.step.layout import Layout
from recshard_lab.distributed.step.output_dist.base import OutputPath, widths_of
from recshard_lab.distributed.step.output_dist.chunks import Chunks, first_ids, inverse_of
from recshard_lab.distributed.step.output_dist.columns import Indices, Ints, Run, gather, starts_of, to_device
from recshard_lab.distributed.step.output_dist.kernel_orders import Transposed
from recshard_lab.distributed.step.output_dist.wire import Arriving, Exchange
from recshard_lab.distributed.step.types import LocalBatch, LookupInput
from recshard_lab.sharding.plan.types import DISTINCT_ROWS
from recshard_lab.sparse.ops import complete_cumsum


class DistinctRowsPath(OutputPath):
    """Rows of distinct ids, flat, by rank and shard feature. Pooled, they make an area for each block."""

    name = DISTINCT_ROWS

    def __init__(self, layout: Layout, env: ShardingEnv, codecs: QuantizedCommCodecs) -> None:
        super().__init__(layout, env, codecs)
        stored = [feature for features in layout.exchanged_features for feature in features]
        self.numbers = np.array([n for n, feature in enumerate(stored) if feature.route == self.name], dtype=np.int64)
        self.first, features = layout.pooled_counts[env.rank], [stored[n] for n in self.numbers]
        dims = [block.dim for block in layout.blocks]
        self.blocks = sorted({feature.block for feature in features})
        self.has_replicas = not layout.partly_replicated.isdisjoint(self.blocks)
        self.area_widths = [dims[block] for block in self.blocks]
        self.runs = [Run(n, 0, layout.blocks[b].start, dims[b]) for n, b in enumerate(self.blocks)]
        self.chunks = Chunks(features, dims)
        self.block_starts = np.array([block.start for block in layout.blocks], dtype=np.int64) // self.chunks.size
        self.strides = np.full(len(dims), layout.output_width // self.chunks.size)
        self.turned = Transposed(widths_of(self.features[env.rank]), env.world_size)
        self.exchange = Exchange([[(width,) for width in widths_of(own)] for own in self.features], env, codecs)

    def begin(self, rows: Tensor, lookup_input: LookupInput) -> Arriving:
        counts = self._counts(lookup_input)
        message = self.turned.by_source(rows.reshape(-1), counts)
        arriving = self.exchange.send(message, counts, self._sent(lookup_input.local_batch))
        arriving.kept = self._bags_of_rows(lookup_input.local_batch)  # computed while the rows travel
        return arriving

    def finish(self, begun: Arriving, lookup_input: LookupInput) -> Tensor:
        received, batch = begun.wait(), lookup_input.local_batch
        if not received.numel():
            return received.new_zeros(batch.batch_size * sum(self.area_widths))
        if self.has_replicas:  # their ids read a chunk of zeros
            received = pad(received, (0, self.chunks.size))
        return gather(received, self.chunks.size, begun.kept)

    def area_rows(self, lookup_input: LookupInput) -> Ints:
        return np.full(len(self.blocks), lookup_input.local_batch.batch_size)

    def begin_backward(self, grad: Tensor, scale: float, lookup_input: LookupInput) -> Arriving:
        batch, sent = lookup_input.local_batch, self._sent(lookup_input.local_batch)
        assert batch.places is not None
        assert batch.num_places is not None
        bag_of_id = torch.arange(batch.batch_size, device=grad.device).repeat(len(self.blocks))
        total = sum(batch.counts[block] for block in self.blocks)
        bag_of_id = torch.repeat_interleave(bag_of_id, self._lengths(batch), output_size=total)
        shifts = (self._first_ids(batch) - first_ids(batch))[self.chunks.blocks]
        sizes, shift = to_device(np.stack([batch.num_places, shifts]), grad.device)
        place = batch.places + torch.repeat_interleave(shift, sizes, output_size=len(batch.places))
        index = self.chunks.of(bag_of_id[place], self.block_starts, self.strides, sent, batch)
        message = gather(grad.reshape(-1), self.chunks.size, index).mul_(scale)
        return self.exchange.send_back(message, sent, self._counts(lookup_input))

    def finish_backward(self, begun: Arriving, lookup_input: LookupInput) -> tuple[Tensor, ...]:
        """Flat, by shard feature of this rank."""
        return (self.turned.by_kernel(begun.wait(), self._counts(lookup_input)),)

    def _counts(self, lookup_input: LookupInput) -> Ints:
        """``[W, shard features here]`` rows for each rank."""
        return lookup_input.counts[self.first : self.first + self.turned.features].T

    def _sent(self, batch: LocalBatch) -> Ints:
        """Rows of each shard feature, rank after rank."""
        return batch.sent[self.numbers]

    def _lengths(self, batch: LocalBatch) -> Tensor:
        """``[blocks * B]`` ids of each bag."""
        return torch.cat([batch.remaining[block] for block in self.blocks]).long()

    def _first_ids(self, batch: LocalBatch) -> Ints:
        """For each block, its first id among those of all blocks of this path."""
        found, counts = np.zeros(len(batch.counts), np.int64), np.array(batch.counts)[self.blocks]
        found[self.blocks] = np.cumsum(counts) - counts
        return found

    def _bags_of_rows(self, batch: LocalBatch) -> Indices:
        """For each chunk of a bag, block after block, the chunks that arrived and are added."""
        assert batch.places is not None
        chunks, lengths = self.chunks.of_blocks, self._lengths(batch)
        counts = np.array(batch.counts)[self.blocks]
        first = np.zeros(len(chunks), np.int64)  # chunk of each block's first id, ids one after the other
        first[self.blocks] = starts_of(counts, chunks[self.blocks])
        place = self.chunks.of(batch.places, first - first_ids(batch) * chunks, chunks, self._sent(batch), batch)
        order, starts = inverse_of(place, int(counts @ chunks[self.blocks])), complete_cumsum(lengths)[:-1]
        if (chunks[self.blocks] == 1).all():
            return Indices(order, starts, None)
        shift = (first - self._first_ids(batch) * chunks)[self.blocks]
        table = to_device(np.stack([shift, chunks[self.blocks]]).repeat(batch.batch_size, 1), order.device)
        row = torch.repeat_interleave(table[1], output_size=batch.batch_size * int(chunks[self.blocks].sum()))
        within = torch.arange(len(row), device=order.device) - (table[1].cumsum(0) - table[1])[row]
        starts, sizes, stride = (starts * table[1] + table[0])[row] + within, lengths[row], table[1][row]
        bags = complete_cumsum(sizes)[:-1]
        bag = torch.repeat_interleave(sizes, output_size=len(order))
        index = starts[bag] + (torch.arange(len(order), device=order.device) - bags[bag]) * stride[bag]
        return Indices(order[index], bags, None)
