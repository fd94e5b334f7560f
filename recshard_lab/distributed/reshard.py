"""Moving a tiling to another one: intersect the rectangles, move the overlaps.

Spreading a module's weights over the ranks, gathering them again, loading under another plan and resharding a live
model are all this one thing. Where a source is replicated, each target takes the copy that lies nearest.

Shape letters: E rows, D columns, W ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recshard_lab.comm import ShardingEnv, all_to_all
from recshard_lab.sharding.plan import Shard
from recshard_lab.sharding.tiling import Rect, intersect

DEFAULT_ROUND_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Transfer:
    """One rectangle on its way from a source shard to a target shard (positions in their lists)."""

    source: int
    target: int
    source_rank: int
    target_rank: int
    rect: Rect


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


def transfers(sources: Sequence[Shard], targets: Sequence[Shard]) -> list[Transfer]:
    """The rectangles to move, each target cell exactly once; a target's own rank serves first.

    Raises:
        ValueError: the sources do not cover a target.

    >>> [t.rect for t in transfers([Shard(0, (0, 10), (0, 4))], [Shard(0, (0, 10), (0, 2)), Shard(1, (0, 10), (2, 4))])]
    [((0, 10), (0, 2)), ((0, 10), (2, 4))]
    """
    found = []
    for number, target in enumerate(targets):
        nearest = sorted(
            range(len(sources)),
            key=lambda s: (sources[s].rank != target.rank, (sources[s].rank - target.rank) % (1 << 20)),
        )
        open_rects: list[Rect] = [(target.rows, target.cols)]
        for position in nearest:
            source = sources[position]
            rest: list[Rect] = []
            for rect in open_rects:
                shared = intersect(rect, (source.rows, source.cols))
                if shared is None:
                    rest.append(rect)
                    continue
                found.append(Transfer(position, number, source.rank, target.rank, shared))
                rest.extend(_without(rect, shared))
            open_rects = rest
            if not open_rects:
                break
        if open_rects:
            raise ValueError(f"no source holds rows {open_rects[0][0]}, columns {open_rects[0][1]}")
    return found


def move(moves: Sequence[Move], env: ShardingEnv, device: torch.device, round_bytes: int = DEFAULT_ROUND_BYTES) -> int:
    """Fills every wanted tensor; returns the bytes that this rank sent to others.

    Args:
        moves: the same on every rank, but for ``held`` and ``wanted``.
        env: the ranks.
        device: where all these tensors live.
        round_bytes: extra memory: no rank sends more than this in one message (a single row excepted).
    """
    sent = 0
    for dtype, batch in _rounds(moves, env, round_bytes):
        outgoing: list[list[Tensor]] = [[] for _ in range(env.world_size)]
        arriving: list[list[tuple[Tensor, int]]] = [[] for _ in range(env.world_size)]
        for part, transfer in batch:
            if transfer.source_rank == transfer.target_rank == env.rank:
                _view(part.wanted[transfer.target], part.targets[transfer.target], transfer.rect).copy_(
                    _view(part.held[transfer.source], part.sources[transfer.source], transfer.rect)
                )
            elif transfer.source_rank == env.rank:
                piece = _view(part.held[transfer.source], part.sources[transfer.source], transfer.rect)
                outgoing[transfer.target_rank].append(piece.reshape(-1))
            elif transfer.target_rank == env.rank:
                view = _view(part.wanted[transfer.target], part.targets[transfer.target], transfer.rect)
                arriving[transfer.source_rank].append((view, view.numel()))
        pieces = [piece for each in outgoing for piece in each]
        if env.pg is None:
            continue
        message = torch.cat(pieces) if pieces else torch.empty(0, dtype=dtype, device=device)
        sizes = [sum(piece.numel() for piece in each) for each in outgoing]
        received = all_to_all(message, sizes, [sum(n for _, n in each) for each in arriving], env, "reshard")
        sent += message.numel() * message.element_size()
        position = 0
        for each in arriving:
            for view, count in each:
                view.copy_(received[position : position + count].view(view.shape))
                position += count
    return sent


def _rounds(
    moves: Sequence[Move], env: ShardingEnv, round_bytes: int
) -> Iterator[tuple[torch.dtype, list[tuple[Move, Transfer]]]]:
    """Batches of transfers, the same on every rank, none of which makes a rank send more than ``round_bytes``."""
    width = 8  # the widest element, so that ranks agree without knowing each other's dtypes
    batch: list[tuple[Move, Transfer]] = []
    load = [0] * env.world_size
    current: torch.dtype | None = None
    for part in moves:
        for whole in transfers(part.sources, part.targets):
            for transfer in _row_chunks(whole, max(1, round_bytes // width)):
                (r0, r1), (c0, c1) = transfer.rect
                size = 0 if transfer.source_rank == transfer.target_rank else (r1 - r0) * (c1 - c0) * width
                if batch and (part.dtype != current or load[transfer.source_rank] + size > round_bytes):
                    assert current is not None
                    yield current, batch
                    batch, load = [], [0] * env.world_size
                current = part.dtype
                batch.append((part, transfer))
                load[transfer.source_rank] += size
    if batch:
        assert current is not None
        yield current, batch


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


def _without(rect: Rect, hole: Rect) -> list[Rect]:
    """What is left of ``rect`` without ``hole``, which lies inside it."""
    (r0, r1), (c0, c1) = rect
    (h0, h1), (k0, k1) = hole
    parts: list[Rect] = [
        ((r0, h0), (c0, c1)),
        ((h1, r1), (c0, c1)),
        ((h0, h1), (c0, k0)),
        ((h0, h1), (k1, c1)),
    ]
    return [part for part in parts if part[0][0] < part[0][1] and part[1][0] < part[1][1]]
