"""A planning problem, and the plans that are being made of it.

Several plans are extended at the same time: the ways to place one table in each of them are scored in one array
operation, so six starts cost little more than one.

Shape letters: K loads, W ranks, P phases, C candidates, S states.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from recshard_lab.planner.cost import CostModel
from recshard_lab.planner.loads import LOOKUP, MEMORY, UPDATE, WIRES, K
from recshard_lab.planner.options import Option, Placement
from recshard_lab.planner.workload import Array

Way: TypeAlias = tuple[Option, tuple[int, ...]]
"""An option, and the rank of each of its rectangles."""

MOST_SINGLE = 24  # of a piece that may go anywhere, only this many least loaded ranks are tried
TIE = 0.02  # weight of the balance term that tells plans of equal step time apart
BALANCE = 0.3  # the same while placing, where what is below the fair share costs nothing else


@dataclass(eq=False)
class State:
    """A plan in the making.

    Attributes:
        placed: one a table, None before it is placed.
        base: ``[K, W]`` what all placements add up to.
        scheme: the scheme that tables are placed under where it applies; None: any.
        fair: ``[P]`` what a phase may take before it costs anything; None: nothing is free.
        balance: weight of the term that rewards balance and little total work.
    """

    placed: list[Placement | None]
    base: Array
    scheme: str | None = None
    fair: Array | None = None
    balance: float = TIE

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

    def placements(self) -> list[Placement]:
        """The placements, every table placed."""
        return [placement for placement in self.placed if placement is not None]

    def copy(self, scheme: str | None = None) -> "State":
        """The same plan, to be changed on its own."""
        return State(list(self.placed), self.base, scheme)

    def add_up(self) -> None:
        """Sums of differences drift by rounding: adds up afresh."""
        self.base = sum((placement.delta for placement in self.placements()), np.zeros_like(self.base))


class Problem:
    """Tables with their options, scored by a cost model.

    Args:
        model: costs.
        options: per table, what to choose from.
    """

    def __init__(self, model: CostModel, options: Sequence[Sequence[Option]]) -> None:
        self.model, self.options = model, options
        self.num_ranks = model.topology.world_size
        self.capacity = model.capacity * (1 - 1e-9)  # sums of differences round
        top = model.topology
        link = top.intra_host_bw if top.num_nodes == 1 else top.inter_host_bw
        self.byte_ms = self.num_ranks / link
        totals = [np.stack([option.loads.sum(axis=1) for option in choices]) for choices in options]  # [n, K]
        works = [self._work(total.T) for total in totals]
        needed = [total[:, MEMORY:].sum(axis=1).min() for total in totals]
        self.by_work = np.argsort([-work.min() for work in works], kind="stable").tolist()
        self.by_bytes = np.argsort([-least for least in needed], kind="stable").tolist()
        spread = np.sum([total[work.argmin()] for total, work in zip(totals, works, strict=True)], axis=0)
        shared = np.repeat(spread[:, None] / self.num_ranks, self.num_ranks, axis=1)
        self.fair: Array = model.phases(shared).max(axis=-1)
        self.schemes = list(dict.fromkeys(o.proposal.scheme for choices in options for o in choices))

    def start(self, scheme: str | None = None, fair: Array | None = None) -> State:
        """A plan with nothing placed."""
        balance = TIE if fair is None else BALANCE
        return State([None] * len(self.options), np.zeros((K, self.num_ranks)), scheme, fair, balance)

    def score(self, loads: Array, balance: float = TIE) -> Array:
        """Milliseconds ``[...]`` of loads ``[K, ..., W]``, plus a little for imbalance and total work."""
        ms = self.model.phases(loads)
        return np.asarray((ms.max(axis=-1) + balance * self._spread(ms)).sum(axis=0))

    def fits(self, loads: Array) -> NDArray[np.bool_]:
        """Whether every rank has room for loads ``[K, ..., W]``."""
        return np.asarray(self.model.memory_total(loads).max(axis=-1) <= self.capacity)

    def step_ms(self, state: State) -> float:
        """What the placements of `state` cost."""
        return float(self.model.phases(state.base).max(axis=-1).sum())

    def best(
        self, table: int, states: Sequence[State], memory_first: bool = False
    ) -> list[tuple[float, Placement] | None]:
        """The best way to place `table` in each state, and its score; None where it does not fit."""
        if not states:
            return []
        bases = np.stack([state.base for state in states], axis=1)  # [K, S, W]
        rooms = (self.capacity - self.model.memory_total(bases)).tolist()
        quiet_first = np.argsort(self._work(bases), axis=-1, kind="stable").tolist()
        per_state = [
            [
                (option, ranks)
                for option in self._choices(table, state.scheme)
                for ranks in self._assignments(option, quiet, room)
            ]
            for state, quiet, room in zip(states, quiet_first, rooms, strict=True)
        ]
        counts = [len(ways) for ways in per_state]
        ways = [way for one in per_state for way in one]
        if not ways:
            return [None] * len(states)
        delta = self._deltas(ways)
        loads = np.repeat(bases, counts, axis=1) + delta
        ms = self.model.phases(loads)
        slowest, balance = ms.max(axis=-1), np.repeat([state.balance for state in states], counts)
        if any(state.fair is not None for state in states):
            fair = [np.zeros(len(ms)) if state.fair is None else state.fair for state in states]
            slowest = np.maximum(slowest, np.repeat(np.stack(fair, axis=1), counts, axis=1))
        used = self.model.memory_total(loads).max(axis=-1)
        score = (slowest + balance * self._spread(ms)).sum(axis=0)
        if memory_first:
            score += 1e6 * used / max(1.0, self.capacity)
        score[used > self.capacity] = np.inf
        found: list[tuple[float, Placement] | None] = []
        end = 0
        for count in counts:
            start, end = end, end + count
            c = start + int(score[start:end].argmin()) if count else 0
            fits = count > 0 and np.isfinite(score[c])
            found.append((float(score[c]), Placement(*ways[c], delta[:, c])) if fits else None)
        return found

    def rerouted(self, state: State, route: str) -> State | None:
        """The same plan with every table under `route` that may take it; None where that changes nothing or is full."""
        other = state.copy()
        for table, placement in enumerate(state.placements()):
            twin = next((twin for twin in placement.option.twins if twin.route == route), None)
            if twin is not None:
                other.take(table)
                way = (twin, placement.ranks)
                other.put(table, Placement(*way, self._deltas([way])[:, 0]))
        other.add_up()
        changed = any(a is not b for a, b in zip(other.placed, state.placed, strict=True))
        return other if changed and bool(self.fits(other.base)) else None

    def _choices(self, table: int, scheme: str | None) -> Sequence[Option]:
        """What `table` may be placed as: under `scheme` where it applies."""
        choices = self.options[table]
        return choices if scheme is None else [o for o in choices if o.proposal.scheme == scheme] or choices

    def _deltas(self, ways: list[Way]) -> Array:
        """What each way adds, ``[K, C, W]``."""
        delta = np.zeros((K, len(ways), self.num_ranks))
        columns = np.repeat(np.arange(len(ways)), [len(ranks) for _, ranks in ways])
        at = columns * self.num_ranks + np.array([rank for _, ranks in ways for rank in ranks], dtype=np.intp)
        top = self.model.topology
        loads = np.concatenate([option.placed_loads(ranks, top) for option, ranks in ways], axis=1)
        flat = delta.reshape(K, -1)
        if all(option.distinct for option, _ in ways):
            flat[:, at] = loads
        else:  # a rank holds several rectangles
            for i, cell in enumerate(at):
                flat[:, cell] += loads[:, i]
        return delta

    def _assignments(self, option: Option, quiet_first: list[int], room: list[float]) -> list[tuple[int, ...]]:
        if option.proposal.assignments is not None:
            return list(option.proposal.assignments)
        count, need = len(option.heavy_first), option.largest_bytes
        everywhere = len(option.usable) == self.num_ranks
        quiet = quiet_first if everywhere else [rank for rank in quiet_first if rank in option.usable]
        fitting = quiet if need <= min(room) else [rank for rank in quiet if room[rank] >= need]
        if count == 1:
            return [(rank,) for rank in fitting[:MOST_SINGLE]]
        if len(fitting) == len(quiet):
            orders = [quiet]
        else:  # memory is tight: also try the emptiest ranks, whatever work they have
            orders = [sorted(quiet, key=lambda rank: -room[rank])]
            orders += [fitting] if len(fitting) >= count else []
        if self.model.topology.num_nodes > 1:
            orders += self._within_nodes(orders[-1], count)
        if len(orders) == 1:
            return [_dealt(option.heavy_first, orders[0])]
        return list(dict.fromkeys(_dealt(option.heavy_first, order) for order in orders))

    def _within_nodes(self, order: list[int], count: int) -> list[list[int]]:
        """`order` cut down to one host, for the two hosts whose ranks come first and that have enough of them."""
        by_node: dict[int, list[int]] = {}
        for rank in order:
            by_node.setdefault(self.model.topology.node_of(rank), []).append(rank)
        return [ranks for ranks in by_node.values() if len(ranks) >= count][:2]

    def _work(self, loads: Array) -> Array:
        """Milliseconds of loads ``[K, ...]``, roughly, for ordering."""
        return np.asarray(loads[LOOKUP] + loads[UPDATE] + loads[WIRES].sum(axis=0) * self.byte_ms)

    def _spread(self, ms: Array) -> Array:
        return np.asarray(np.sqrt(np.einsum("p...w,p...w->p...", ms, ms) / self.num_ranks))


def _dealt(heavy_first: tuple[int, ...], order: list[int]) -> tuple[int, ...]:
    """The heaviest rectangle to the first rank of `order`, and so on, in turns where ranks are too few."""
    ranks = [0] * len(heavy_first)
    for i, rect in enumerate(heavy_first):
        ranks[rect] = order[i % len(order)]
    return tuple(ranks)
