"""Rows that stay apart: every id's row travels to the place in the batch where the id stood.

Nothing is added on the way, so `direct` is the only route there is.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from recshard_lab.comm import CommOp, Registry, ShardingEnv, codecs_for
from recshard_lab.distributed.step.input_dist import LocalBatch, LookupInput
from recshard_lab.distributed.step.layout import Layout, ShardFeature
from recshard_lab.distributed.step.output_dist.base import (
    BACKWARD,
    FORWARD,
    Columns,
    OutputExchange,
    PendingOutput,
)
from recshard_lab.distributed.step.output_dist.wire import Parcel, Wire
from recshard_lab.distributed.step.route_ids import LOCAL
from recshard_lab.sharding import PlanError


class SequenceOutput(OutputExchange):
    """The output is flat: for each block its ``[n, D]`` rows, one block after the other.

    Raises:
        PlanError: a table's route is not "direct".
    """

    def __init__(self, layout: Layout, env: ShardingEnv, registry: Registry | None = None) -> None:
        self.layout, self.env = layout, env
        codecs = codecs_for(CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL, registry)
        self.forward_wire = Wire(env, FORWARD, codecs.forward)
        self.backward_wire = Wire(env, BACKWARD, codecs.backward)
        for table, route in zip(layout.tables, layout.table_routes, strict=True):
            if route != "direct":
                raise PlanError(
                    f"table {table.name!r} belongs to a sequence collection, whose rows are not added, so route "
                    f"{route!r} does not apply to it. Fix: route='direct' for this table"
                )
        self.lanes = layout.exchanged_features

    def begin(
        self, exchanged: Sequence[Tensor], replicated: Sequence[Tensor], lookup_input: LookupInput
    ) -> PendingOutput:
        local_batch, mine = lookup_input.local_batch, self.lanes[self.env.rank]
        example = lookup_input.ids.new_empty(0, dtype=self.layout.rows_dtype)
        lane_major = torch.cat(list(exchanged)).to(example.dtype) if exchanged else example
        sizes = [[n * lane.shard.num_cols for n in lookup_input.counts[i]] for i, lane in enumerate(mine)]
        message = _turn(lane_major, sizes, self.env.world_size)
        sends = _loads(mine, lookup_input.counts, self.env.world_size)
        receives = [self._sent(rank, local_batch) for rank in range(self.env.world_size)]
        arriving = self.forward_wire.send(message, sends, receives)
        return PendingOutput(lookup_input, (arriving, receives, replicated, example), arriving.buffer_bytes)

    def finish(self, pending: PendingOutput) -> Tensor:
        """Flat: for each block its ``[n, D]`` rows, one block after the other."""
        local_batch = pending.lookup_input.local_batch
        arriving, receives, replicated, example = pending.state
        flat = arriving.wait()
        out = example.new_empty(sum(self._block_sizes(local_batch)))
        blocks = self._blocks(out, local_batch)
        parts = iter(flat.split([parcel.size for load in receives for parcel in load]))
        for rank, lanes in enumerate(self.lanes):
            for number, lane in enumerate(lanes):
                self._columns(blocks, local_batch, rank, number, lane, next(parts))
        local = torch.cat(list(replicated)).to(example.dtype) if replicated else example
        position = 0
        for number, lane in enumerate(self.layout.replicated_features):
            size = _count(local_batch, number) * lane.shard.num_cols
            self._columns(blocks, local_batch, LOCAL, number, lane, local[position : position + size])
            position += size
        return out

    def begin_backward(self, grad: Tensor, scale: float, lookup_input: LookupInput) -> PendingOutput:
        grad = grad * scale if scale != 1.0 else grad
        local_batch = lookup_input.local_batch
        blocks = self._blocks(grad.contiguous(), local_batch)
        copies, copied = [], []
        for number, (lane, own) in enumerate(zip(self.layout.replicated_features, local_batch.touched, strict=True)):
            rows, width = self._gather(blocks, local_batch, LOCAL, number, lane), lane.shard.num_cols
            copies.append(rows if own is None else own.sum_gradients(rows.view(-1, width)).view(-1))
            copied.append(Parcel(_count(local_batch, number) if own is None else own.rows.numel(), (width,)))
        pieces, sends = [], []
        for rank, lanes in enumerate(self.lanes):
            parts = [
                self._gather(blocks, local_batch, rank, number, lane) for number, lane in enumerate(lanes)
            ] + copies
            pieces += parts
            sends.append(self._sent(rank, local_batch) + copied)
        lanes = self.layout.rank_features[self.env.rank]
        receives = _loads(lanes, lookup_input.counts, self.env.world_size)
        message = torch.cat(pieces) if pieces else grad.new_empty(0)
        arriving = self.backward_wire.send(message, sends, receives)
        return PendingOutput(lookup_input, arriving, arriving.buffer_bytes)

    def finish_backward(self, pending: PendingOutput) -> Columns:
        """Flat, in the order of this rank's shard features."""
        lanes = self.layout.rank_features[self.env.rank]
        counts = pending.lookup_input.counts
        sizes = [[n * lane.shard.num_cols for n in counts[i]] for i, lane in enumerate(lanes)]
        by_source = [[each[source] for each in sizes] for source in range(self.env.world_size)]
        return Columns([_turn(pending.state.wait(), by_source, len(lanes))])

    def _sent(self, rank: int, local_batch: LocalBatch) -> list[Parcel]:
        return [Parcel(local_batch.sent[rank][n], (lane.shard.num_cols,)) for n, lane in enumerate(self.lanes[rank])]

    def _block_sizes(self, local_batch: LocalBatch) -> list[int]:
        return [n * block.dim for n, block in zip(local_batch.counts, self.layout.blocks, strict=True)]

    def _blocks(self, flat: Tensor, local_batch: LocalBatch) -> list[Tensor]:
        parts = flat.split(self._block_sizes(local_batch))
        return [part.view(-1, block.dim) for part, block in zip(parts, self.layout.blocks, strict=True)]

    def _columns(
        self, blocks: list[Tensor], local_batch: LocalBatch, rank: int, number: int, lane: ShardFeature, rows: Tensor
    ) -> None:
        start, end = lane.shard.cols
        target = blocks[lane.block][:, start:end]
        positions = local_batch.positions.get((rank, number))
        rows = rows.view(-1, end - start)
        if positions is None:
            target.copy_(rows)
        else:
            target[positions] = rows

    def _gather(
        self, blocks: list[Tensor], local_batch: LocalBatch, rank: int, number: int, lane: ShardFeature
    ) -> Tensor:
        source = blocks[lane.block][:, slice(*lane.shard.cols)]
        positions = local_batch.positions.get((rank, number))
        return (source if positions is None else source[positions]).reshape(-1)


def _count(local_batch: LocalBatch, number: int) -> int:
    """Ids of a replicated lane."""
    _, start, end = local_batch.replicas[number].ids
    return end - start


def _loads(lanes: Sequence[ShardFeature], counts: Sequence[Sequence[int]], world_size: int) -> list[list[Parcel]]:
    """For each source rank, one parcel a lane: that lane's rows for it."""
    return [
        [Parcel(counts[number][source], (lane.shard.num_cols,)) for number, lane in enumerate(lanes)]
        for source in range(world_size)
    ]


def _turn(flat: Tensor, sizes: Sequence[Sequence[int]], width: int) -> Tensor:
    """Transposes pieces: ``sizes[i][j]`` is the size of piece (i, j), laid i-major in ``flat``; returns j-major."""
    ends = list(accumulate((n for row in sizes for n in row), initial=0))
    count = len(sizes)
    pieces = [flat[ends[i * width + j] : ends[i * width + j + 1]] for j in range(width) for i in range(count)]
    return torch.cat(pieces) if pieces else flat[:0]
