"""From one tiling to another: which rectangles travel, from which shard to which.

Where a source is replicated, each target takes the copy that lies nearest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from recshard_lab.sharding.plan.tiling import Rect, intersect
from recshard_lab.sharding.plan.types import Shard


@dataclass(frozen=True)
class Transfer:
    """One rectangle on its way from a source shard to a target shard (positions in their lists)."""

    source: int
    target: int
    source_rank: int
    target_rank: int
    rect: Rect


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


def num_moved_elements(sources: Sequence[Shard], targets: Sequence[Shard]) -> int:
    """Cells that go from one rank to another; what its own rank holds already does not.

    >>> num_moved_elements([Shard(0, (0, 10), (0, 4))], [Shard(0, (0, 10), (0, 2)), Shard(1, (0, 10), (2, 4))])
    20
    """
    return sum(
        (rows[1] - rows[0]) * (cols[1] - cols[0])
        for rows, cols in (t.rect for t in transfers(sources, targets) if t.source_rank != t.target_rank)
    )


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
