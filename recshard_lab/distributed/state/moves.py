"""Moves a tiling to another one: intersects the rectangles and moves the overlaps.

The same function scatters a module's weights over the ranks, gathers them, loads them under another plan and reshards
a running model. Each target reads a replicated source from the nearest rank.

Shape letters: E rows, D columns, W ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from recshard_lab.comm import ReplicaGrid, ShardingEnv, agreed, issue_all_to_all
from recshard_lab.sharding.plan.sharding_plan import Shard
from recshard_lab.sharding.plan.tiling import Rect
from recshard_lab.sharding.plan.transfers import Transfer as Transfer
from recshard_lab.sharding.plan.transfers import transfers as transfers

DEFAULT_ROUND_BYTES = 8 * 2**20  # larger messages exceed the caches: 1.5x slower on 4 ranks


@dataclass
class Move:
    """One tensor ``[E, D]`` under two tilings.

    Attributes:
        dtype: its dtype, the same on every rank.
        sources: the current shards.
        targets: the new shards.
        source_tensors: position in ``sources`` -> tensor, for the shards on this rank.
        target_tensors: position in ``targets`` -> tensor to fill in place, for the shards on this rank.
    """

    dtype: torch.dtype
    sources: Sequence[Shard]
    targets: Sequence[Shard]
    source_tensors: Mapping[int, Tensor]
    target_tensors: Mapping[int, Tensor]


@dataclass(frozen=True)
class Moved:
    """Cost of a move on this rank: bytes sent to others, and bytes of the largest pair of messages in memory."""

    bytes_sent: int
    buffer_bytes: int


def move(
    moves: Sequence[Move], env: ShardingEnv, device: torch.device, round_bytes: int = DEFAULT_ROUND_BYTES
) -> Moved:
    """Fills every target tensor. Collective.

    Args:
        moves: the same on every rank, except for the tensors.
        env: the ranks.
        device: device of the target tensors; source tensors may be on another.
        round_bytes: maximum bytes that a rank sends or receives in one message (except for a single row). The extra
            memory is at most twice this.

    Raises:
        Exception: an error on one rank, such as out of memory, is raised on all ranks. Some target tensors are then
            filled; source tensors are unchanged.
    """
    sent = buffers = 0
    for dtype, batch in _rounds(moves, env, round_bytes):
        if env.pg is None or all(transfer.source_rank == transfer.target_rank for _, transfer in batch):
            agreed(env, partial(_views, batch, env))
            continue
        ready = agreed(env, partial(_Exchange, dtype, batch, env, device))
        ready.exchange(env)
        agreed(env, ready.unpack)
        sent, buffers = sent + ready.message.nbytes, max(buffers, ready.message.nbytes + ready.received.nbytes)
        del ready  # frees its memory before the next messages are allocated
    return Moved(sent, buffers)


def _views(batch: Sequence[tuple[Move, Transfer]], env: ShardingEnv) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """Views that this rank sends to each rank and receives from each. Copies local transfers."""
    outgoing: list[list[Tensor]] = [[] for _ in range(env.world_size)]
    incoming: list[list[Tensor]] = [[] for _ in range(env.world_size)]
    for part, transfer in batch:
        source, target = transfer.source_rank, transfer.target_rank
        if env.rank not in (source, target):
            continue
        if source == env.rank:
            source_view = _view(part.source_tensors[transfer.source], part.sources[transfer.source], transfer.rect)
        if target == env.rank:
            target_view = _view(part.target_tensors[transfer.target], part.targets[transfer.target], transfer.rect)
        if source == target:
            target_view.copy_(source_view)
        elif source == env.rank:
            outgoing[target].append(source_view)
        else:
            incoming[source].append(target_view)
    return outgoing, incoming


class _Exchange:
    """A message to each rank and a message from each, with the memory for both."""

    def __init__(
        self,
        dtype: torch.dtype,
        batch: Sequence[tuple[Move, Transfer]],
        env: ShardingEnv,
        device: torch.device,
    ) -> None:
        outgoing, self.incoming = _views(batch, env)
        self.sends, self.receives = (
            [sum(view.numel() for view in views) for views in by_rank] for by_rank in (outgoing, self.incoming)
        )
        self.message = torch.empty(sum(self.sends), dtype=dtype, device=device)
        self.received = torch.empty(sum(self.receives), dtype=dtype, device=device)
        for slot, view in _slots(self.message, outgoing):
            slot.copy_(view)

    def exchange(self, env: ShardingEnv) -> None:
        issue_all_to_all(self.message, self.sends, self.receives, env, "reshard", self.received).wait()

    def unpack(self) -> None:
        for slot, view in _slots(self.received, self.incoming):
            view.copy_(slot)


def _slots(message: Tensor, by_rank: Sequence[Sequence[Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """(slice of the message, view) for each view; slices are consecutive."""
    position = 0
    for view in (view for views in by_rank for view in views):
        yield message[position : position + view.numel()].view(view.shape), view
        position += view.numel()


def _rounds(
    moves: Sequence[Move], env: ShardingEnv, round_bytes: int
) -> Iterator[tuple[torch.dtype, list[tuple[Move, Transfer]]]]:
    """Batches of transfers, the same on every rank. No rank sends or receives more than ``round_bytes`` per batch."""
    batch: list[tuple[Move, Transfer]] = []
    sends, receives = [0] * env.world_size, [0] * env.world_size
    for dtype in dict.fromkeys(part.dtype for part in moves):
        for part in moves:
            if part.dtype != dtype:
                continue
            for overlap in transfers(part.sources, part.targets):
                for transfer in _row_chunks(overlap, max(1, round_bytes // dtype.itemsize)):
                    source, target = transfer.source_rank, transfer.target_rank
                    (r0, r1), (c0, c1) = transfer.rect
                    size = 0 if source == target else (r1 - r0) * (c1 - c0) * dtype.itemsize
                    if batch and max(sends[source], receives[target]) + size > round_bytes:
                        yield dtype, batch
                        batch, sends, receives = [], [0] * env.world_size, [0] * env.world_size
                    batch.append((part, transfer))
                    sends[source] += size
                    receives[target] += size
        if batch:
            yield dtype, batch
            batch, sends, receives = [], [0] * env.world_size, [0] * env.world_size


def _row_chunks(transfer: Transfer, elements: int) -> Iterator[Transfer]:
    (r0, r1), cols = transfer.rect
    step = max(1, elements // (cols[1] - cols[0]))
    for start in range(r0, r1, step):
        rect = ((start, min(start + step, r1)), cols)
        yield Transfer(transfer.source, transfer.target, transfer.source_rank, transfer.target_rank, rect)


def _view(tensor: Tensor, shard: Shard, rect: Rect) -> Tensor:
    (r0, r1), (c0, c1) = rect
    top, left = shard.rows[0], shard.cols[0]
    return tensor[r0 - top : r1 - top, c0 - left : c1 - left]


# Changes the number of replicas over the same ranks: R sharding groups become more, fewer, or one.
#
# A move spans all ranks: every old replica is a source, every new one a target. Each target reads the nearest copy,
# preferably on its own rank. ::
#
#     2 replicas on 2 ranks, row-wise          1 replica on 4 ranks, row-wise
#     rank 0 and 1: rows 0-50                  rank 0: rows 0-25     nothing is sent
#     rank 2 and 3: rows 50-100                rank 1: rows 25-50    nothing is sent
#                                              ...


@dataclass(frozen=True)
class Regrouping:
    """Two layouts of the same ranks. All replicas of the first are equal.

    Args:
        before: the current layout.
        after: the new layout.
    """

    before: ReplicaGrid
    after: ReplicaGrid

    def over_all_ranks(self, move: Move) -> Move:
        """A move from an old sharding group to a new one, extended to all ranks."""
        return Move(
            move.dtype,
            _everywhere(move.sources, self.before),
            _everywhere(move.targets, self.after),
            _local(move.source_tensors, len(move.sources), self.before),
            _local(move.target_tensors, len(move.targets), self.after),
        )


def by_rank(amounts: Sequence[int], grid: ReplicaGrid) -> list[int]:
    """Amounts per position in a sharding group as amounts per rank."""
    totals = [0] * grid.world.world_size
    for group in grid.sharding_groups:
        for rank, amount in zip(group, amounts, strict=True):
            totals[rank] = amount
    return totals


def _everywhere(shards: Sequence[Shard], grid: ReplicaGrid) -> list[Shard]:
    """A group's shards in each replica, replica after replica."""
    return [
        Shard(ranks[shard.rank], shard.rows, shard.cols, shard.tier)
        for ranks in grid.sharding_groups
        for shard in shards
    ]


def _local(tensors: Mapping[int, Tensor], count: int, grid: ReplicaGrid) -> dict[int, Tensor]:
    """This rank's tensors, with the positions of `_everywhere`."""
    return {grid.group * count + position: tensor for position, tensor in tensors.items()}
