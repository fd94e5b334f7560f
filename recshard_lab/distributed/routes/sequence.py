"""Rows that stay apart: every id's row travels to the place in the batch where the id stood.

Nothing is added on the way, so `direct` is the only route there is.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from recshard_lab.comm import ShardingEnv, all_to_all
from recshard_lab.distributed.input_dist import Home, Routed
from recshard_lab.distributed.layout import Lane, Layout
from recshard_lab.distributed.routes.pooled import Columns
from recshard_lab.sharding import PlanError


class SequenceRoute:
    """The output is flat: for each block its ``[n, D]`` rows, one block after the other.

    Raises:
        PlanError: a table's route is not "direct".
    """

    def __init__(self, layout: Layout, env: ShardingEnv) -> None:
        self.layout, self.env = layout, env
        for table, route in zip(layout.tables, layout.table_routes, strict=True):
            if route != "direct":
                raise PlanError(
                    f"table {table.name!r} belongs to a sequence collection, whose rows are not added, so route "
                    f"{route!r} does not apply to it. Smallest fix: route='direct' for this table"
                )
        self.lanes = layout.exchanged_lanes
        self.buffer_bytes = 0

    def forward(self, exchanged: list[Tensor], replicated: list[Tensor], routed: Routed) -> Tensor:
        """Kernel outputs -> flat rows of the local batch."""
        home, mine = routed.home, self.lanes[self.env.rank]
        example = routed.ids.new_empty(0, dtype=self.layout.rows_dtype)
        lane_major = torch.cat(exchanged).to(example.dtype) if exchanged else example
        sizes = [[n * lane.shard.num_cols for n in routed.counts[i]] for i, lane in enumerate(mine)]
        message, send_sizes = _turn(lane_major, sizes, self.env.world_size)
        receive_sizes = [self._sent(rank, home) for rank in range(self.env.world_size)]
        flat = self._exchange(message, send_sizes, [sum(each) for each in receive_sizes], "output_dist/rows")
        out = example.new_empty(sum(self._block_sizes(home)))
        blocks = self._blocks(out, home)
        parts = iter(flat.split([size for each in receive_sizes for size in each]))
        for rank, lanes in enumerate(self.lanes):
            for number, lane in enumerate(lanes):
                self._columns(blocks, home, rank, number, lane, next(parts))
        local = torch.cat(replicated) if replicated else example.new_empty(0)
        position = 0
        for lane in self.layout.replicated_lanes:
            size = blocks[lane.block].numel()
            blocks[lane.block].view(-1).copy_(local[position : position + size])
            position += size
        return out

    def backward(self, grad: Tensor, scale: float, routed: Routed) -> Columns:
        """Flat gradient of the local batch, times ``scale`` -> flat, lane-major, for all of this rank's lanes."""
        grad = grad * scale if scale != 1.0 else grad
        home = routed.home
        blocks = self._blocks(grad.contiguous(), home)
        copies = [blocks[lane.block].reshape(-1) for lane in self.layout.replicated_lanes]
        pieces, send_sizes = [], []
        for rank, lanes in enumerate(self.lanes):
            parts = [self._gather(blocks, home, rank, number, lane) for number, lane in enumerate(lanes)] + copies
            pieces += parts
            send_sizes.append(sum(part.numel() for part in parts))
        lanes = self.layout.rank_lanes[self.env.rank]
        counts = routed.counts
        sizes = [[n * lane.shard.num_cols for n in counts[i]] for i, lane in enumerate(lanes)]
        by_source = [[each[source] for each in sizes] for source in range(self.env.world_size)]
        flat = self._exchange(
            torch.cat(pieces) if pieces else grad.new_empty(0),
            send_sizes,
            [sum(each) for each in by_source],
            "output_dist_backward/rows",
        )
        return Columns([_turn(flat, by_source, len(lanes))[0]])

    def _exchange(self, message: Tensor, sends: Sequence[int], receives: Sequence[int], label: str) -> Tensor:
        received = all_to_all(message, sends, receives, self.env, label)
        self.buffer_bytes = (message.numel() + received.numel()) * message.element_size()
        return received

    def _sent(self, rank: int, home: Home) -> list[int]:
        return [home.sent[rank][n] * lane.shard.num_cols for n, lane in enumerate(self.lanes[rank])]

    def _block_sizes(self, home: Home) -> list[int]:
        return [n * block.dim for n, block in zip(home.counts, self.layout.blocks, strict=True)]

    def _blocks(self, flat: Tensor, home: Home) -> list[Tensor]:
        parts = flat.split(self._block_sizes(home))
        return [part.view(-1, block.dim) for part, block in zip(parts, self.layout.blocks, strict=True)]

    def _columns(self, blocks: list[Tensor], home: Home, rank: int, number: int, lane: Lane, rows: Tensor) -> None:
        start, end = lane.shard.cols
        target = blocks[lane.block][:, start:end]
        positions = home.positions.get((rank, number))
        rows = rows.view(-1, end - start)
        if positions is None:
            target.copy_(rows)
        else:
            target[positions] = rows

    def _gather(self, blocks: list[Tensor], home: Home, rank: int, number: int, lane: Lane) -> Tensor:
        source = blocks[lane.block][:, slice(*lane.shard.cols)]
        positions = home.positions.get((rank, number))
        return (source if positions is None else source[positions]).reshape(-1)


def _turn(flat: Tensor, sizes: Sequence[Sequence[int]], width: int) -> tuple[Tensor, list[int]]:
    """Transposes pieces: ``sizes[i][j]`` is the size of the one at (i, j), laid i-major in ``flat``; returns j-major.

    Also the total size of each j.
    """
    ends = list(accumulate((n for row in sizes for n in row), initial=0))
    count = len(sizes)
    pieces = [flat[ends[i * width + j] : ends[i * width + j + 1]] for j in range(width) for i in range(count)]
    totals = [sum(row[j] for row in sizes) for j in range(width)]
    return (torch.cat(pieces) if pieces else flat[:0]), totals
