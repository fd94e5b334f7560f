"""Between which ranks a byte goes: the cells of a traffic picture, with nodes and sharding groups.

::

    up to 32 ranks      a cell a pair of ranks; frames around the ranks of a node (or of a sharding group)
    more, on nodes      a cell a pair of nodes, its diagonal what stays inside one
    more                neighbouring ranks added up
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MOST_CELLS = 32  # cells a side; beyond, neighbours are added up


@dataclass(frozen=True, eq=False)
class Links:
    """How W ranks are laid out as cells.

    Attributes:
        order: ``[W]`` the ranks as they stand, sharding groups side by side.
        starts: where each of C cells begins in `order`.
        names: ``[C]`` of the cells.
        unit: what a cell is: "rank", "node", "group" or "ranks".
        across: ``[C, C]`` whether a link goes between nodes; False on the diagonal.
        frames: (first cell, end, name) of what is framed.
        nodes: ``[W]`` the node of each rank.
    """

    order: np.ndarray
    starts: np.ndarray
    names: list[str]
    unit: str
    across: np.ndarray
    frames: list[tuple[int, int, str]]
    nodes: np.ndarray

    def cells(self, matrix: np.ndarray) -> np.ndarray:
        """``[W, W]`` -> ``[C, C]``, added up."""
        laid = matrix[np.ix_(self.order, self.order)]
        return np.asarray(np.add.reduceat(np.add.reduceat(laid, self.starts, axis=0), self.starts, axis=1))

    def split(self, matrix: np.ndarray) -> tuple[float, float]:
        """Bytes inside nodes, and between them, of a matrix ``[W, W]``."""
        near = self.nodes[:, None] == self.nodes[None, :]
        return float(matrix[near].sum()), float(matrix[~near].sum())


def links_of(ranks: int, local: int | None, groups: Sequence[Sequence[int]] | None = None) -> Links:
    """Lays ranks out.

    Args:
        ranks: W.
        local: ranks a node, in order; all when None.
        groups: the sharding groups of replicas (2D parallel), which have every rank once between them.

    Raises:
        ValueError: `local` does not divide W; groups that are none.

    >>> links_of(4, 2).frames, links_of(64, 8).unit
    ([(0, 2, 'node 0'), (2, 4, 'node 1')], 'node')
    """
    local = local or ranks
    if ranks % local:
        raise ValueError(f"{ranks} ranks do not fill nodes of {local}: give a topology of as many ranks")
    nodes = np.arange(ranks) // local
    if groups is not None:
        if sorted(rank for group in groups for rank in group) != list(range(ranks)):
            raise ValueError(f"groups must have each of {ranks} ranks once, got {[list(group) for group in groups]}")
        order = np.array([rank for group in groups for rank in group])
        ends = np.cumsum([len(group) for group in groups])
        kind, sets = "group", [(int(end) - len(group), int(end)) for end, group in zip(ends, groups, strict=True)]
    else:
        order, kind = np.arange(ranks), "node"
        sets = [(first, first + local) for first in range(0, ranks, local)]
    several = len(sets) > 1
    if ranks > MOST_CELLS and several and len(sets) <= MOST_CELLS:
        starts, unit = np.array([first for first, _ in sets]), kind
        names, frames = [f"{kind} {i}" for i in range(len(sets))], []
    else:
        each = -(-ranks // MOST_CELLS)
        starts, unit = np.arange(0, ranks, each), "rank" if each == 1 else "ranks"
        names = [f"rank {order[first]}" for first in starts]
        frames = [(-(-a // each), -(-b // each), f"{kind} {i}") for i, (a, b) in enumerate(sets)] if several else []
        frames = [frame for frame in frames if frame[1] - frame[0] >= 1] if len(sets) <= MOST_CELLS else []
    ends = np.append(starts[1:], ranks)
    low, high = (
        np.array([pick(nodes[order[a:b]]) for a, b in zip(starts, ends, strict=True)]) for pick in (np.min, np.max)
    )
    across = (low[:, None] > high[None, :]) | (high[:, None] < low[None, :])
    return Links(order, starts, names, unit, across, frames, nodes)
