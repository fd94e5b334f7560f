"""Plans in the making, as arrays.

Shape letters: R rows (P phases that ranks differ in, then M memories: the device's, and the host's if a shard may be
there), W ranks, O options, X extras, S switches.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from recshard_lab.planner.search.options import Placement
from recshard_lab.planner.workload import Array

Index = NDArray[np.intp]
TIE = 0.02  # weight of the balance term that ranks plans of equal step time


@dataclass(frozen=True, eq=False)
class Put:
    """A placement as what it adds.

    Attributes:
        own: ``[R, n]`` to the ranks of its shards.
        node: the nodes to all of whose ranks it adds more, and ``[R, nodes]`` that; None where there are none.
        ms, nbytes ``[M]``, extra, flags: see `State` and `Priced`.
        alike: all shards add the same, and each node has as many as the option's loads say.
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
    alike: bool


@dataclass(frozen=True, eq=False)
class Nodes:
    """The nodes of a plan, from which candidates are scored.

    Attributes:
        whole: ``[R + P, N]`` the most that any rank has, and the sums of its phases; squares: ``[P, N]`` sums.
        order: ``[N, L]`` the ranks, least busy first; first: ``[R + P, L, N]`` as `whole`, of the first ranks.
    """

    whole: Array
    squares: Array
    order: Index
    first: Array

    def replace(self, at: Index, nodes: "Nodes") -> None:
        """Overwrites nodes number `at`."""
        self.whole[:, at], self.squares[:, at] = nodes.whole, nodes.squares
        if len(self.order):
            self.order[at], self.first[:, :, at] = nodes.order, nodes.first


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
