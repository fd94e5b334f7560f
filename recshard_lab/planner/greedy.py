"""Greedy planning: choose scheme and ranks of every table together, then improve one and two tables at a time.

1. Every registered scheme that the constraints allow proposes rectangles; each rectangle's loads are computed once,
   for all tables in one go (`options.py`).
2. Tables are placed from the largest down, in several plans at once (`state.py`): everything under one scheme, for
   each scheme; the best of all schemes at each table; and the same, but where what is below a phase's fair share
   costs nothing, so that early tables are not cut without need.
3. Local search on the true step time (`local_search.py`): every plan is improved, the best few go on.
4. Kicks, where tables are few: each is forced under the other schemes and the rest is improved around it.

5. All tables under another route at once.

Uniform starts matter since some costs only go away when all tables change together (a collective, a fixed cost); the
plan is never worse than the best of them. A plan in which a table fits nowhere is started again with memory first:
largest bytes first, on the emptiest ranks. The result depends on the input alone (no clock, no dice).
"""

from collections.abc import Mapping, Sequence

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.planner.cost import CostModel
from recshard_lab.planner.local_search import LEAST, improve
from recshard_lab.planner.options import DoesNotFit, Placement, options_of
from recshard_lab.planner.state import TIE, Problem, State
from recshard_lab.sharding import ROUTES, ParameterConstraints, PlanError

ROUNDS = ((1.0, 1), (0.3, 1), (TIE, 1))
"""Rounds of local search: weight of the balance term, and how many plans go on. A large weight first looks past local
optima, in which no table alone can shorten the slowest ranks of all phases."""
STARTS = 3  # that are improved; one more where nodes add schemes
FEW = 12  # tables up to which each is kicked; beyond, it gains little for its time
SMALL = 64  # tables x ranks up to which all starts are improved to the end


def solve(
    model: CostModel,
    tables: Sequence[BaseEmbeddingConfig],
    constraints: Mapping[str, ParameterConstraints],
    passes: int = len(ROUNDS),
    route: str | None = None,
) -> list[Placement]:
    """The placement of every table, in their order.

    Args:
        model: costs of `tables`.
        tables: what to place.
        constraints: table name -> what is allowed.
        passes: rounds of local search, at most `ROUNDS`; with 0 the best start as it is.
        route: the only one, where it applies; the cheapest for each table when left out.

    Raises:
        PlanError: no tables; a table that no allowed scheme can cut.
        DoesNotFit: no order tried has room for every table.
    """
    if not tables:
        raise PlanError("there are no tables to plan: give at least one EmbeddingBagConfig or EmbeddingConfig")
    problem = Problem(model, options_of(model, tables, constraints, route))
    states = _placed(problem)
    small = len(tables) * problem.num_ranks <= SMALL
    starts = STARTS + (model.topology.num_nodes > 1)
    states = states if small else sorted(states, key=problem.step_ms)[:starts]
    shortest = min(states, key=problem.step_ms)
    first = shortest.copy(shortest.scheme)  # as it is: what local search gains in balance it may lose in time
    kept = first.copy(first.scheme)  # improved under its scheme first, which finds what a reader finds who asks for it
    for state in states:
        state.scheme = None
    for balance, most in ROUNDS[:passes]:
        if balance == TIE and kept not in states:
            states.append(kept)
        for state in states:
            state.balance = balance
        if not improve(problem, states) and balance == TIE:
            break
        states = states if small else sorted(states, key=problem.step_ms)[:most]
        kept.scheme = None if kept in states else kept.scheme
    best = min([*states, kept, first], key=problem.step_ms)
    if passes and len(tables) <= FEW:
        best = _kicked(problem, best)
    if passes:
        best = _rerouted(problem, best)
    return best.placements()


def _rerouted(problem: Problem, best: State) -> State:
    """All tables under another route at once, since some costs only go away together; what helps is improved."""
    others = [state for route in ROUTES if (state := problem.rerouted(best, route)) is not None]
    helping = [state for state in others if problem.step_ms(state) < problem.step_ms(best) * LEAST]
    if helping:
        improve(problem, helping)
    return min([best, *helping], key=problem.step_ms)


def _kicked(problem: Problem, best: State) -> State:
    """Forces the tables, one by one, under each other scheme and improves the rest; what helps stays."""
    now = problem.step_ms(best)
    for table in problem.by_work:
        placement = best.placed[table]
        assert placement is not None
        others = [best.copy(scheme) for scheme in problem.schemes if scheme != placement.option.proposal.scheme]
        for state in others:
            state.take(table)
        kicked: list[State] = []
        for state, found in zip(others, problem.best(table, others), strict=True):
            if found is not None:
                state.put(table, found[1])
                state.scheme = None
                kicked.append(state)
        if kicked:
            improve(problem, kicked)
            first = min(kicked, key=problem.step_ms)
            if problem.step_ms(first) < now * LEAST:
                best, now = first, problem.step_ms(first)
    return best


def _placed(problem: Problem) -> list[State]:
    """Every start with all tables placed.

    Raises:
        DoesNotFit: of each start some table fits nowhere, in either order.
    """
    starts: list[State] = [problem.start(), problem.start(fair=problem.fair)]
    if len(problem.schemes) > 1:
        starts += [problem.start(scheme) for scheme in problem.schemes]
    done, stuck = _fill(problem, starts, problem.by_work)
    if stuck:
        again = [problem.start(scheme) for scheme in dict.fromkeys(state.scheme for state, _ in stuck)]
        more, stuck = _fill(problem, again, problem.by_bytes, memory_first=True)
        done += more
    if not done:
        raise DoesNotFit(stuck[0][1])
    for state in done:
        state.fair = None
        state.balance = TIE
    return done


def _fill(
    problem: Problem, states: list[State], order: list[int], memory_first: bool = False
) -> tuple[list[State], list[tuple[State, int]]]:
    """The states with every table placed, and those that are stuck, each with the table that does not fit.

    With memory first a table may leave the scheme of its state where it does not fit under it.
    """
    stuck: list[tuple[State, int]] = []
    for table in order:
        if not states:
            break
        going: list[State] = []
        for state, found in zip(states, problem.best(table, states, memory_first), strict=True):
            if found is None and memory_first and state.scheme is not None:
                scheme, state.scheme = state.scheme, None
                (found,) = problem.best(table, [state], memory_first)
                state.scheme = scheme
            if found is None:
                stuck.append((state, table))
                continue
            state.put(table, found[1])
            going.append(state)
        states = going
    return states, stuck
