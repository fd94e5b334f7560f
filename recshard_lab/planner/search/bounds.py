"""Lower bounds on the predicted step, over all plans of the options that the planner proposes.

A plan turns on a set of switches (`Terms`) and pays their fixed costs. Beyond these, three facts hold for every plan:

- **averaging**: in each phase the slowest rank takes at least the mean. The step is therefore at least the sum over
  tables of what the chosen option adds to all ranks, divided by W, plus what it costs every rank;
- **indivisible shards**: a shard is placed on one rank. A plan of Z ms therefore holds no option whose largest shard
  takes more than Z, with the least that all other tables cost every rank. The bound is the least Z for which the
  cheapest of the remaining options add up to at most Z. Bisection finds it;
- **memory**: a shard must fit into a rank. For any price nu >= 0 of a byte,
  ``sum over tables of min over options (ms + nu bytes) - nu (bytes of all ranks)`` is a bound (the Lagrangian dual).

The bound is the least over all sets of switches, and takes milliseconds, so that it can steer the search. It is weak
if few indivisible shards share few ranks (bin packing), or if the slowest ranks of the phases must differ.
`strong_bound` covers part of that, `exact.py` all of it.

Shape letters: R rows (P phases that ranks differ in, then M memories: the device's, and the host's if a shard may be
there), O all options of all tables, W ranks, X extras.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from recshard_lab.planner.model.cost import CostModel
from recshard_lab.planner.model.loads import ACROSS_BOTH, HOST
from recshard_lab.planner.model.terms import modes
from recshard_lab.planner.search.options import Option
from recshard_lab.planner.workload import Array

if TYPE_CHECKING:
    from recshard_lab.planner.search.problem import Problem

HALVINGS = 24  # of the interval of a bisection
FEW = 128  # tables x ranks, or x nodes, up to which all placements are enumerated
MOST_WHOLE = 2_000  # options of the largest program with whole options that `strong_bound` solves
CLOSE = 1e-3  # share of a step; a bound that near is good enough


@dataclass(frozen=True, eq=False)
class Priced:
    """The costs of the options of all tables, concatenated.

    Attributes:
        rows: the phases in which ranks differ.
        room: ``[M]`` bytes that a rank has for tables in each memory.
        per_own, per_node: ``[R, K]`` ms, and bytes, per load of a rank: to that rank, and to every rank of its node.
        starts: ``[T]`` position of each table's first option.
        heaviest: ``[O, R]`` ms, and bytes, that a shard adds to its rank, at most.
        mean: ``[O, R]`` the same for the mean rank.
        cost: ``[O]`` ms that the option adds to the sum over phases of the mean rank.
        over: ``[O]`` the same, less what it costs every rank and less the least of its table.
        alone: ``[O, P]`` ms of each phase that some rank takes at least, with nothing but this table in the plan.
        piece_ms, piece_bytes: ``[O]`` and ``[M, O]`` of its largest shard, at least.
        shared_ms, shared_bytes: ``[O]`` and ``[M, O]`` added to every rank.
        total_bytes: ``[M, O]`` of all ranks together.
        extra: ``[O, X]`` ms added to every rank while the switch is on.
        extra_switches: ``[X]`` the switch of each extra.
        flags: ``[O]`` bit mask of the switches that the option turns on.
        own: ``[R, sizes]`` ms, and bytes, that a shard of each size adds to its rank.
        kind_starts: ``[O + 1]`` position of each option's first size in `own`.
    """

    rows: list[int]
    room: Array
    per_own: Array
    per_node: Array
    starts: NDArray[np.intp]
    heaviest: Array
    mean: Array
    cost: Array
    over: Array
    alone: Array
    piece_ms: Array
    piece_bytes: Array
    shared_ms: Array
    shared_bytes: Array
    total_bytes: Array
    extra: Array
    extra_switches: list[int]
    flags: NDArray[np.intp]
    own: Array
    kind_starts: NDArray[np.intp]

    def own_of(self, option: int) -> Array:
        """``[R, c]`` ms, and bytes, that a shard of each of the option's sizes adds to its rank."""
        return self.own[:, self.kind_starts[option] : self.kind_starts[option + 1]]


@dataclass(frozen=True)
class Bound:
    """A bound for plans with a set of switches and of options.

    Attributes:
        ms: the bound.
        bits: bit mask of the switches.
        allowed: ``[O]`` the options.
        floor: ``[P]`` ms of each phase that the cheapest options need on average.
        paid: ``[O]`` ms, the price of memory included.
        needs: ``[O]`` ms of any plan with the option, without `fixed`.
        credit: ms of all memory at its price.
        fixed: ms of costs that are paid once.
    """

    ms: float
    bits: int
    allowed: NDArray[np.bool_]
    floor: Array
    paid: Array
    needs: Array
    credit: float
    fixed: float

    def worth(self, priced: Priced, step_ms: float) -> NDArray[np.bool_]:
        """``[O]`` the options that such a plan with a step below `step_ms` may hold (reduced cost fixing)."""
        among = self.allowed & (self.needs <= step_ms - self.fixed)
        paid = np.where(among, self.paid, np.inf)
        least = np.minimum.reduceat(paid, priced.starts)
        base = float(least.sum()) - self.credit + self.fixed
        if not base < step_ms:
            return np.zeros(len(paid), dtype=bool)
        per = np.diff(np.append(priced.starts, len(paid)))
        return np.asarray(base + paid - np.repeat(least, per) < step_ms)


def price(model: CostModel, options: Sequence[Sequence[Option]]) -> Priced:
    """The costs of `options`, by the terms of `model`."""
    terms, top = model.terms, model.topology
    flat = [option for choices in options for option in choices]
    kinds = np.concatenate([option.kinds for option in flat], axis=1)  # [K, sizes]
    counts = np.concatenate([option.counts for option in flat])
    each = np.array([option.kinds.shape[1] for option in flat])
    kind_starts = np.concatenate([[0], np.cumsum(each)]).astype(np.intp)
    first = kind_starts[:-1]
    rows = [row for row in range(len(terms.own) - 1) if terms.own[row].any() or terms.node[row].any()]
    count, hosted = len(rows), bool(kinds[HOST].any())
    per_own, per_node = (np.pad(per[[*rows, -1]], ((0, hosted), (0, 0))) for per in (terms.own, terms.node))
    room = np.array([model.usable_bytes - float(terms.fixed[-1]), model.host_room])[: 1 + hosted]
    if hosted:
        per_own[-1, HOST] = 1.0
    own, node = per_own @ kinds, per_node @ kinds  # [R, sizes]
    totals = np.add.reduceat(kinds * counts, first, axis=1)  # [K, O]
    everyone = terms.everyone @ totals
    shared_ms, shared_bytes = everyone[:-1].sum(axis=0), np.zeros((len(room), len(flat)))
    shared_bytes[0] = everyone[-1]
    mean = np.add.reduceat((own + node * top.local_world_size) * counts, first, axis=1).T  # [O, R]
    most = np.concatenate([option.alone for option in flat], axis=1)  # [2, sizes]
    piece = own + node + per_node[:, ACROSS_BOTH] @ (most - kinds[ACROSS_BOTH])
    heaviest = np.maximum.reduceat(own, first, axis=1).T
    hops = [i for i, option in enumerate(flat) if option.route == "two_hop"]
    if hops:
        on_node = np.maximum.reduceat(node, first, axis=1).T
        heaviest = heaviest.copy()
        for i in hops:
            heaviest[i] += on_node[i] * _most_on_a_node(flat[i], top.local_world_size)
    charged = [(i, s.everyone) for i, s in enumerate(terms.switches) if s.everyone is not None and s.everyone.any()]
    extra = np.stack([everyone.sum(axis=0) @ totals for _, everyone in charged], axis=1) if charged else None
    starts = np.concatenate([[0], np.cumsum([len(choices) for choices in options])[:-1]]).astype(np.intp)
    ranks = top.world_size
    own_cost = mean[:, :count].sum(axis=1) / ranks
    cost = own_cost + shared_ms
    least = np.minimum.reduceat(cost, starts)
    per = np.array([len(choices) for choices in options])
    return Priced(
        rows=rows,
        room=room,
        per_own=per_own,
        per_node=per_node,
        starts=starts,
        heaviest=heaviest,
        mean=mean / ranks,
        cost=cost,
        over=own_cost - np.repeat(least, per),
        alone=np.maximum.reduceat(piece[:count], first, axis=1).T,
        piece_ms=np.maximum.reduceat(piece[:count].sum(axis=0), first),
        piece_bytes=np.maximum.reduceat(piece[count:], first, axis=1) + shared_bytes,
        shared_ms=shared_ms,
        shared_bytes=shared_bytes,
        total_bytes=mean[:, count:].T + ranks * shared_bytes,
        extra=np.zeros((len(flat), 0)) if extra is None else extra,
        extra_switches=[i for i, _ in charged],
        flags=terms.flags(totals),
        own=own,
        kind_starts=kind_starts,
    )


def _most_on_a_node(option: Option, local: int) -> int:
    listed = option.proposal.assignments
    if listed is None:
        return 1
    return int(np.bincount(np.asarray(listed[0]) // local).max())


def mode_bounds(model: CostModel, priced: Priced) -> list[Bound]:
    """A bound for every set of switches that a plan can turn on, least first. Sets without a plan are left out."""
    found = []
    for bits in modes(np.unique(priced.flags).tolist()):
        allowed = (priced.flags & ~bits) == 0
        bound = bound_of(model, priced, allowed, bits)
        if bound is not None:
            found.append(bound)
    return sorted(found, key=lambda bound: bound.ms)


def strong_bound(problem: "Problem", step_ms: float) -> float:
    """A lower bound that is closer to the best step than `mode_bounds`, for reports: too slow to steer a search.

    It is the most that the bounds of `mode_bounds`, a linear program (`relaxation.py`), the same program with whole
    options, packing (`packing_bound.py`) and, for few tables on few ranks, enumeration (`enumeration.py`) prove. All of
    them look only at options that a plan below `step_ms` may hold, so the result is at most `step_ms`.

    It depends on its arguments alone: work is limited by numbers of steps, not by a clock.
    CPU seconds: 0.6 for 26 and 0.5 for 100 tables on 8 ranks, 7.7 for 125 on 256 (two busy cores).

    Args:
        problem: the tables with their options.
        step_ms: the step of a known plan, by the cost model.

    Returns:
        ms; no plan of the options is shorter.
    """
    from recshard_lab.planner.search.enumeration import enumerated_bound
    from recshard_lab.planner.search.packing_bound import packing_bound
    from recshard_lab.planner.search.relaxation import Relaxation

    found = mode_bounds(problem.model, problem.priced)
    worth = worth_of(found, problem.priced, step_ms)
    if not worth.any():
        return step_ms
    relaxation = Relaxation(problem, worth, step_ms)
    best = max(found[0].ms, relaxation.bound())
    if best < step_ms * (1 - CLOSE) and relaxation.count <= MOST_WHOLE:
        best = max(best, relaxation.whole_bound())
    if best < step_ms * (1 - CLOSE):
        best = packing_bound(problem, worth, best, step_ms)
    few = FEW // len(problem.options)
    bins = problem.num_ranks if problem.num_ranks <= few else problem.num_nodes
    if best < step_ms * (1 - CLOSE) and bins <= few:
        best = enumerated_bound(problem, worth, best, step_ms, bins)
    return min(step_ms, best)


def worth_of(bounds: Sequence[Bound], priced: Priced, step_ms: float) -> NDArray[np.bool_]:
    """``[O]`` the options that a plan with a step below `step_ms` may hold, under any set of switches."""
    none = np.zeros(len(priced.cost), dtype=bool)
    return np.logical_or.reduce([none, *(bound.worth(priced, step_ms) for bound in bounds)])


def bound_of(model: CostModel, priced: Priced, allowed: NDArray[np.bool_], bits: int = 0) -> Bound | None:
    """A bound for plans of the allowed options that turn on these switches. None if no plan does."""
    terms, ranks = model.terms, model.topology.world_size
    on = np.array([bits >> i & 1 for i in priced.extra_switches], dtype=float)
    everyone = priced.shared_ms + priced.extra @ on
    cost = priced.cost + priced.extra @ on
    allowed = allowed & (priced.piece_bytes <= priced.room[:, None]).all(axis=0)
    starts = priced.starts
    per = np.diff(np.append(starts, len(cost)))

    def least(values: Array, among: NDArray[np.bool_]) -> Array:
        return np.asarray(np.minimum.reduceat(np.where(among, values, np.inf), starts))

    shared = least(everyone, allowed)
    if not np.isfinite(shared).all():
        return None
    needs = priced.piece_ms + everyone + float(shared.sum()) - np.repeat(shared, per)
    room, nbytes = priced.room * ranks, np.where(allowed, priced.total_bytes, np.inf)
    prices = np.zeros(len(room))
    for at in [*range(len(room)), *range(len(room) - 1)]:  # again: one memory's price changes what the other must hold
        prices[at] = 0.0
        found = _price_of_a_byte(cost + prices @ priced.total_bytes, nbytes[at], starts, float(room[at]))
        if found is None:
            return None
        prices[at] = found
    paid = cost + prices @ priced.total_bytes
    credit = float(prices @ room)

    def f(z: float) -> float:
        return float(least(paid, allowed & (needs <= z)).sum()) - credit

    low = f(np.inf)
    high = max(low, float(least(np.maximum(needs, paid), allowed).max()))
    high = max(high, f(high))
    if f(low) > low:
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if f(middle) <= middle else (middle, high)
    taken = np.where(allowed & (needs <= high), paid, np.inf)
    chosen = _argmins(taken, starts)
    floor = priced.mean[chosen, : len(priced.rows)].sum(axis=0)
    fixed = float(terms.paid(bits)[:-1].sum())
    return Bound(low * (1 - 1e-12) + fixed, bits, allowed, floor, paid, needs, credit, fixed)


def _argmins(values: Array, starts: NDArray[np.intp]) -> NDArray[np.intp]:
    """``[T]`` the position of each table's least value."""
    per = np.diff(np.append(starts, len(values)))
    equal = np.flatnonzero(values == np.repeat(np.minimum.reduceat(values, starts), per))
    return np.asarray(equal[np.searchsorted(equal, starts)])


def _price_of_a_byte(cost: Array, nbytes: Array, starts: NDArray[np.intp], room: float) -> float | None:
    """The price in ms per byte at which the cheapest options fit into all memory. None if no options fit."""
    if float(np.minimum.reduceat(nbytes, starts).sum()) > room:
        return None
    allowed = np.isfinite(nbytes)
    cost = np.where(allowed, cost, np.inf)

    def held(price: float) -> float:
        return float(nbytes[_argmins(cost + price * np.where(allowed, nbytes, 0.0), starts)].sum())

    if held(0.0) <= room:
        return 0.0
    span = float(cost[allowed].max() - cost[allowed].min()) or 1.0
    low, high = 0.0, span  # ms for a single byte: more than any option is worth
    low_exponent = np.log(span) - 60.0
    low, high = low_exponent, float(np.log(span))
    for _ in range(HALVINGS + 8):
        middle = (low + high) / 2
        low, high = (low, middle) if held(float(np.exp(middle))) <= room else (middle, high)
    return float(np.exp(low))
