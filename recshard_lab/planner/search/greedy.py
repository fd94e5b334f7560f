"""Greedy planning: choose scheme and ranks of every table together, then improve one and two tables at a time.

1. Every registered scheme that the constraints allow proposes rectangles; each rectangle's loads are computed once,
   for all tables in one go (`options.py`), and turned into linear terms (`terms.py`, `bounds.py`).
2. A start is a set of options: those that turn on some set of switches (costs that are paid once: a collective, a
   row-cut), those of one scheme, or all. Each has a lower bound.
3. Up to `ANNEALED` tables x ranks, some plans for each of the most promising starts are annealed all at once
   (`anneal.py`), and tables of the best are exchanged (`local_search.py`).
4. Beyond, and where that found no room for every table, starts are tried one after the other, the most promising
   first; one whose bound is not below the best plan's step is skipped, as are options that no better plan can hold.
   Tables are placed from the largest down (`state.py`), where what is below a phase's fair share costs nothing but
   what it adds to the fair share, so that early tables are not cut without need. A plan in which a table fits nowhere
   is started again with memory first: largest bytes first, on the emptiest ranks. Then local search, first with a
   large weight on balance, which looks past local optima in which no table alone can shorten the slowest ranks of all
   phases.
5. All tables under another route at once, since some costs only go away together.

Under a pipeline the search works on the chain of one batch's phases, whose bound is one on the step, and keeps, of the
plans that it finishes, the one with the shortest step.

It stops as soon as the plan is within `NEAR` of the bound. The result depends on the input alone (no clock, one seed).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.planner.model.cost import CostModel
from recshard_lab.planner.model.loads import HOST, K
from recshard_lab.planner.search.anneal import Anneal
from recshard_lab.planner.search.bounds import Bound, bound_of, mode_bounds
from recshard_lab.planner.search.colocated import bundled, groups_of, unbundled
from recshard_lab.planner.search.moves import LEAST, Watch, exchange, improve
from recshard_lab.planner.search.options import DoesNotFit, Placement, kernels_for, options_of
from recshard_lab.planner.search.problem import Problem
from recshard_lab.planner.search.state import TIE, State
from recshard_lab.planner.search.ways import CannotAnneal
from recshard_lab.sharding import ROUTES, EmbeddingComputeKernel, ParameterConstraints, PlanError
from recshard_lab.sharding.plan.types import DDR, DISTINCT_ROWS

if TYPE_CHECKING:
    from recshard_lab.planner.search.record import Recorder

ROUNDS = (1.0, 0.3, TIE)
"""Weight of the balance term in each round of local search; beyond `SMALL` a round is left out."""
BALANCE = 0.1  # the same while placing
SMALL = 64  # tables x ranks up to which every start is improved to the end
HOPELESS = 1.1  # times the best step so far; a start that long is not improved
NEAR, NEAR_MANY = 2e-3, 5e-3  # share of the bound; a plan that near is good enough (of many tables on many ranks)
ANNEALED = 1_000  # tables x ranks up to which many plans are annealed
COPIES, STARTED = 16, 16  # plans annealed (twice as many on several nodes), and their sets of options
SWEEPS, MOVES = 4, 110  # at least so many sweeps, and so many moves of a table
MANY = 3_000  # tables x ranks beyond which the best start alone is improved
PLACED = 200_000  # tables x ranks x starts that are placed there
FUSED_UVM = str(EmbeddingComputeKernel.FUSED_UVM)
STARTS = 1_250  # tables x ranks x starts that are improved, where there is more than that


@dataclass(frozen=True)
class Solution:
    """The placement of every table, in their order, and no plan's step is shorter than `bound_ms`."""

    placements: list[Placement]
    bound_ms: float


def solve(
    model: CostModel,
    tables: Sequence[BaseEmbeddingConfig],
    constraints: Mapping[str, ParameterConstraints],
    passes: int = len(ROUNDS),
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
        passes: rounds of local search, at most `ROUNDS`; with 0 the best start as it is.
        route: the only one, where it applies; the cheapest for each table when left out.
        exact_s: seconds in which a MILP may find a better plan and a better bound; None: it is not tried.
        record: is passed every plan looked at.
        any_plan: return the first plan found. There is one exactly where the whole search finds one.

    Raises:
        PlanError: no tables; a table that no allowed scheme can cut; tables that cannot share their ranks.
        DoesNotFit: no order tried has room for every table.
    """
    if not tables:
        raise PlanError("the planner got no tables. Fix: pass at least one EmbeddingBagConfig or EmbeddingConfig")
    groups = groups_of(tables, constraints)
    problem = Problem(model, bundled(tables, options_of(model, tables, constraints, route), groups))
    search = Search(problem, passes, record)
    if record is not None:
        record.begin(problem, groups)
    solution, refused = None, None
    try:
        solution = search.run(any_plan)
    except DoesNotFit as stuck:
        largest = max(groups[stuck.table], key=lambda at: tables[at].weight_bytes)
        refused = DoesNotFit(largest)
    if exact_s is not None:
        from recshard_lab.planner.search.exact import solve_exactly

        proven = solve_exactly(problem, search, exact_s)
        solution = proven if solution is None or proven is None else _better(model, solution, proven)
    if solution is None:
        assert refused is not None
        raise refused
    return Solution(unbundled(solution.placements, groups), solution.bound_ms)


def solve_in_host(
    model: CostModel,
    tables: Sequence[BaseEmbeddingConfig],
    constraints: Mapping[str, ParameterConstraints],
    passes: int = len(ROUNDS),
    route: str | None = None,
    exact_s: float | None = None,
    record: "Recorder | None" = None,
    any_plan: bool = False,
) -> Solution:
    """`solve`, within the host's memory as well.

    While a rank is over its share of the host's memory, the table with most bytes there, of those that another kernel
    may hold, is kept out of it and all tables are placed again.

    Raises:
        PlanError: as `solve`.
        DoesNotFit: no order tried has room for every table, on its device or in the host's memory.
    """
    tried, least = dict(constraints), np.inf
    wishes = [tried.get(table.name) for table in tables]
    hosted = any(FUSED_UVM in kernels_for(model, *pair) for pair in zip(tables, wishes, strict=True))
    hosted |= any(shard.tier == DDR for wish in wishes if wish is not None for shard in wish.shards or ())
    over: tuple[int, float, float] | None = None
    while True:
        try:
            if any_plan:
                solution = solve(model, tables, tried, passes, route, any_plan=True)
            if not any_plan or hosted:  # the whole search decides what goes to the host, and so whether it fits there
                solution = solve(model, tables, tried, passes, route, exact_s, record)
        except DoesNotFit as stuck:
            raise DoesNotFit(stuck.table, over) from None
        used = [placement.loads(model.topology)[HOST] for placement in solution.placements]
        held = np.sum(used, axis=0)
        rank = int(held.argmax())
        if held[rank] <= model.host_room:
            return solution
        least = min(least, float(held[rank]))
        over = rank, float(held[rank]), least
        there = sorted((n for n in range(len(tables)) if used[n][rank] > 0), key=lambda n: -float(used[n][rank]))
        movable = [n for n in there if len(kernels_for(model, tables[n], tried.get(tables[n].name))) > 1]
        if not movable:
            raise DoesNotFit(there[0], over)
        name = tables[movable[0]].name
        tried[name] = replace(tried[name], compute_kernels=[str(EmbeddingComputeKernel.FUSED)])


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
    """One greedy search; `bounds` are those of the sets of switches, least first."""

    def __init__(self, problem: Problem, passes: int, record: "Recorder | None" = None) -> None:
        self.problem, self.passes, self.record = problem, passes, record
        self.bounds = mode_bounds(problem.model, problem.priced)
        self.bound_ms = self.bounds[0].ms if self.bounds else 0.0
        self.small = len(problem.options) * problem.num_ranks <= SMALL
        self.many = len(problem.options) * problem.num_ranks > MANY
        self.near = NEAR_MANY if self.many else NEAR
        self.most_starts = max(2, STARTS // (len(problem.options) * problem.num_ranks))
        self.best: State | None = None
        self.best_ms = np.inf

    def run(self, any_plan: bool = False) -> Solution:
        stuck: list[int] = []
        starts = self.starts()
        if any_plan:
            state = next((state for start in starts if (state := self._placed(start, stuck)) is not None), None)
            if state is not None:
                return Solution(state.placements(), self.bound_ms)
        if self.passes and starts and len(self.problem.options) * self.problem.num_ranks <= ANNEALED:
            self._anneal(starts)
        more = self.best is None or (self.passes and self.problem.num_nodes > 1 and not self._near())
        if more and not any_plan:  # else every start was placed above
            self.prune()
            (self._best_of if self.many else self._one_by_one)(starts, stuck)
        if self.best is None:
            raise DoesNotFit(stuck[0] if stuck else self.problem.by_bytes[0])
        if self.passes and not any_plan and not self._near():
            self._reroute()
        return Solution(self.best.placements(), self.bound_ms)

    def _one_by_one(self, starts: list[Bound], stuck: list[int]) -> None:
        """Places and improves one plan after the other, the most promising sets of options first."""
        improved, pruned_at = 0, np.inf
        for start in starts:
            if start.ms >= self.best_ms * LEAST or self._near():
                break
            state = self._placed(start, stuck)
            if state is None:
                continue
            self.watch("placed", state)
            self.keep(state)
            if self._near():
                break
            if self.best_ms < pruned_at * LEAST:
                self.prune()
                pruned_at = self.best_ms
            hopeless = not self.small and self.step_ms(state) > self.best_ms * HOPELESS
            if not self.passes or hopeless:
                continue
            self._improved(state)
            improved += 1
            if improved >= self.most_starts:
                break

    def _best_of(self, starts: list[Bound], stuck: list[int]) -> None:
        """Places several plans, and improves the best of them."""
        left = max(2, PLACED // (len(self.problem.options) * self.problem.num_ranks))
        for start in starts:
            if left == 0 or start.ms >= self.best_ms * LEAST or self._near():
                break
            state = self._placed(start, stuck)
            if state is not None:
                left -= 1
                self.watch("placed", state)
                self.keep(state)
        if self.best is not None and self.passes and not self._near():
            self.prune()
            self._improved(self.best.copy())

    def _anneal(self, starts: list[Bound]) -> None:
        """Many plans at once, and exchanges in the best of them."""
        problem, enough_ms = self.problem, self.bound_ms * (1 + self.near)
        copies = COPIES * (1 + (problem.num_nodes > 1))
        try:
            anneal = Anneal(problem, starts[:STARTED], copies)
        except CannotAnneal:
            return
        sweeps = max(SWEEPS, MOVES // len(problem.options))
        for state in anneal.run(sweeps, enough_ms, self.step_ms, record=self.record):
            self.keep(state)
            if self._near():
                return
            exchange(problem, state, enough_ms, self.watch("exchanged"))
            problem.add_up(state)
            self.keep(state)

    def step_ms(self, state: State) -> float:
        """The step of a plan: under a pipeline by the cost model, since the terms are those of its chain alone."""
        model = self.problem.model
        if model.workload.pipeline == "none":
            return self.problem.step_ms(state)
        loads = sum((each.loads(model.topology) for each in state.placements()), np.zeros((K, self.problem.num_ranks)))
        return float(model.step_ms(loads))

    def starts(self) -> list[Bound]:
        """Sets of options, the most promising first."""
        problem = self.problem
        found = list(self.bounds)
        flat = [option for choices in problem.options for option in choices]
        schemes = np.array([option.proposal.scheme for option in flat])
        per = np.diff(np.append(problem.priced.starts, len(flat)))
        for scheme in dict.fromkeys(schemes.tolist()):
            mine: NDArray[np.bool_] = schemes == scheme
            some = np.repeat(np.maximum.reduceat(mine, problem.priced.starts), per)
            mine = mine | ~some  # tables that it cannot cut go by any
            bits = int(np.bitwise_and.reduce(problem.priced.flags[mine]))
            bound = bound_of(problem.model, problem.priced, mine, bits)
            if bound is not None:
                found.append(bound)
        unique: dict[bytes, Bound] = {}
        for bound in sorted(found, key=lambda bound: bound.ms):
            unique.setdefault(bound.allowed.tobytes(), bound)
        return list(unique.values())

    def _placed(self, start: Bound, stuck: list[int]) -> State | None:
        """Every table placed under the options of `start`, with memory first where they do not fit otherwise."""
        problem = self.problem
        for memory_first, order in ((False, problem.by_work), (True, problem.by_bytes)):
            state = problem.start(start.allowed, None if memory_first else start.floor)
            state.balance = BALANCE
            for table in order:
                found = problem.best(state, table, memory_first)
                if found is None and memory_first:
                    state.allowed = None
                    found = problem.best(state, table, memory_first)
                    state.allowed = start.allowed
                if found is None:
                    stuck.append(table)
                    break
                problem.put(state, table, found[1])
            else:
                state.allowed, state.floor, state.balance = None, None, TIE
                return state
        return None

    def _improved(self, state: State) -> None:
        """Rounds of local search with ever less weight on balance; the last until nothing helps."""
        rounds = ROUNDS if self.small else (ROUNDS[-2:] if self.many else (ROUNDS[0], ROUNDS[-1]))
        for balance in rounds[-self.passes :]:
            state.balance = balance
            for _ in range(3 if self.small else 1):
                again = improve(self.problem, state, self.bound_ms * (1 + self.near), *self._watches())
                self.keep(state)
                if self._near():
                    return
                if not again:
                    break

    def watch(self, stage: str, *looked_at: State) -> Watch | None:
        """What is told each plan, where the search is recorded; and tells it some."""
        if self.record is None:
            return None
        told = self.record.watch(self.problem, stage)
        for state in looked_at:
            told(state)
        return told

    def _watches(self) -> tuple[Watch | None, Watch | None]:
        return self.watch("moved"), self.watch("exchanged")

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
                improve(self.problem, state, 0.0, *self._watches())
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
