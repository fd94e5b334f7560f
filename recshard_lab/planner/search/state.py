"""Plans in the making, and what each table may become, as arrays.

Shape letters: R rows (P phases that ranks differ in, then M memories: the device's, and the host's if a shard may be
there), W ranks, O options, X extras, S switches.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from recshard_lab.planner.search.options import Placement
from recshard_lab.planner.workload import Array

Index = NDArray[np.intp]
TIE = 0.02  # weight of the balance term that ranks plans of equal step time


@dataclass(frozen=True, eq=False)
class Groups:
    """Listed assignments end to end, and the ways that use them.

    Attributes:
        ranks, starts, sizes: ranks of all assignments; where each begins, and its shards.
        nodes, node_starts, num_nodes: the same of the nodes that each assignment uses.
        of, way: ``[C]`` the option of each way, and its assignment.
    """

    ranks: Index
    starts: Index
    sizes: Array
    nodes: Index
    node_starts: Index
    num_nodes: Array
    of: Index
    way: Index

    @classmethod
    def of_lists(cls, lists: Sequence[Sequence[int]], nodes: Sequence[Sequence[int]]) -> "Groups":
        """Assignments as lists of ranks, and the nodes of each; no way uses them yet."""
        none = np.zeros(0, dtype=np.intp)
        return cls(*_end_to_end(lists), *_end_to_end(nodes), none, none)

    @classmethod
    def joined(cls, parts: "Sequence[Groups]") -> "Groups":
        """The assignments of several, one after the other."""
        if len(parts) == 1:
            return parts[0]
        ranks, nodes = (np.concatenate([getattr(part, name) for part in parts]) for name in ("ranks", "nodes"))
        sizes, num_nodes = (np.concatenate([getattr(part, name) for part in parts]) for name in ("sizes", "num_nodes"))
        starts, node_starts = (np.append(0, np.cumsum(each)[:-1]).astype(np.intp) for each in (sizes, num_nodes))
        return cls(ranks, starts, sizes, nodes, node_starts, num_nodes, parts[0].of, parts[0].way)

    def ranks_of(self, c: int) -> Index:
        """The ranks of way number `c`."""
        start = self.starts[self.way[c]]
        return self.ranks[start : start + int(self.sizes[self.way[c]])]


def _end_to_end(lists: Sequence[Sequence[int]]) -> tuple[Index, Index, Array]:
    sizes = np.array([len(each) for each in lists], dtype=float)
    flat = np.concatenate([np.asarray(each, dtype=np.intp) for each in lists])
    return flat, np.append(0, np.cumsum(sizes)[:-1]).astype(np.intp), sizes


@dataclass(frozen=True, eq=False)
class Choices:
    """The options of one table as arrays.

    Attributes:
        first: position of its first option in `Priced`.
        single: options of one shard that may go to any rank.
        spread, pieces: options of several shards that may go to any ranks, and how many shards each has.
        packed, packed_pieces: options whose shards go to one node, any one.
        wide, wide_pieces: options whose shards fill several nodes, any ones.
        nodes: listed assignments that fill their nodes; ranks: the other listed ones.
        usable: the ranks allowed, None for all.
    """

    first: int
    single: Index
    spread: Index
    pieces: Index
    packed: Index
    packed_pieces: Index
    wide: Index
    wide_pieces: Index
    nodes: Groups | None
    ranks: Groups | None
    usable: Index | None


@dataclass(frozen=True, eq=False)
class Put:
    """A placement as what it adds.

    Attributes:
        own: ``[R, n]`` to the ranks of its shards.
        node: the nodes to all of whose ranks it adds more, and ``[R, nodes]`` that; None where there are none.
        ms, nbytes ``[M]``, extra, flags: see `State` and `Priced`.
    """

    placement: Placement
    at: int
    ranks: Index
    own: Array
    node: tuple[Index, Array] | None
    distinct: bool
    ms: float
    nbytes: Array
    extra: Array
    flags: int


@dataclass(frozen=True, eq=False)
class Nodes:
    """The nodes of a plan, from which ways to place a table are scored.

    Attributes:
        peak: ``[R, N]`` the most that any rank has; total, squares: ``[P, N]`` sums over the ranks.
        order: ``[N, L]`` the ranks, least busy first; peaks, totals: ``[R, N, L]`` and ``[P, N, L]`` of the first
            ranks in that order.
    """

    peak: Array
    total: Array
    squares: Array
    order: Index
    peaks: Array
    totals: Array

    def replace(self, at: Index, nodes: "Nodes") -> None:
        """Overwrites nodes number `at`."""
        self.peak[:, at], self.total[:, at], self.squares[:, at] = nodes.peak, nodes.total, nodes.squares
        if len(self.order):
            self.order[at], self.peaks[:, at], self.totals[:, at] = nodes.order, nodes.peaks, nodes.totals


@dataclass(eq=False)
class State:
    """A plan in the making.

    Attributes:
        used: ``[R, W]`` what all placements add up to, without what all ranks share.
        nbytes, ms: that shared part; ``[M]`` bytes.
        extra: ``[X]`` shared ms that count only while a switch is on.
        on: ``[S]`` placements that turn each switch on.
        allowed: ``[all options]`` those that tables are placed under; None for any.
        floor: ``[P]`` what a phase may take before it costs anything.
        balance: weight of the term that rewards balance and little total work.
        nodes: as they were before the nodes `changed` changed; None: not known.
    """

    placed: list[Put | None]
    used: Array
    extra: Array
    on: Index
    nbytes: Array
    ms: float = 0.0
    allowed: NDArray[np.bool_] | None = None
    floor: Array | None = None
    balance: float = TIE
    nodes: Nodes | None = None
    changed: list[Index] = field(default_factory=list)

    def copy(self) -> "State":
        """The same plan, to be changed on its own."""
        used, extra, on, nbytes = self.used.copy(), self.extra.copy(), self.on.copy(), self.nbytes.copy()
        return State(list(self.placed), used, extra, on, nbytes, self.ms, balance=self.balance)

    def placements(self) -> list[Placement]:
        """The placements, every table placed."""
        return [put.placement for put in self.placed if put is not None]
