"""Moving a tiling to another one: intersect the rectangles, move the overlaps.

Spreading a module's weights over the ranks, gathering them again, loading under another plan and resharding a live
model are all this one thing. Where a source is replicated, each target takes the copy that lies nearest.

Shape letters: E rows, D columns, W ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from recshard_lab.comm import ShardingEnv, agreed, issue_all_to_all
from recshard_lab.sharding.plan.sharding_plan import Shard
from recshard_lab.sharding.plan.tiling import Rect
from recshard_lab.sharding.plan.transfers import Transfer as Transfer
from recshard_lab.sharding.plan.transfers import transfers as transfers

DEFAULT_ROUND_BYTES = 8 * 2**20  # larger ones leave the caches: 1.5 times slower on 4 ranks


@dataclass
class Move:
    """One tensor ``[E, D]`` under two tilings.

    Attributes:
        dtype: its number format, which every rank must know.
        sources: where it lies.
        targets: where it shall lie.
        held: source position -> its tensor, for those on this rank.
        wanted: target position -> the tensor to fill in place, for those on this rank.
    """

    dtype: torch.dtype
    sources: Sequence[Shard]
    targets: Sequence[Shard]
    held: Mapping[int, Tensor]
    wanted: Mapping[int, Tensor]


@dataclass(frozen=True)
class Moved:
    """What moving cost this rank: bytes sent to others, and bytes of the largest pair of messages it had in memory."""

    bytes_sent: int
    buffer_bytes: int


def move(
    moves: Sequence[Move], env: ShardingEnv, device: torch.device, round_bytes: int = DEFAULT_ROUND_BYTES
) -> Moved:
    """Fills every wanted tensor. All ranks must call it.

    Args:
        moves: the same on every rank, but for ``held`` and ``wanted``.
        env: the ranks.
        device: where the wanted tensors live; the held ones may wait elsewhere.
        round_bytes: no rank sends or receives more than this in one message (a single row excepted), so that the
            extra memory is at most twice as much.

    Raises:
        Exception: an error on one rank (out of memory, for example) is raised on all of them. Wanted tensors are then
            filled in part; held ones are as they were.
    """
    sent = buffers = 0
    for dtype, batch in _rounds(moves, env, round_bytes):
        if env.pg is None or all(transfer.source_rank == transfer.target_rank for _, transfer in batch):
            agreed(env, partial(_pieces, batch, env))
            continue
        ready = agreed(env, partial(_Exchange, dtype, batch, env, device))
        ready.exchange(env)
        agreed(env, ready.unpack)
        sent, buffers = sent + ready.message.nbytes, max(buffers, ready.message.nbytes + ready.received.nbytes)
        del ready  # the next messages must not meet these in memory
    return Moved(sent, buffers)


def _pieces(batch: Sequence[tuple[Move, Transfer]], env: ShardingEnv) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """What this rank sends to each rank, and what it receives from each. Copies at once what stays on this rank."""
    outgoing: list[list[Tensor]] = [[] for _ in range(env.world_size)]
    arriving: list[list[Tensor]] = [[] for _ in range(env.world_size)]
    for part, transfer in batch:
        source, target = transfer.source_rank, transfer.target_rank
        if env.rank not in (source, target):
            continue
        if source == env.rank:
            here = _view(part.held[transfer.source], part.sources[transfer.source], transfer.rect)
        if target == env.rank:
            there = _view(part.wanted[transfer.target], part.targets[transfer.target], transfer.rect)
        if source == target:
            there.copy_(here)
        elif source == env.rank:
            outgoing[target].append(here)
        else:
            arriving[source].append(there)
    return outgoing, arriving


class _Exchange:
    """One message to every rank and one from each, with the memory for both."""

    def __init__(
        self,
        dtype: torch.dtype,
        batch: Sequence[tuple[Move, Transfer]],
        env: ShardingEnv,
        device: torch.device,
    ) -> None:
        outgoing, self.arriving = _pieces(batch, env)
        self.sends, self.receives = (
            [sum(piece.numel() for piece in pieces) for pieces in each] for each in (outgoing, self.arriving)
        )
        self.message = torch.empty(sum(self.sends), dtype=dtype, device=device)
        self.received = torch.empty(sum(self.receives), dtype=dtype, device=device)
        for slot, piece in _slots(self.message, outgoing):
            slot.copy_(piece)

    def exchange(self, env: ShardingEnv) -> None:
        issue_all_to_all(self.message, self.sends, self.receives, env, "reshard", self.received).wait()

    def unpack(self) -> None:
        for slot, piece in _slots(self.received, self.arriving):
            piece.copy_(slot)


def _slots(message: Tensor, pieces: Sequence[Sequence[Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Each piece beside its place in the message, where they lie one after the other."""
    position = 0
    for piece in (piece for each in pieces for piece in each):
        yield message[position : position + piece.numel()].view(piece.shape), piece
        position += piece.numel()


def _rounds(
    moves: Sequence[Move], env: ShardingEnv, round_bytes: int
) -> Iterator[tuple[torch.dtype, list[tuple[Move, Transfer]]]]:
    """Batches of transfers, the same on every rank, in none of which a rank sends or receives too much."""
    batch: list[tuple[Move, Transfer]] = []
    sends, receives = [0] * env.world_size, [0] * env.world_size
    for dtype in dict.fromkeys(part.dtype for part in moves):
        for part in moves:
            if part.dtype != dtype:
                continue
            for whole in transfers(part.sources, part.targets):
                for transfer in _row_chunks(whole, max(1, round_bytes // dtype.itemsize)):
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
