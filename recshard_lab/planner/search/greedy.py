"""Greedy planning: chooses scheme and ranks of all tables together, then improves a few tables at a time.

1. Every registered scheme that the constraints allow proposes shards. Their loads are computed once, for all tables
   together (`options.py`), and turned into linear terms (`model/terms.py`, `bounds.py`).
2. A start is a set of options: those that turn on one set of switches (costs that are paid once, such as a collective),
   those of one scheme, those of one split of all tables between device and host memory (`tier_splits.py`), or all. Each
   has a lower bound. Where tables are placed one after the other, the first start has only the options that the least
   bound adds up.
3. Up to `ANNEALED` tables x ranks, several plans for each of the most promising starts are annealed together
   (`anneal.py`).
4. On several nodes, beyond that size, or if that found no plan, the tables are placed one after the other under the
   most promising starts, from the largest down (`problem.py`). Up to a floor in each phase, work costs nothing, so that
   early tables are not split without need. The floor is at first a little above the mean of the bound. What the tables
   to come need on every rank stays free. If tables do not fit, others move for them (`moves.py`). Where all tables need
   more than `SHORT` of the memory, the first starts leave part of the rest free: their options are chosen at the price
   that memory then has.
5. The best of these plans are filled up: all tables are placed again, with a floor between the mean and the slowest
   rank of the plan before, while that shortens the step. A short local search follows.
6. Local search exchanges tables of the best plan, and places a few of them again (`moves.py`).
7. All tables try another output path together, because some costs only vanish together.

Under a pipeline the search minimises the chain of one batch's phases, whose bound is also one on the step. Among the
plans that it finishes, it keeps the one with the shortest step.

The search stops if a plan is within `NEAR` of the bound. The result depends on the input alone (no clock, fixed seeds).
"""

import itertools
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.planner.model.cost import CostModel
from recshard_lab.planner.model.loads import HOST, K
from recshard_lab.planner.search.anneal import Anneal
from recshard_lab.planner.search.bounds import Bound, bound_of, mode_bounds
from recshard_lab.planner.search.colocated import bundled, groups_of, unbundled
from recshard_lab.planner.search.moves import LEAST, Watch, complete, improve
from recshard_lab.planner.search.options import DoesNotFit, Placement, options_of
from recshard_lab.planner.search.problem import Problem
from recshard_lab.planner.search.state import TIE, State
from recshard_lab.planner.search.ways import CannotAnneal
from recshard_lab.sharding import ROUTES, ParameterConstraints, PlanError
from recshard_lab.sharding.plan.types import DISTINCT_ROWS

if TYPE_CHECKING:
    from recshard_lab.planner.search.record import Recorder

PASSES = 3  # of local search, unless the caller asks for fewer; each places the same number of tables
BALANCE = 0.1  # weight of the balance term while placing
NEAR, NEAR_MANY = 2e-3, 5e-3  # share of the bound; a plan that near is good enough (of many tables on many ranks)
ANNEALED = 1_000  # tables x ranks up to which many plans are annealed
COPIES, STARTED = 16, 16  # plans annealed, and their sets of options
ON_NODES, IN_HOST = 2, 4  # times as many plans on several nodes, and where host memory may be used
SWEEPS, MOVES = 4, 110  # at least so many sweeps, and so many moves of a table
MANY = 3_000  # tables x ranks beyond which `NEAR_MANY` holds
RANKS = 512  # ranks on which placing a table takes twice as long as on one
BUDGET, LEAST_MOVED, TRIED = 4_500, 500, 250  # tables placed: in all, by the last local search at least, and by others
MOST_MOVED = 150  # times that the last local search places each table
PLACED, LEAST_PLACED, MOST_PLACED = 4_000, 3, 20  # tables placed before the best plan is improved; plans placed
REPAIRED, REPAIRS = 10, 60  # placings for each table of a plan that lacks tables: in one way, and in all plans
IMPROVED = 3  # plans that are filled up and improved for a while
PLACINGS = ((1.2, BALANCE), (1.0, BALANCE), (1.5, 1.0))
"""How the first plans are placed: times the floor of a bound, which each phase may take without cost; balance."""
FEW = 0.1  # share of the tables; a scheme that cuts fewer is no start
DIFFERENT = 4  # starts that are tried in one of these ways before the next way
SHORT = 0.5  # share of the memory that tables need at least, from which some starts leave memory free
FILLED = (0.3, 0.5, 0.15)  # shares of the rest of the memory that such starts may fill
WORTH = 1.03  # times their bound: the steps whose options they have
SLACKS = (0.7, 0.9)  # of the way from the mean rank to the slowest, in each phase: the floor of the next plan


@dataclass(frozen=True)
class Solution:
    """The placement of every table, in their order, and no plan's step is shorter than `bound_ms`."""

    placements: list[Placement]
    bound_ms: float


def solve(
    model: CostModel,
    tables: Sequence[BaseEmbeddingConfig],
    constraints: Mapping[str, ParameterConstraints],
    passes: int = PASSES,
    route: str | None = None,
    exact_s: float | None = None,
    record: "Recorder | None" = None,
    any_plan: bool = False,
) -> Solution:
    """The placement of every table, in their order.

    Args:
        model: costs of `tables`.
        tables: what to place.
        constraints: table name -> what is allowed.
        passes: of local search; with 0 the best start as it is.
        route: the only output path, where it applies. Default: the cheapest for each table.
        exact_s: seconds in which a MILP may find a better plan and a better bound. Default: no MILP.
        record: is passed every plan looked at.
        any_plan: return the first plan found. There is one exactly where the whole search finds one.

    Raises:
        PlanError: no tables; a table that no allowed scheme can cut; tables that cannot share their ranks.
        DoesNotFit: no order tried has room for every table.
    """
    if not tables:
        raise PlanError("the planner got no tables. Fix: pass at least one EmbeddingBagConfig or EmbeddingConfig")
    # by name, so that the order of the tables does not matter
    groups = sorted(groups_of(tables, constraints), key=lambda group: min(tables[at].name for at in group))
    problem = Problem(model, bundled(tables, options_of(model, tables, constraints, route), groups))
    search = Search(problem, passes, record)
    if record is not None:
        record.begin(problem, groups)
    solution, refused = None, None
    try:
        solution = search.run(any_plan)
    except DoesNotFit as stuck:
        largest = max(groups[stuck.table], key=lambda at: tables[at].weight_bytes)
        refused = DoesNotFit(largest, None if any_plan else search.over_host())
    if exact_s is not None:
        from recshard_lab.planner.search.exact import solve_exactly

        proven = solve_exactly(problem, search, exact_s)
        solution = proven if solution is None or proven is None else _better(model, solution, proven)
    if solution is None:
        assert refused is not None
        raise refused
    return Solution(unbundled(solution.placements, groups), solution.bound_ms)


def _better(model: CostModel, first: Solution, second: Solution) -> Solution:
    """The plan with the shorter step by the cost model, of which the terms leave something out; the higher bound."""

    def step_ms(solution: Solution) -> float:
        loads = sum(
            (each.loads(model.topology) for each in solution.placements), np.zeros((K, model.topology.world_size))
        )
        return float(model.step_ms(loads))

    best = second if step_ms(second) <= step_ms(first) else first
    return Solution(best.placements, max(first.bound_ms, second.bound_ms))


class Search:
    """One greedy search.

    Attributes:
        bounds: those of the sets of switches, least first.
        filled: share of all device memory that the tables need at least.
    """

    def __init__(self, problem: Problem, passes: int, record: "Recorder | None" = None) -> None:
        self.problem, self.passes, self.record = problem, passes, record
        self.bounds = mode_bounds(problem.model, problem.priced)
        self.bound_ms = self.bounds[0].ms if self.bounds else 0.0
        least = np.minimum.reduceat(problem.priced.total_bytes[0], problem.priced.starts).sum()
        self.filled = float(least / max(1.0, problem.capacity[0] * problem.num_ranks))
        self.many = len(problem.options) * problem.num_ranks > MANY
        self.near = NEAR_MANY if self.many else NEAR
        self.best: State | None = None
        self.best_ms = np.inf
        self.slower = 1 + problem.num_ranks / RANKS
        self.left = int(BUDGET / self.slower)
        self.repairs = REPAIRS * len(problem.options)

    def run(self, any_plan: bool = False) -> Solution:
        starts, lacks = self.starts(), list[int]()
        if len(self.problem.capacity) == 1 and self.filled > 1:
            raise DoesNotFit(self.problem.by_bytes[0])
        if any_plan:
            placed = (self._placed(*attempt, lacks) for attempt in self._attempts(starts))
            state = next((state for state in placed if state is not None), None)
            if state is not None:
                return Solution(state.placements(), self.bound_ms)
        if self.passes and starts and len(self.problem.options) * self.problem.num_ranks <= ANNEALED:
            self._anneal(starts)
        more = self.best is None or (self.passes and self.problem.num_nodes > 1 and not self._near())
        if more and not any_plan:  # else every start was placed above
            self.prune()
            self._place_all(starts, lacks)
        if self.best is None:
            raise DoesNotFit(lacks[0] if lacks else self.problem.by_bytes[0])
        if self.passes and not any_plan and not self._near():
            most = max(LEAST_MOVED, min(self.left, MOST_MOVED * len(self.problem.options)))
            self.improve_from(self.best.copy(), most if more else 0)  # after annealing, exchanges alone
            self._reroute()
        return Solution(self.best.placements(), self.bound_ms)

    def _place_all(self, starts: list[Bound], lacks: list[int]) -> None:
        """Places all tables under the most promising starts, fills up and improves the best of these plans."""
        left = min(MOST_PLACED, max(LEAST_PLACED, int(PLACED / self.slower / len(self.problem.options))))
        count = max(2, left // 2)
        plans: dict[float, tuple[State, Bound]] = {}  # by step: different starts often give the same plan
        for number, (start, room, balance) in enumerate(self._attempts(starts)):
            if (plans and (number > count or start.ms >= self.best_ms * LEAST)) or self._near() or not self.repairs:
                break
            state = self._placed(start, room, balance, lacks)
            left -= 1
            if state is not None:
                plans.setdefault(self.step_ms(state), (state, start))
        for ms in sorted(plans)[: max(1, min(IMPROVED, left // len(SLACKS)))]:
            if self.passes and not self._near():
                self.improve_from(self._filled(*plans[ms], lacks), TRIED)

    def _filled(self, state: State, start: Bound, lacks: list[int]) -> State:
        """Places all tables again below what the slowest ranks take, while that helps."""
        for slack in SLACKS:
            phases = state.used[: self.problem.phases]
            mean = phases.mean(axis=1)
            floor = mean + slack * (phases.max(axis=1) - mean)
            other = self._placed(replace(start, floor=floor), 1.0, BALANCE, lacks)
            if other is None or self.step_ms(other) >= self.step_ms(state) * LEAST or self._near():
                break
            state = other
        return state

    def _anneal(self, starts: list[Bound]) -> None:
        """Many plans at once."""
        problem, enough_ms = self.problem, self.bound_ms * (1 + self.near)
        copies = COPIES * (ON_NODES if problem.num_nodes > 1 else 1) * (IN_HOST if len(problem.capacity) > 1 else 1)
        try:
            anneal = Anneal(problem, starts[:STARTED], copies)
        except CannotAnneal:
            return
        sweeps = max(SWEEPS, MOVES // len(problem.options))
        for state in anneal.run(sweeps, enough_ms, self.step_ms, record=self.record):
            self.keep(state)

    def step_ms(self, state: State) -> float:
        """Milliseconds of a plan: by the terms on one host, else by the cost model.

        The terms leave out part of a pipeline, and what a rank receives beyond what it sends. Between hosts that can be
        a quarter of the step.
        """
        problem = self.problem
        if problem.model.workload.pipeline == "none" and problem.num_nodes == 1:
            return problem.step_ms(state)
        return float(problem.model.step_ms(problem.loads(state)))

    def starts(self) -> list[Bound]:
        """Sets of options, the most promising first."""
        problem = self.problem
        found = list(self.bounds)
        flat = [option for choices in problem.options for option in choices]
        schemes = np.array([option.proposal.scheme for option in flat])
        together = np.array([option.proposal.together for option in flat])
        sets = [schemes == scheme for scheme in dict.fromkeys(schemes.tolist())]
        if together.any():
            routes = np.array([option.route for option in flat])
            for number, route in itertools.product(range(1, int(together.max()) + 1), dict.fromkeys(routes.tolist())):
                sets.append((together == number) & (routes == route))
        splits = list[Bound]()
        per = np.diff(np.append(problem.priced.starts, len(flat)))
        for mine in sets:
            cuts = np.maximum.reduceat(mine, problem.priced.starts)
            if cuts.sum() < FEW * len(cuts):
                continue  # about the same as all options
            kind = splits if (together[mine] > 0).all() else found
            mine = mine | ~np.repeat(cuts, per)  # tables that it cannot cut go by any
            bits = int(np.bitwise_and.reduce(problem.priced.flags[mine]))
            bound = bound_of(problem.model, problem.priced, mine, bits)
            if bound is not None:
                kind.append(bound)
        unique: dict[bytes, Bound] = {}
        by_ms = (sorted(some, key=lambda bound: bound.ms) for some in (found, splits))
        for bound in itertools.chain(*itertools.zip_longest(*by_ms)):
            if bound is not None:
                unique.setdefault(bound.allowed.tobytes(), bound)
        return list(unique.values())

    def _placed(self, start: Bound, room: float, balance: float, lacks: list[int]) -> State | None:
        """Every table placed under the options of `start`; under any options if there is no room otherwise.

        Args:
            room: times the floor of `start`: what a plan may take in each phase without cost.
            balance: weight of the balance term.
            lacks: receives the tables that found no room.
        """
        problem = self.problem
        self.left -= len(problem.options)
        state = problem.start(start.allowed, start.floor * room)
        state.balance = balance
        shared = problem.shared_bytes(start.allowed)  # which later tables need beside what early ones take
        state.nbytes += shared.sum(axis=1)
        for table in problem.by_share:
            state.nbytes -= shared[:, table]
            found = problem.best(state, table)
            if found is not None:
                problem.put(state, table, found[1])
        state.floor = None
        for allowed in (start.allowed, None)[: 1 + (self.best is None)]:
            state.allowed = allowed
            self.repairs -= complete(problem, state, min(self.repairs, REPAIRED * len(problem.options)))
        state.balance = TIE
        lacking = [table for table, put in enumerate(state.placed) if put is None]
        if lacking:
            lacks += lacking
            return None
        self.watch("placed", state)
        self.keep(state)
        return state

    def improve_from(self, state: State, placings: int) -> None:
        """Local search from a plan: so many tables are placed."""
        self.left -= placings
        enough_ms, most = self.bound_ms * (1 + self.near), placings * self.passes // PASSES
        improve(self.problem, state, most, enough_ms, self.watch("moved"), self.watch("exchanged"))
        self.keep(state)

    def watch(self, stage: str, *looked_at: State) -> Watch | None:
        """A callback that records each plan, after it has recorded `looked_at`; None without a record."""
        if self.record is None:
            return None
        record = self.record.watch(self.problem, stage)
        for state in looked_at:
            record(state)
        return record

    def over_host(self) -> tuple[int, float] | None:
        """The rank that has too little host memory, and the bytes that it would hold; None if no plan fits devices."""
        priced = self.problem.priced
        if len(priced.room) == 1:
            return None
        roomy = copy(self.problem)
        roomy.capacity = np.array([roomy.capacity[0], priced.total_bytes.sum()])
        roomy.priced = replace(priced, room=roomy.capacity)
        try:
            placements = Search(roomy, self.passes).run(any_plan=True).placements
        except DoesNotFit:
            return None
        held = sum(placement.loads(roomy.model.topology)[HOST] for placement in placements)
        return int(np.argmax(held)), float(np.max(held))

    def prune(self) -> None:
        """Leaves out what no better plan can hold."""
        if np.isfinite(self.best_ms):
            worth = [bound.worth(self.problem.priced, self.best_ms) for bound in self.bounds]
            self.problem.keep_only(np.logical_or.reduce(worth))

    def keep(self, state: State) -> None:
        """Remembers a plan if it is the best so far."""
        ms = self.step_ms(state)
        if ms < self.best_ms * LEAST:
            self.best, self.best_ms = state.copy(), ms

    def _near(self) -> bool:
        return self.best_ms <= self.bound_ms * (1 + self.near)

    def _reroute(self) -> None:
        """All tables under another route at once, since some costs only go away together; what helps is improved."""
        assert self.best is not None
        for route in (*ROUTES, DISTINCT_ROWS):
            state = self._rerouted(self.best, route)
            if state is not None and self.step_ms(state) < self.best_ms * LEAST:
                self.keep(state)

    def _rerouted(self, state: State, route: str) -> State | None:
        """The same plan with every table under `route` that may take it; None where that changes nothing or is full."""
        problem, other, changed = self.problem, state.copy(), False
        for table, put in enumerate(state.placed):
            assert put is not None
            choices = problem.options[table]
            twin = next((twin for twin in put.placement.option.twins if twin.route == route), None)
            if twin is not None:
                problem.take(other, table)
                problem.put(other, table, problem.made(table, choices.index(twin), put.ranks))
                changed = True
        problem.add_up(other)
        if changed:
            self.watch("rerouted", other)
        return other if changed and problem.fits(other) else None

    def _attempts(self, starts: Sequence[Bound]) -> list[tuple[Bound, float, float]]:
        """Ways to place all tables, the most promising first: the start, the room, and the weight of balance."""
        first = [(start, *way) for way in PLACINGS for start in starts[:DIFFERENT]]
        cheapest = [(self._cheapest(bound), *PLACINGS[0]) for bound in self.bounds[:1]]
        return [*self._spare(), *cheapest, *first, *((start, 1.0, BALANCE) for start in starts)]

    def _spare(self) -> list[tuple[Bound, float, float]]:
        """If memory is short: starts that leave some of it free, with the options that are worth it at its price."""
        priced, found = self.problem.priced, []
        for share in FILLED if self.filled > SHORT else ():
            room = priced.room * (self.filled + share * (1 - self.filled))
            bounds = mode_bounds(self.problem.model, replace(priced, room=room))
            found += [(replace(one, allowed=one.worth(priced, one.ms * WORTH)), 1.0, BALANCE) for one in bounds[:1]]
        return found

    def _cheapest(self, bound: Bound) -> Bound:
        """A start with the options alone that the bound adds up, which take least of all ranks together."""
        starts, paid = self.problem.priced.starts, np.where(bound.allowed, bound.paid, np.inf)
        per = np.diff(np.append(starts, len(paid)))
        return replace(bound, allowed=paid <= np.repeat(np.minimum.reduceat(paid, starts), per) * (1 + 1e-9))
