"""Moves a tiling to another one: intersects the rectangles and moves the overlaps.

The same function scatters a module's weights over the ranks, gathers them, loads them under another plan and reshards
a running model. Each target reads a replicated source from the nearest rank.

Shape letters: E rows, D columns, W ranks.
"""

import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from recshard_lab.comm import ReplicaGrid, ShardingEnv, agreed, issue_all_to_all
from recshard_lab.sharding.plan.sharding_plan import Shard
from recshard_lab.sharding.plan.tiling import Rect
from recshard_lab.sharding.plan.transfers import Transfer as Transfer
from recshard_lab.sharding.plan.transfers import transfers as transfers

_K = TypeVar("_K")

DEFAULT_ROUND_BYTES = 8 * 2**20  # larger messages exceed the caches: 1.5x slower on 4 ranks


@dataclass(frozen=True)
class Tiles:
    """One matrix over all ranks. Several shards may have the same elements.

    Attributes:
        dtype: its dtype.
        shards: its shards on all ranks.
        tensors: position in ``shards`` -> tensor, for the shards on this rank.
    """

    dtype: torch.dtype
    shards: Sequence[Shard]
    tensors: Mapping[int, Tensor]

    def whole(self, size: tuple[int, int]) -> Tensor:
        """The matrix, a copy. All shards must be on this rank."""
        first = next(iter(self.tensors.values()), None)
        whole = torch.empty(size, dtype=self.dtype, device=None if first is None else first.device)
        for position, tensor in self.tensors.items():
            # replicas write equal values
            region(whole, self.shards[position]).copy_(tensor)
        return whole

    def primary(self, extent: str) -> "Tiles":
        """Shards that cover each element once, as in state dicts.

        Replicas are copies, and so are states with one number per row or table under column splits. The first shard
        in the list is the primary one.
        """
        primaries, tensors = [], {}
        for number, (position, shard) in enumerate(primary_rows(self.shards, extent)):
            primaries.append(shard)
            if position in self.tensors:
                own, tensor = self.shards[position], self.tensors[position]
                # it may have grown since the ranks agreed on its size
                tensors[number] = tensor if shard.rows == own.rows else _view(tensor, own, shard.rect)
        return Tiles(self.dtype, primaries, tensors)

    def replicas(self, extent: str) -> "list[Move]":
        """The move that copies each primary shard to its replicas. Empty without replicas."""
        primary = {position: shard.rows for position, shard in primary_rows(self.shards, extent)}
        copies = [position for position, shard in enumerate(self.shards) if primary.get(position) != shard.rows]
        if not copies:
            return []
        tensors = {number: self.tensors[position] for number, position in enumerate(copies) if position in self.tensors}
        return [Move(self.primary(extent), Tiles(self.dtype, [self.shards[position] for position in copies], tensors))]

    def over_all_ranks(self, grid: ReplicaGrid) -> "Tiles":
        """The shards of a sharding group in each replica, replica after replica."""
        shards = [replace(shard, rank=ranks[shard.rank]) for ranks in grid.sharding_groups for shard in self.shards]
        # this rank's tensors are those of its own replica
        first = grid.group * len(self.shards)
        return Tiles(self.dtype, shards, {first + position: tensor for position, tensor in self.tensors.items()})

    def view(self, position: int, rect: Rect) -> Tensor:
        """A rectangle of the whole matrix in the tensor of a shard on this rank."""
        return _view(self.tensors[position], self.shards[position], rect)


class Move(NamedTuple):
    """One matrix ``[E, D]`` under two tilings with the same dtype.

    Attributes:
        source: the current shards.
        target: the new shards, whose tensors are filled in place.
    """

    source: Tiles
    target: Tiles


def region(whole: Tensor, shard: Shard) -> Tensor:
    """The elements of a shard in a whole matrix."""
    return whole[slice(*shard.rows), slice(*shard.cols)]


def primary_rows(shards: Sequence[Shard], extent: str = "row") -> list[tuple[int, Shard]]:
    """The primary copies of a tiling with copies: (position, its primary rows), each element exactly once.

    For extents "row" and "table", the first shard in the list that contains a row; for "element", the first of equal
    shards.

    >>> primary_rows([Shard(1, (0, 4), (0, 1)), Shard(0, (0, 2), (0, 1)), Shard(0, (2, 6), (0, 1))])
    [(0, Shard(rank=1, rows=(0, 4), cols=(0, 1))), (2, Shard(rank=0, rows=(4, 6), cols=(0, 1)))]
    """
    if extent == "element":
        # reversed: of equal rectangles the first one stays
        distinct = {shard.rect: number for number, shard in reversed(list(enumerate(shards)))}
        return [(number, shards[number]) for number in sorted(distinct.values())]
    primaries: list[tuple[int, Shard]] = []
    for start, end in pairwise(sorted({edge for shard in shards for edge in shard.rows})):
        position = next((n for n, shard in enumerate(shards) if shard.rows[0] <= start and end <= shard.rows[1]), None)
        if position is None:
            continue
        # edges of other shards do not cut a primary one
        if primaries and primaries[-1][0] == position and primaries[-1][1].rows[1] == start:
            start = primaries.pop()[1].rows[0]
        primaries.append((position, replace(shards[position], rows=(start, end))))
    return primaries


@dataclass(frozen=True)
class Moved:
    """Cost of a move on this rank: bytes sent to others, and bytes of the largest pair of messages in memory."""

    bytes_sent: int
    buffer_bytes: int


@torch.no_grad()
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
            # no message: `_views` copies local transfers
            agreed(env, partial(_views, batch, env))
            continue
        ready = agreed(env, partial(_Exchange, dtype, batch, env, device))
        # every rank has its memory: no rank waits for one that ran out
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
            source_view = part.source.view(transfer.source, transfer.rect)
        if target == env.rank:
            target_view = part.target.view(transfer.target, transfer.rect)
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
    # a message has one dtype; not a set, as all ranks need the same order
    for dtype in dict.fromkeys(part.source.dtype for part in moves):
        for part in (part for part in moves if part.source.dtype == dtype):
            for overlap in transfers(part.source.shards, part.target.shards):
                for transfer in _row_chunks(overlap, max(1, round_bytes // dtype.itemsize)):
                    source, target = transfer.source_rank, transfer.target_rank
                    (r0, r1), (c0, c1) = transfer.rect
                    # local copies take no part of a message
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
        yield replace(transfer, rect=((start, min(start + step, r1)), cols))


def _view(tensor: Tensor, shard: Shard, rect: Rect) -> Tensor:
    (r0, r1), (c0, c1) = rect
    top, left = shard.rows[0], shard.cols[0]
    return tensor[r0 - top : r1 - top, c0 - left : c1 - left]


def in_file(
    shapes: Mapping[_K, tuple[tuple[int, ...], torch.dtype]], folder: str | Path | None, name: str
) -> dict[_K, Tensor]:
    """Memory for tensors in an unnamed file, which is deleted with the last of them.

    Args:
        shapes: key -> shape and dtype.
        folder: folder of the file. Default: the system's folder for temporary files.
        name: of the file while it is created.

    Raises:
        OSError: the disk is full, or the folder does not exist.
    """
    sizes = {key: prod(shape) * dtype.itemsize for key, (shape, dtype) in shapes.items()}
    total, used = sum(sizes.values()), 0
    found = {key: torch.empty(shape, dtype=dtype) for key, (shape, dtype) in shapes.items() if not sizes[key]}
    if not total:
        return found
    with tempfile.TemporaryFile(dir=folder, prefix=f"recshard-{name}-") as file:
        file.truncate(total)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, total)  # a full disk raises here; a later write would kill the process
        mapped = mmap.mmap(file.fileno(), total)
    for key, (shape, dtype) in sorted(shapes.items(), key=lambda entry: -entry[1][1].itemsize):  # aligned
        if sizes[key]:
            found[key] = torch.frombuffer(mapped, dtype=dtype, count=prod(shape), offset=used).view(shape)
            used += sizes[key]
    return found


# Changes the number of replicas over the same ranks: R sharding groups become more, fewer, or one.
#
# A move spans all ranks: every old replica is a source, every new one a target. Each target reads the nearest copy,
# preferably on its own rank. ::
#
#     2 replicas on 2 ranks, row-wise          1 replica on 4 ranks, row-wise
#     rank 0 and 1: rows 0-50                  rank 0: rows 0-25     nothing is sent
#     rank 2 and 3: rows 50-100                rank 1: rows 25-50    nothing is sent
#                                              ...


class Regrouping(NamedTuple):
    """Two layouts of the same ranks. All replicas of the first are equal.

    Attributes:
        before: the current layout.
        after: the new layout.
    """

    before: ReplicaGrid
    after: ReplicaGrid

    def over_all_ranks(self, move: Move) -> Move:
        """A move from an old sharding group to a new one, extended to all ranks."""
        return Move(move.source.over_all_ranks(self.before), move.target.over_all_ranks(self.after))
