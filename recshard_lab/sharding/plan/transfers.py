"""From one tiling to another: which rectangles move from which shard to which.

Each target reads a replicated source from the nearest rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from recshard_lab.sharding.plan.tiling import Rect, intersect
from recshard_lab.sharding.plan.types import Shard


@dataclass(frozen=True)
class Transfer:
    """One rectangle that moves from a source shard to a target shard (positions in their lists)."""

    source: int
    target: int
    source_rank: int
    target_rank: int
    rect: Rect


def transfers(sources: Sequence[Shard], targets: Sequence[Shard]) -> list[Transfer]:
    """The rectangles to move, each target element exactly once. Sources on the target's rank are preferred.

    Raises:
        ValueError: the sources do not cover a target.

    >>> [t.rect for t in transfers([Shard(0, (0, 10), (0, 4))], [Shard(0, (0, 10), (0, 2)), Shard(1, (0, 10), (2, 4))])]
    [((0, 10), (0, 2)), ((0, 10), (2, 4))]
    """
    moves = []
    for number, target in enumerate(targets):
        nearest = sorted(
            range(len(sources)),
            key=lambda s: (sources[s].rank != target.rank, (sources[s].rank - target.rank) % (1 << 20)),
        )
        missing: list[Rect] = [(target.rows, target.cols)]
        for position in nearest:
            source = sources[position]
            rest: list[Rect] = []
            for rect in missing:
                shared = intersect(rect, (source.rows, source.cols))
                if shared is None:
                    rest.append(rect)
                    continue
                moves.append(Transfer(position, number, source.rank, target.rank, shared))
                rest.extend(_without(rect, shared))
            missing = rest
            if not missing:
                break
        if missing:
            raise ValueError(
                f"no source shard has rows {missing[0][0]}, columns {missing[0][1]}. Fix: run plan.validate on it"
            )
    return moves


def num_moved_elements(sources: Sequence[Shard], targets: Sequence[Shard]) -> int:
    """Elements that move from one rank to another.

    >>> num_moved_elements([Shard(0, (0, 10), (0, 4))], [Shard(0, (0, 10), (0, 2)), Shard(1, (0, 10), (2, 4))])
    20
    """
    return sum(
        (rows[1] - rows[0]) * (cols[1] - cols[0])
        for rows, cols in (t.rect for t in transfers(sources, targets) if t.source_rank != t.target_rank)
    )


def _without(rect: Rect, hole: Rect) -> list[Rect]:
    """``rect`` without ``hole``, which is inside it, as disjoint rectangles."""
    (r0, r1), (c0, c1) = rect
    (h0, h1), (k0, k1) = hole
    rects: list[Rect] = [
        ((r0, h0), (c0, c1)),
        ((h1, r1), (c0, c1)),
        ((h0, h1), (c0, k0)),
        ((h0, h1), (k1, c1)),
    ]
    return [(rows, cols) for rows, cols in rects if rows[0] < rows[1] and cols[0] < cols[1]]
