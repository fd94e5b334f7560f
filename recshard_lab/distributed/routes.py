"""How looked-up rows come home, and how their gradients go back.

``direct``: one all-to-all of partial rows, added where they arrive. It moves the bytes that a reduce-scatter would, and
on Gloo it is several times faster. Both classes here take that route, for pooled rows and for rows that stay apart.

::

    forward     owner k: rows of every source  --all-to-all-->  home: [B, D_k] from each k, pieces copied or added
    backward    home: pieces of the gradient   --all-to-all-->  owner k: gradient of the rows it had sent

Replicated lanes send nothing forward; backward, their gradient goes to *every* rank, so that all replicas take the same
step.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from recshard_lab.comm import ShardingEnv, all_to_all
from recshard_lab.distributed.input_dist import Home, Routed
from recshard_lab.distributed.layout import Lane, Layout


class _Route:
    """What both kinds share: the wiring, and the size of the buffers that the last message needed."""

    def __init__(self, layout: Layout, env: ShardingEnv) -> None:
        self.layout, self.env = layout, env
        self.buffer_bytes = 0

    def _exchange(self, message: Tensor, sends: Sequence[int], receives: Sequence[int], label: str) -> Tensor:
        received = all_to_all(message, sends, receives, self.env, label)
        self.buffer_bytes = (message.numel() + received.numel()) * message.element_size()
        return received


class PooledRoute(_Route):
    """Pooled rows: every rank sends ``[B, D_k]`` to every home."""

    def __init__(self, layout: Layout, env: ShardingEnv) -> None:
        super().__init__(layout, env)
        self.widths = layout.exchanged_width
        self.pieces, self.zero_first = layout.pieces

    def forward(self, exchanged: list[Tensor], replicated: list[Tensor], routed: Routed) -> Tensor:
        """Kernel outputs -> ``[B, output width]`` on this rank."""
        batch = routed.home.batch_size
        total = sum(routed.segments)
        example = (exchanged or replicated or [routed.ids.new_empty(0, dtype=torch.float32)])[0]
        rows = torch.cat(exchanged, 1) if len(exchanged) > 1 else (exchanged or [example.new_empty(total, 0)])[0]
        received = self._send_home(rows, batch, routed)
        make = torch.zeros if self.zero_first else torch.empty
        out = make(batch, self.layout.output_width, dtype=example.dtype, device=example.device)
        for piece in self.pieces:
            target = out[:, piece.target : piece.target + piece.width]
            source = received[piece.rank][:, piece.source : piece.source + piece.width]
            target.add_(source) if piece.add else target.copy_(source)
        if replicated:
            local = torch.cat(replicated, 1) if len(replicated) > 1 else replicated[0]
            for piece in self.layout.replicated_pieces:
                source = local[:, piece.source : piece.source + piece.width]
                out[:, piece.target : piece.target + piece.width] = source
        self._divide_means(out, routed.home)
        return out

    def _send_home(self, rows: Tensor, batch: int, routed: Routed) -> list[Tensor]:
        """``[B, D_k]`` from each rank k; nothing is sent when every table is replicated."""
        sizes = [batch * other for other in self.widths]
        flat, self.buffer_bytes = rows.new_empty(0), 0
        if any(self.widths):
            sends = [segments * rows.shape[1] for segments in routed.segments]
            flat = self._exchange(rows.reshape(-1), sends, sizes, "output_dist/rows")
        return [part.view(batch, other) for part, other in zip(flat.split(sizes), self.widths, strict=True)]

    def backward(self, grad: Tensor, routed: Routed) -> Tensor:
        """``[B, output width]`` -> ``[sum of B, own exchanged width + replicated width]`` from every rank."""
        batch, copies = routed.home.batch_size, self.layout.replicated_width
        if self.layout.mean_blocks:
            grad = grad.clone()
            self._divide_means(grad, routed.home)
        sends = [grad.new_empty(batch, width + copies) for width in self.widths]
        for piece in self.pieces:
            source = grad[:, piece.target : piece.target + piece.width]
            sends[piece.rank][:, piece.source : piece.source + piece.width] = source
        for rank, width in enumerate(self.widths):
            for piece in self.layout.replicated_pieces:
                source = grad[:, piece.target : piece.target + piece.width]
                sends[rank][:, width + piece.source : width + piece.source + piece.width] = source
        own = self.widths[self.env.rank] + copies
        flat = self._exchange(
            torch.cat([send.view(-1) for send in sends]),
            [send.numel() for send in sends],
            [segments * own for segments in routed.segments],
            "output_dist_backward/rows",
        )
        return flat.view(sum(routed.segments), own)

    def _divide_means(self, rows: Tensor, home: Home) -> None:
        for index in self.layout.mean_blocks:
            block = self.layout.blocks[index]
            divisor = home.lengths[index].clamp(min=1).to(rows.dtype).unsqueeze(1)
            rows[:, block.start : block.start + block.dim].div_(divisor)


class SequenceRoute(_Route):
    """Rows that stay apart: every id's row travels to the place in the batch where the id stood.

    The output is flat: for each block its ``[n, D]`` rows, one block after the other.
    """

    def __init__(self, layout: Layout, env: ShardingEnv) -> None:
        super().__init__(layout, env)
        self.lanes = layout.exchanged_lanes

    def forward(self, exchanged: list[Tensor], replicated: list[Tensor], routed: Routed) -> Tensor:
        """Kernel outputs -> flat rows of the local batch."""
        home, mine = routed.home, self.lanes[self.env.rank]
        example = (exchanged or replicated or [routed.ids.new_empty(0, dtype=torch.float32)])[0]
        lane_major = torch.cat(exchanged) if exchanged else example.new_empty(0)
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

    def backward(self, grad: Tensor, routed: Routed) -> Tensor:
        """Flat gradient of the local batch -> flat, lane-major, for all of this rank's lanes."""
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
        return _turn(flat, by_source, len(lanes))[0]

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
