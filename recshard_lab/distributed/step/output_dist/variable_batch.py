"""Pooled rows of a variable batch, in which every feature has bags of its own number (VBE).

Only the true bags travel. A kernel wants as many bags of every lane, so a lane's bags are followed by empty ones up to
the longest lane's; those stay where they are::

    owner    lane 0   [ source 0: 3 bags | source 1: 2 bags | -      ]       rows [T, columns of all lanes]
             lane 1   [ source 0: 4 bags | source 1: 2 bags          ]
    home     block    [S_b, D_b] each, flat, one after the other; `to_samples` then makes [B, sum of D] of them

Shape letters: B samples, S_b bags of block b, T bags of the longest lane, D_b columns of block b.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

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
from recshard_lab.distributed.step.output_dist.replica_gradients import Replicas
from recshard_lab.distributed.step.output_dist.wire import Arriving, Parcel, Wire, size_of


class VariableOutput(OutputExchange):
    """Brings the pooled rows of true bags home, and their gradients back.

    It serves every lane, whatever route the lane takes in batches of one size: the results are the same.

    Args:
        layout: the wiring.
        env: the ranks.
        registry: codecs of each kind of message; FP32 when left out.
    """

    def __init__(self, layout: Layout, env: ShardingEnv, registry: Registry | None = None) -> None:
        self.layout, self.env = layout, env
        self.lanes = layout.exchanged_features
        self.replicas = Replicas(layout)
        codecs = codecs_for(CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL, registry)
        self.forward_wire = Wire(env, FORWARD, codecs.forward)
        self.backward_wire = Wire(env, BACKWARD, codecs.backward)

    def begin(
        self, exchanged: Sequence[Tensor], replicated: Sequence[Tensor], lookup_input: LookupInput
    ) -> PendingOutput:
        local_batch, mine = lookup_input.local_batch, self.lanes[self.env.rank]
        columns, spans = _by_lane(exchanged, mine), _spans(lookup_input, len(mine))
        empty = torch.empty(0, dtype=self.layout.rows_dtype, device=lookup_input.ids.device)
        if not any(self.lanes):
            return PendingOutput(lookup_input, (None, replicated, empty))
        arriving = _send(
            self.forward_wire,
            [[lane[start:end] for lane, (start, end) in zip(columns, own, strict=True)] for own in spans],
            [_parcels(mine, own) for own in spans],
            [self._home_parcels(lanes, local_batch) for lanes in self.lanes],
            empty,
        )
        return PendingOutput(lookup_input, (arriving, replicated, empty), arriving.buffer_bytes)

    def finish(self, pending: PendingOutput) -> Tensor:
        """The pooled rows of the local batch's bags, flat, block after block."""
        local_batch = pending.lookup_input.local_batch
        arriving, replicated, flat = pending.state
        if arriving is not None:
            flat = arriving.wait()
        out = flat.new_zeros(sum(self._sizes(local_batch)))
        blocks = self._blocks(out, local_batch)
        position = 0
        for lane in (lane for lanes in self.lanes for lane in lanes):
            target = blocks[lane.block][:, slice(*lane.shard.cols)]
            target += flat[position : position + target.numel()].view(target.shape)
            position += target.numel()
        for lane, local in zip(self.replicas.lanes, _by_lane(replicated, self.replicas.lanes), strict=True):
            blocks[lane.block] += local[: blocks[lane.block].shape[0]]
        self._divide_means(blocks, local_batch)
        return out

    def begin_backward(self, grad: Tensor, scale: float, lookup_input: LookupInput) -> PendingOutput:
        local_batch, mine = lookup_input.local_batch, self.lanes[self.env.rank]
        blocks = self._blocks(grad * scale, local_batch)
        self._divide_means(blocks, local_batch)
        spans, copies = _spans(lookup_input, len(mine)), self.replicas.sends(local_batch)
        tail = grad.new_empty(size_of(copies))
        self.replicas.write([blocks[lane.block] for lane in self.replicas.lanes], 1.0, local_batch, tail)
        own_parcels = [_parcels(mine, own) for own in spans]
        arriving = _send(
            self.backward_wire,
            [[*(blocks[lane.block][:, slice(*lane.shard.cols)] for lane in own), tail] for own in self.lanes],
            [[*self._home_parcels(own, local_batch), *copies] for own in self.lanes],
            [[*own, *theirs] for own, theirs in zip(own_parcels, self.replicas.receives(lookup_input), strict=True)],
            grad.new_empty(0),
        )
        return PendingOutput(lookup_input, arriving, arriving.buffer_bytes)

    def finish_backward(self, pending: PendingOutput) -> Columns:
        """``[T, width]`` of each kernel, zeros in the empty bags."""
        lookup_input, mine = pending.lookup_input, self.lanes[self.env.rank]
        flat, spans = pending.state.wait(), _spans(lookup_input, len(mine))
        widths = [lane.shard.num_cols for lane in mine]
        rows = flat.new_zeros(sum(lookup_input.segments), sum(widths))
        columns = rows.split(widths, 1) if widths else []
        position, tails = 0, []
        for own, theirs in zip(spans, self.replicas.receives(lookup_input), strict=True):
            for lane, (start, end) in zip(columns, own, strict=True):
                target = lane[start:end]
                target.copy_(flat[position : position + target.numel()].view(target.shape))
                position += target.numel()
            tails.append(flat[position : position + size_of(theirs)])
            position += size_of(theirs)
        return Columns([rows, self.replicas.join(tails, lookup_input)])

    def to_samples(self, flat: Tensor, local_batch: LocalBatch) -> Tensor:
        """``[B, sum of D]``: every sample's bag of every block. Differentiable."""
        assert local_batch.inverse is not None
        blocks = zip(self._blocks(flat, local_batch), local_batch.inverse, strict=True)
        return torch.cat([rows.index_select(0, inverse) for rows, inverse in blocks], 1)

    def _home_parcels(self, lanes: Sequence[ShardFeature], local_batch: LocalBatch) -> list[Parcel]:
        return [Parcel(local_batch.lengths[lane.block].numel(), (lane.shard.num_cols,)) for lane in lanes]

    def _sizes(self, local_batch: LocalBatch) -> list[int]:
        return [own.numel() * block.dim for own, block in zip(local_batch.lengths, self.layout.blocks, strict=True)]

    def _blocks(self, flat: Tensor, local_batch: LocalBatch) -> list[Tensor]:
        parts = flat.split(self._sizes(local_batch))
        return [part.view(-1, block.dim) for part, block in zip(parts, self.layout.blocks, strict=True)]

    def _divide_means(self, blocks: list[Tensor], local_batch: LocalBatch) -> None:
        for index in self.layout.mean_blocks:
            blocks[index].div_(local_batch.lengths[index].clamp(min=1).to(blocks[index].dtype).unsqueeze(1))


def _send(
    wire: Wire,
    parts: Sequence[Sequence[Tensor]],
    sends: Sequence[Sequence[Parcel]],
    receives: Sequence[Sequence[Parcel]],
    example: Tensor,
) -> Arriving:
    """Sends to each rank its parts."""
    pieces = [part.reshape(-1).to(example.dtype) for own in parts for part in own]
    return wire.send(torch.cat(pieces) if pieces else example, sends, receives)


def _parcels(lanes: Sequence[ShardFeature], spans: Sequence[tuple[int, int]]) -> list[Parcel]:
    return [Parcel(end - start, (lane.shard.num_cols,)) for lane, (start, end) in zip(lanes, spans, strict=True)]


def _by_lane(groups: Sequence[Tensor], lanes: Sequence[ShardFeature]) -> list[Tensor]:
    """The columns of each lane, of groups that lie side by side."""
    left = iter(lanes)
    found: list[Tensor] = []
    for rows in groups:
        position = 0
        while position < rows.shape[1]:
            width = next(left).shard.num_cols
            found.append(rows[:, position : position + width])
            position += width
    return found


def _spans(lookup_input: LookupInput, lanes: int) -> list[list[tuple[int, int]]]:
    """For each source rank, where its bags stand in each of the first ``lanes`` lanes."""
    assert lookup_input.bags is not None
    by_lane = [list(pairwise(accumulate((own[lane] for own in lookup_input.bags), initial=0))) for lane in range(lanes)]
    return [[spans[source] for spans in by_lane] for source in range(len(lookup_input.bags))]
