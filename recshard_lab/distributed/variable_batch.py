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
from recshard_lab.distributed.input_dist import Home, Routed
from recshard_lab.distributed.layout import Lane, Layout
from recshard_lab.distributed.routes.base import BACKWARD, FORWARD
from recshard_lab.distributed.routes.wire import Parcel, Wire


class VariableRoute:
    """Brings the pooled rows of true bags home, and their gradients back.

    It serves every lane, whatever route the lane takes in batches of one size: the results are the same.

    Args:
        layout: the wiring.
        env: the ranks.
        registry: codecs of each kind of message; FP32 when left out.
    """

    def __init__(self, layout: Layout, env: ShardingEnv, registry: Registry | None = None) -> None:
        self.layout, self.env = layout, env
        codecs = codecs_for(CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL, registry)
        self.forward_wire = Wire(env, FORWARD, codecs.forward)
        self.backward_wire = Wire(env, BACKWARD, codecs.backward)
        self.lanes = layout.exchanged_lanes
        self.copies = layout.replicated_lanes
        self.buffer_bytes = 0

    def forward(self, exchanged: list[Tensor], replicated: list[Tensor], routed: Routed) -> Tensor:
        """Kernel outputs ``[T, width]`` -> the pooled rows of the local batch's bags, flat, block after block."""
        home, mine, dtype = routed.home, self.lanes[self.env.rank], self.layout.rows_dtype
        columns = _by_lane(exchanged, mine)
        spans = _spans(routed, len(mine))
        flat = self._exchange(
            [[lane[start:end] for lane, (start, end) in zip(columns, own, strict=True)] for own in spans],
            [[Parcel(_bags(home, lane), (lane.shard.num_cols,)) for lane in lanes] for lanes in self.lanes],
            torch.empty(0, dtype=dtype, device=routed.ids.device),
            self.forward_wire,
        )
        out = flat.new_zeros(sum(self._sizes(home)))
        blocks = self._blocks(out, home)
        position = 0
        for lane in (lane for lanes in self.lanes for lane in lanes):
            target = blocks[lane.block][:, slice(*lane.shard.cols)]
            target += flat[position : position + target.numel()].view(target.shape)
            position += target.numel()
        for lane, local in zip(self.copies, _by_lane(replicated, self.copies), strict=True):
            blocks[lane.block].copy_(local[: _bags(home, lane)])
        self._divide_means(blocks, home)
        return out

    def backward(self, grad: Tensor, scale: float, routed: Routed) -> Tensor:
        """Flat gradient, to be multiplied by ``scale`` -> ``[T, columns of all lanes]``, zeros in the empty bags."""
        home, mine = routed.home, self.layout.rank_lanes[self.env.rank]
        blocks = self._blocks(grad * scale, home)
        self._divide_means(blocks, home)
        spans = _spans(routed, len(mine))
        widths = [lane.shard.num_cols for lane in mine]
        flat = self._exchange(
            [[blocks[lane.block][:, slice(*lane.shard.cols)] for lane in [*own, *self.copies]] for own in self.lanes],
            [[Parcel(end - start, (w,)) for (start, end), w in zip(own, widths, strict=True)] for own in spans],
            grad.new_empty(0),
            self.backward_wire,
        )
        rows = flat.new_zeros(sum(routed.segments), sum(widths))
        columns = rows.split(widths, 1) if widths else []
        position = 0
        for own in spans:
            for lane, (start, end) in zip(columns, own, strict=True):
                target = lane[start:end]
                target.copy_(flat[position : position + target.numel()].view(target.shape))
                position += target.numel()
        return rows

    def to_samples(self, flat: Tensor, home: Home) -> Tensor:
        """``[B, sum of D]``: every sample's bag of every block. Differentiable."""
        assert home.inverse is not None
        blocks = zip(self._blocks(flat, home), home.inverse, strict=True)
        return torch.cat([rows.index_select(0, inverse) for rows, inverse in blocks], 1)

    def _exchange(
        self, parts: Sequence[Sequence[Tensor]], receives: Sequence[Sequence[Parcel]], example: Tensor, wire: Wire
    ) -> Tensor:
        """For each rank the parts it is sent -> all it receives, flat."""
        pieces = [part.reshape(-1).to(example.dtype) for own in parts for part in own]
        sends = [[Parcel(part.shape[0], (part.shape[1],)) for part in own] for own in parts]
        message = torch.cat(pieces) if pieces else example
        arriving = wire.send(message, sends, receives)
        self.buffer_bytes = arriving.buffer_bytes
        return arriving.wait()

    def _sizes(self, home: Home) -> list[int]:
        return [own.numel() * block.dim for own, block in zip(home.lengths, self.layout.blocks, strict=True)]

    def _blocks(self, flat: Tensor, home: Home) -> list[Tensor]:
        parts = flat.split(self._sizes(home))
        return [part.view(-1, block.dim) for part, block in zip(parts, self.layout.blocks, strict=True)]

    def _divide_means(self, blocks: list[Tensor], home: Home) -> None:
        for index in self.layout.mean_blocks:
            blocks[index].div_(home.lengths[index].clamp(min=1).to(blocks[index].dtype).unsqueeze(1))


def _bags(home: Home, lane: Lane) -> int:
    return home.lengths[lane.block].numel()


def _by_lane(groups: Sequence[Tensor], lanes: Sequence[Lane]) -> list[Tensor]:
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


def _spans(routed: Routed, lanes: int) -> list[list[tuple[int, int]]]:
    """For each source rank, where its bags stand in each of the first ``lanes`` lanes."""
    assert routed.bags is not None
    by_lane = [list(pairwise(accumulate((own[lane] for own in routed.bags), initial=0))) for lane in range(lanes)]
    return [[spans[source] for spans in by_lane] for source in range(len(routed.bags))]
