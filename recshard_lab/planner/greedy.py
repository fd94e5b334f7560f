"""Greedy planning: choose scheme and ranks of every table together, then improve one and two tables at a time.

1. Every registered scheme that the constraints allow proposes rectangles; each rectangle's loads are computed once,
   for all tables in one go (`options.py`).
2. Tables are placed from the largest down. All ways to place one table are scored in one array operation against
   what is already placed. While a phase is below its fair share nothing is gained by balancing it, so the score
   charges only what passes that share, plus a little for the total: early tables are not cut without need.
3. Local search on the true step time (`local_search.py`).

Small problems are solved from several starts (everything under one scheme, too), since what matters there is often a
fixed cost that only goes away when all tables change together. A table that fits nowhere sends the planner back to
the start with memory first: largest bytes first, on the emptiest ranks. The result depends on the input alone (no
clock, no dice).

Shape letters: K loads, W ranks, P phases, C candidates, n rectangles.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from recshard_lab.planner.cost import BACK, IN, LOOKUP, MEMORY, UPDATE, CostModel, K
from recshard_lab.planner.options import DoesNotFit, Option, Placement
from recshard_lab.planner.workload import Array

MOST_SINGLE = 24  # of a piece that may go anywhere, only this many least loaded ranks are tried
SMALL = 64  # tables x ranks up to which several starts are searched
_WIRES = slice(IN, BACK + 1)  # IN, OUT, BACK
_TIE = 0.02  # weight of the balance term that tells plans of equal step time apart
_BALANCE = 0.3  # the same while placing, where what is below the fair share costs nothing else


class Greedy:
    """One planning problem and its state: `placed` (one a table) and `base`, the sum ``[K, W]`` of what they add.

    Args:
        model: costs.
        options: per table, what to choose from.
        passes: rounds of local search.
    """

    def __init__(self, model: CostModel, options: Sequence[Sequence[Option]], passes: int = 4) -> None:
        self.model, self.options, self.passes = model, options, passes
        self.num_ranks = model.topology.world_size
        self.capacity = model.capacity * (1 - 1e-9)  # sums of differences round
        top = model.topology
        link = top.intra_host_bw if top.num_nodes == 1 else top.inter_host_bw
        self.byte_ms = self.num_ranks / link
        self.base = np.zeros((K, self.num_ranks))
        self.placed: list[Placement | None] = [None] * len(options)
        cheapest = [min(choices, key=self._work_of) for choices in options]
        work = np.array([self._work_of(option) for option in cheapest])
        needed = np.array([min(option.loads[MEMORY:].sum() for option in choices) for choices in options])
        self.by_work = np.argsort(-work, kind="stable").tolist()
        self.by_bytes = np.argsort(-needed, kind="stable").tolist()
        spread = sum((option.loads.sum(axis=1) for option in cheapest), np.zeros(K)) / self.num_ranks
        self.fair = model.phases(np.repeat(spread[:, None], self.num_ranks, axis=1)).max(axis=-1)

    def solve(self) -> list[Placement]:
        """Places every table.

        Raises:
            DoesNotFit: no order tried has room for every table.
        """
        from recshard_lab.planner.local_search import improve

        found: list[tuple[float, list[Placement]]] = []
        for fair, scheme in self._starts():
            try:
                self._start(self.by_work, fair, scheme)
            except DoesNotFit:
                continue
            improve(self)
            found.append((self.step_ms(), self.placements()))
        if not found:
            self._start(self.by_bytes, self.fair, memory_first=True)
            improve(self)
            return self.placements()
        return min(found, key=lambda pair: pair[0])[1]

    def score(self, loads: Array, fair: Array | None = None) -> Array:
        """Milliseconds ``[...]`` of loads ``[K, ..., W]``, plus a little for imbalance and total work."""
        ms = self.model.phases(loads)
        slowest = ms.max(axis=-1)
        if fair is not None:
            slowest = np.maximum(slowest, fair.reshape(-1, *[1] * (slowest.ndim - 1)))
        spread = np.sqrt(np.einsum("p...w,p...w->p...", ms, ms) / self.num_ranks)
        return np.asarray((slowest + (_TIE if fair is None else _BALANCE) * spread).sum(axis=0))

    def fits(self, loads: Array) -> NDArray[np.bool_]:
        """Whether every rank has room for loads ``[K, ..., W]``."""
        return np.asarray(self.model.memory_total(loads).max(axis=-1) <= self.capacity)

    def step_ms(self) -> float:
        """What the current placements cost."""
        return float(self.model.phases(self.base).max(axis=-1).sum())

    def placements(self) -> list[Placement]:
        """The current placements, every table placed."""
        return [placement for placement in self.placed if placement is not None]

    def put(self, table: int, placement: Placement) -> None:
        """Places `table`."""
        self.placed[table] = placement
        self.base = self.base + placement.delta

    def take(self, table: int) -> Placement:
        """Takes `table` out and gives its placement."""
        placement = self.placed[table]
        assert placement is not None
        self.placed[table] = None
        self.base = self.base - placement.delta
        return placement

    def best(
        self, table: int, fair: Array | None = None, scheme: str | None = None, memory_first: bool = False
    ) -> tuple[float, Placement]:
        """The best way to place `table` beside what is placed, and its score; of one scheme where possible.

        Raises:
            DoesNotFit: there is none.
        """
        found, delta = self.candidates(table, scheme)
        if found:
            loads = self.base[:, None, :] + delta
            score = np.where(self.fits(loads), self.score(loads, fair), np.inf)
            if memory_first:
                score += 1e6 * self.model.memory_total(loads).max(axis=-1) / max(1.0, self.capacity)
            c = int(score.argmin())
            if np.isfinite(score[c]):
                return float(score[c]), Placement(*found[c], delta[:, c])
        raise DoesNotFit(table)

    def _starts(self) -> list[tuple[Array | None, str | None]]:
        starts: list[tuple[Array | None, str | None]] = [(self.fair, None)]
        if len(self.options) * self.num_ranks <= SMALL:
            schemes = dict.fromkeys(o.proposal.scheme for choices in self.options for o in choices)
            starts += [(None, None), *((None, scheme) for scheme in schemes)]
        return starts

    def _start(
        self, order: list[int], fair: Array | None, scheme: str | None = None, memory_first: bool = False
    ) -> None:
        self.base = np.zeros((K, self.num_ranks))
        for table in order:
            self.put(table, self.best(table, fair, scheme, memory_first)[1])

    def candidates(self, table: int, scheme: str | None = None) -> tuple[list[tuple[Option, tuple[int, ...]]], Array]:
        """Ways to place `table` beside `base`: (option, ranks) pairs, and what each adds ``[K, C, W]``."""
        room = (self.capacity - self.model.memory_total(self.base)).tolist()
        busy = self.base[LOOKUP] + self.base[UPDATE] + self.base[_WIRES].sum(axis=0) * self.byte_ms
        quiet_first = np.argsort(busy, kind="stable").tolist()
        roomy_first = sorted(range(self.num_ranks), key=lambda rank: -room[rank])
        found: list[tuple[Option, tuple[int, ...]]] = []
        choices = self.options[table]
        for option in [o for o in choices if o.proposal.scheme == scheme] or choices:
            found += [(option, ranks) for ranks in self._assignments(option, quiet_first, roomy_first, room)]
        delta = np.zeros((K, len(found), self.num_ranks))
        if found:
            columns = [c for c, (_, ranks) in enumerate(found) for _ in ranks]
            rows = [rank for _, ranks in found for rank in ranks]
            loads = np.concatenate([option.loads for option, _ in found], axis=1)
            if any(len(set(ranks)) < len(ranks) for _, ranks in found):  # a rank holds several
                for i, (c, rank) in enumerate(zip(columns, rows, strict=True)):
                    delta[:, c, rank] += loads[:, i]
            else:
                delta[:, columns, rows] = loads
        return found, delta

    def _assignments(
        self, option: Option, quiet_first: list[int], roomy_first: list[int], room: list[float]
    ) -> list[tuple[int, ...]]:
        if option.proposal.assignments is not None:
            return list(option.proposal.assignments)
        count, need = len(option.heavy_first), option.largest_bytes
        quiet = [rank for rank in quiet_first if rank in option.usable]
        fitting = [rank for rank in quiet if room[rank] >= need]
        if count == 1:
            return [(rank,) for rank in fitting[:MOST_SINGLE]]
        if len(fitting) == len(quiet):
            orders = [quiet]
        else:  # memory is tight: also try the emptiest ranks, whatever work they have
            orders = [[rank for rank in roomy_first if rank in option.usable]]
            orders += [fitting] if len(fitting) >= count else []
        if self.model.topology.num_nodes > 1:
            orders += self._within_nodes(orders[-1], count)
        return list(dict.fromkeys(self._dealt(option.heavy_first, order) for order in orders))

    def _dealt(self, heavy_first: tuple[int, ...], order: list[int]) -> tuple[int, ...]:
        """The heaviest rectangle to the first rank of `order`, and so on, in turns where ranks are too few."""
        ranks = [0] * len(heavy_first)
        for i, rect in enumerate(heavy_first):
            ranks[rect] = order[i % len(order)]
        return tuple(ranks)

    def _within_nodes(self, order: list[int], count: int) -> list[list[int]]:
        """`order` cut down to one host, for the two hosts whose ranks come first and that have enough of them."""
        by_node: dict[int, list[int]] = {}
        for rank in order:
            by_node.setdefault(self.model.topology.node_of(rank), []).append(rank)
        return [ranks for ranks in by_node.values() if len(ranks) >= count][:2]

    def _work_of(self, option: Option) -> float:
        loads = option.loads
        return float((loads[LOOKUP] + loads[UPDATE] + loads[_WIRES].sum(axis=0) * self.byte_ms).sum())
