"""Rows of sequence collections: every id's row travels to the place in the batch where the id stood.

Nothing is added in forward, so `direct` is the only output path. With ``use_index_dedup``, ids that are equal share one
row: it travels once, is copied to each of their places, and their gradients are added before they travel. One kernel
orders a message, and one puts what arrived in place::

    kernels here    feature 0: source 0, source 1 | feature 1: source 0, source 1       by shard feature
    on the wire     source 0: feature 0, feature 1 | source 1: feature 0, feature 1     by rank
    output          block after block, each [n, D]
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from recshard_lab.comm import CommOp, Registry, ShardingEnv, codecs_for
from recshard_lab.distributed.step.layout import Layout
from recshard_lab.distributed.step.output_dist.base import Columns, OutputExchange, PendingOutput, widths_of
from recshard_lab.distributed.step.output_dist.chunks import Chunks, first_ids, inverse_of
from recshard_lab.distributed.step.output_dist.columns import Indices, gather, starts_of
from recshard_lab.distributed.step.output_dist.kernel_orders import Transposed
from recshard_lab.distributed.step.output_dist.replica_gradients import sum_touched
from recshard_lab.distributed.step.output_dist.wire import Exchange
from recshard_lab.distributed.step.types import LocalBatch, LookupInput
from recshard_lab.sharding import PlanError


class SequenceOutput(OutputExchange):
    """The output is flat: for each block its ``[n, D]`` rows, one block after the other.

    Raises:
        PlanError: a table's route is not "direct".
    """

    def __init__(self, layout: Layout, env: ShardingEnv, registry: Registry | None = None) -> None:
        self.layout, self.env = layout, env
        codecs = codecs_for(CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL, registry)
        for table, route in zip(layout.tables, layout.table_routes, strict=True):
            if route != "direct":
                raise PlanError(
                    f"route {route!r} of table {table.name!r} does not apply: the table belongs to a sequence "
                    f"collection, whose rows are not added. Fix: route='direct' for this table"
                )
        self.features, self.replicated = layout.exchanged_features, layout.replicated_features
        parcels = [[(width,) for width in widths_of(own)] for own in self.features]
        self.exchange = Exchange(parcels, env, codecs, widths_of(self.replicated))
        self.pack = Transposed(widths_of(self.features[env.rank]), env.world_size)
        self.unpack = Transposed(widths_of(layout.rank_features[env.rank]), env.world_size)
        features = [feature for stored in self.features for feature in stored]
        self.dims = [block.dim for block in layout.blocks]
        self.chunks = Chunks([*features, *self.replicated], self.dims)

    def begin(
        self, exchanged: Sequence[Tensor], replicated: Sequence[Tensor], lookup_input: LookupInput
    ) -> PendingOutput:
        empty = lookup_input.ids.new_empty(0, dtype=self.layout.rows_dtype)
        rows = torch.cat(list(exchanged)).to(empty.dtype) if exchanged else empty
        counts = lookup_input.counts[: self.pack.features].T
        arriving = self.exchange.send(self.pack.by_source(rows, counts), counts, lookup_input.local_batch.sent)
        places = self._places(lookup_input.local_batch)  # while the rows travel
        order = inverse_of(places, len(places.chunks))
        copies = [rows.to(empty.dtype) for rows in replicated]
        return PendingOutput(lookup_input, (arriving, copies, order), arriving.buffer_bytes)

    def finish(self, pending: PendingOutput) -> Tensor:
        """Flat: for each block its ``[n, D]`` rows, one block after the other."""
        arriving, copies, order = pending.state
        received = arriving.wait()
        flat = torch.cat([received, *copies]) if copies else received
        return flat.view(-1, self.chunks.size).index_select(0, order).view(-1)

    def begin_backward(self, grad: Tensor, scale: float, lookup_input: LookupInput) -> PendingOutput:
        local_batch, sends = lookup_input.local_batch, lookup_input.local_batch.sent
        grad = (grad * scale if scale != 1.0 else grad).contiguous().view(-1)
        message = gather(grad, self.chunks.size, self._places(local_batch))
        sent = list[int]()
        if self.replicated:
            rows, touched, own = _copied(local_batch), local_batch.touched, sum(self.exchange.received.sizes(sends))
            tail = sum_touched(message[own:], rows, widths_of(self.replicated), touched)
            message = self.exchange.with_tails(message[:own], sends, tail)
            sent = [n if touch is None else touch.rows.numel() for n, touch in zip(rows, touched, strict=True)]
            del tail
        arriving = self.exchange.send_back(message, sends, lookup_input.counts.T, sent)
        return PendingOutput(lookup_input, arriving, arriving.buffer_bytes)

    def _places(self, local_batch: LocalBatch) -> Indices:
        """For each chunk that arrives, its chunks in the output: one, or a bag of them."""
        place = local_batch.places
        assert place is not None
        rows = np.concatenate([local_batch.sent, _copied(local_batch)])
        starts = starts_of(local_batch.counts, self.dims) // self.chunks.size
        starts = starts - first_ids(local_batch) * self.chunks.of_blocks
        return self.chunks.of(place, starts, self.chunks.of_blocks, rows, local_batch)

    def finish_backward(self, pending: PendingOutput) -> Columns:
        """Flat, by shard feature of this rank, exchanged and replicated."""
        return Columns([self.unpack.by_kernel(pending.state.wait(), pending.lookup_input.counts.T)])


def _copied(local_batch: LocalBatch) -> list[int]:
    """Ids of each replicated shard feature."""
    return [end - start for _, start, end in (replica.ids for replica in local_batch.replicas)]
