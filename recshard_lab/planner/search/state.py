"""Plans in the making, and what each table may become, as arrays.

Shape letters: R rows (phases that ranks differ in, and memory), W ranks, O options, X extras, S switches.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from recshard_lab.planner.search.options import Placement
from recshard_lab.planner.workload import Array

Index = NDArray[np.intp]
TIE = 0.02  # weight of the balance term that tells plans of equal step time apart


@dataclass(frozen=True, eq=False)
class Groups:
    """Listed assignments of any options, end to end: `ranks` of all, `starts` and `sizes` of each."""

    ranks: Index
    starts: Index
    sizes: Array


@dataclass(frozen=True, eq=False)
class Choices:
    """The options of one table as arrays.

    Attributes:
        first: position of its first option in `Priced`.
        single: options of one piece that may go anywhere; many: of several.
        pieces: ``[len(many)]`` how many; hops: positions of those that come home in two hops.
        groups, listed_of: listed assignments, and the option of each.
        usable: the ranks allowed, None for all.
    """

    first: int
    single: Index
    many: Index
    pieces: Index
    hops: Index
    groups: Groups | None
    listed_of: Index
    usable: Index | None


@dataclass(frozen=True, eq=False)
class Put:
    """A placement as what it adds: `own` ``[R, n]`` to its ranks, `node` ``[R, W]`` or None to whole nodes."""

    placement: Placement
    at: int
    ranks: Index
    own: Array
    node: Array | None
    distinct: bool
    ms: float
    nbytes: float
    extra: Array
    flags: int


@dataclass(eq=False)
class State:
    """A plan in the making.

    Attributes:
        used: ``[R, W]`` what all placements add up to, without what all ranks share.
        ms, nbytes: that shared part.
        extra: ``[X]`` shared ms that count only while a switch is on.
        on: ``[S]`` placements that turn each switch on.
        allowed: ``[all options]`` those that tables are placed under; None for any.
        floor: ``[R - 1]`` what a phase may take before it costs anything.
        balance: weight of the term that rewards balance and little total work.
    """

    placed: list[Put | None]
    used: Array
    extra: Array
    on: Index
    ms: float = 0.0
    nbytes: float = 0.0
    allowed: NDArray[np.bool_] | None = None
    floor: Array | None = None
    balance: float = TIE
    name: str = field(default="")

    def copy(self) -> "State":
        """The same plan, to be changed on its own."""
        state = State(list(self.placed), self.used.copy(), self.extra.copy(), self.on.copy(), self.ms, self.nbytes)
        state.balance, state.name = self.balance, self.name
        return state

    def placements(self) -> list[Placement]:
        """The placements, every table placed."""
        return [put.placement for put in self.placed if put is not None]
