"""The placement problem as a mixed-integer program, solved by HiGHS through SciPy, with its own bound.

In the terms of the cost model (`terms.py`)::

    minimise    sum over phases of peak[p]  +  what placements cost everyone  +  what is paid once
    x[t, o]     option o of table t is taken               sum over o of x[t, o] = 1
    y[o, c, r]  shards of size c on rank r                 sum over r of y = count of c * x       (free assignments)
    z[o, a]     assignment a is taken                      sum over a of z = x                    (listed assignments)
    s[k]        switch k is on                             x[t, o] <= s[k] for options that turn it on
    peak[p]  >= ms of rank r, for every r                  bytes of rank r + bytes of every rank <= capacity
    the step <= that of the first plan

The first plan is the greedy search's, annealed for longer. `strong_bound` then improves the bound: HiGHS's own
relaxation splits shards. Options that a better plan cannot hold are left out (reduced costs of the dual bound, see
`bounds.py`). If ranks are interchangeable, rank 0 holds the table with most work if it is one shard, which removes
symmetric solutions.

Nonlinear costs are relaxed, so HiGHS's bound is a bound on the cost model's step: extras of switches cost nothing, and
a two-hop shard sends the least possible to other nodes. The result is the better of HiGHS's plan and the first plan, by
the cost model. Without a first plan, HiGHS looks for any plan.

Source of the idea of a MILP over row splits: RecShard (Sethi et al., ASPLOS 2022, section 4).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from recshard_lab.planner.search.anneal import Anneal
from recshard_lab.planner.search.bounds import strong_bound, worth_of
from recshard_lab.planner.search.greedy import ANNEALED, COPIES, STARTED, Search, Solution
from recshard_lab.planner.search.problem import Problem
from recshard_lab.planner.search.state import Put, State
from recshard_lab.planner.search.ways import CannotAnneal
from recshard_lab.planner.workload import Array

Index = NDArray[np.intp]
MOST_VARIABLES = 400_000
ANNEALING = 0.2  # share of the time for better plans, before HiGHS
HEATS = (1.0, 3.0, 0.4)  # of the temperatures at first
MOVES_A_SECOND, MOST_SWEEPS = 600, 200  # of all plans annealed; fewer where they take longer
PROVED = 1e-6  # share of a step; HiGHS is not run for less
EXCHANGED = 8  # placings for each table, to improve an annealed plan
BYTES = 1e-6  # memory in megabytes, so that coefficients are of one magnitude


@dataclass(eq=False)
class Program:
    """Rows and columns of a MILP, added one at a time."""

    cost: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    whole: list[int] = field(default_factory=list)
    rows: list[Index] = field(default_factory=list)
    columns: list[Index] = field(default_factory=list)
    values: list[Array] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def variable(self, cost: float = 0.0, upper: float = 1.0, whole: bool = True) -> int:
        """A new column."""
        self.cost.append(cost)
        self.upper.append(upper)
        self.whole.append(int(whole))
        return len(self.cost) - 1

    def constraint(self, low: float, high: float) -> int:
        """A new row, empty."""
        self.low.append(low)
        self.high.append(high)
        return len(self.low) - 1

    def add(self, rows: Sequence[int] | Index, column: int, values: Sequence[float] | Array) -> None:
        """Adds to a column."""
        at = np.asarray(rows, dtype=np.intp)
        self.rows.append(at)
        self.columns.append(np.full(len(at), column))
        self.values.append(np.asarray(values, dtype=float))


def solve_exactly(problem: Problem, search: Search, time_limit_s: float) -> Solution | None:
    """The best plan that HiGHS finds in the time, never worse than `search`'s, and the better of both bounds.

    Args:
        problem: what `search` searched.
        search: has run. If it found no plan, HiGHS looks for any.
        time_limit_s: seconds for HiGHS; building the program comes on top.

    Returns:
        None if neither `search` nor HiGHS found a plan.
    """
    import scipy.optimize  # heavy, and only needed here
    import scipy.sparse

    begun = time.monotonic()
    bound_ms, now, best = search.bound_ms, np.inf, search.best
    worth = np.ones(len(problem.priced.cost), dtype=bool)
    if best is not None:
        best = _annealed(problem, search, time_limit_s)
        now = problem.step_ms(best)
        worth = worth_of(search.bounds, problem.priced, now)
        if now <= bound_ms * (1 + 1e-9) or not worth.any():
            return Solution(best.placements(), min(now, max(bound_ms, now if not worth.any() else 0.0)))
        bound_ms = max(bound_ms, strong_bound(problem, now))
        if now <= bound_ms * (1 + PROVED):
            return Solution(best.placements(), bound_ms)
    program, ways = _program(problem, worth, now)
    if len(program.cost) > MOST_VARIABLES:
        return None if best is None else Solution(best.placements(), bound_ms)
    shape = (len(program.low), len(program.cost))
    at = (np.concatenate(program.rows), np.concatenate(program.columns))
    matrix = scipy.sparse.csc_matrix((np.concatenate(program.values), at), shape=shape)
    result = scipy.optimize.milp(
        np.array(program.cost),
        integrality=np.array(program.whole),
        bounds=scipy.optimize.Bounds(0.0, np.array(program.upper)),
        constraints=scipy.optimize.LinearConstraint(matrix, np.array(program.low), np.array(program.high)),
        options={"time_limit": max(0.1, time_limit_s - (time.monotonic() - begun)), "mip_rel_gap": 1e-6},
    )
    if result.status == 2:  # no plan is better than the first
        return None if best is None else Solution(best.placements(), now)
    if result.mip_dual_bound is not None and np.isfinite(result.mip_dual_bound):
        bound_ms = max(bound_ms, min(now, float(result.mip_dual_bound) + problem.fixed_ms) * (1 - 1e-6))
    if result.x is not None:
        state = _state(problem, ways, result.x)
        if state is not None:
            search.watch("proven", state)
        if state is not None and search.step_ms(state) < search.best_ms:
            best = state
    return None if best is None else Solution(best.placements(), bound_ms)


def _annealed(problem: Problem, search: Search, seconds: float) -> State:
    """The best plan of `search` after annealing many plans for longer."""
    assert search.best is not None
    if len(problem.options) * problem.num_ranks > ANNEALED or not search.bounds:
        return search.best
    search.prune()
    starts = [start for start in search.starts() if start.ms < search.best_ms] or search.bounds[:1]
    sweeps = min(MOST_SWEEPS, max(4, int(MOVES_A_SECOND * seconds / len(problem.options))))
    for heat in HEATS:
        try:
            anneal = Anneal(problem, starts[:STARTED], COPIES)
        except CannotAnneal:
            break
        share = ANNEALING * seconds / len(HEATS)
        for state in anneal.run(sweeps, search.bound_ms, search.step_ms, heat, share, search.record):
            search.keep(state)
            search.improve_from(state, EXCHANGED * len(problem.options))
    return search.best


@dataclass(frozen=True, eq=False)
class Way:
    """The columns of one option: `taken`, and those of its shards ``[c, W]`` or of its listed assignments."""

    table: int
    at: int
    taken: int
    pieces: Index | None
    listed: list[int] | None


def _program(problem: Problem, worth: NDArray[np.bool_], now: float) -> tuple[Program, list[Way]]:
    priced, terms, ranks = problem.priced, problem.terms, problem.num_ranks
    program, ways = Program(), []
    phases, memories = problem.phases, problem.num_rows - problem.phases
    peaks = [program.variable(1.0, np.inf, whole=False) for _ in range(phases)]
    switches = [program.variable(float(s.fixed[:-1].sum()), whole=True) for s in terms.switches]
    load = np.array([[program.constraint(-np.inf, 0.0) for _ in range(ranks)] for _ in range(phases)])
    for phase in range(phases):
        program.add(load[phase], peaks[phase], -np.ones(ranks))
    room = np.array([[program.constraint(-np.inf, most * BYTES) for _ in range(ranks)] for most in problem.capacity])
    total = [program.constraint(0.0, np.inf) for _ in range(phases)]  # peak >= mean, which tightens the relaxation
    for phase in range(phases):
        program.add([total[phase]], peaks[phase], [1.0])
    rows = np.concatenate([load, room])  # [R, W]
    scale = np.append(np.ones(phases), np.full(memories, BYTES))
    for table, options in enumerate(problem.options):
        start = int(priced.starts[table])
        kept = [at for at in range(len(options)) if worth[start + at]] or list(range(len(options)))
        one = program.constraint(1.0, 1.0)
        for at in kept:
            option, index = options[at], start + at
            taken = program.variable(float(priced.shared_ms[index]))
            program.add([one], taken, [1.0])
            program.add(room.ravel(), taken, np.repeat(priced.shared_bytes[:, index] * BYTES, ranks))
            program.add(total, taken, -priced.mean[index, :phases])
            for k, switch in enumerate(switches):
                if int(priced.flags[index]) >> k & 1:
                    row = program.constraint(-np.inf, 0.0)
                    program.add([row], taken, [1.0])
                    program.add([row], switch, [-1.0])
            own = priced.own_of(index) * scale[:, None]  # [R, c]
            listed = option.proposal.assignments
            if listed is None:
                pieces = np.zeros((own.shape[1], ranks), dtype=np.intp)
                for kind, count in enumerate(option.counts):
                    row = program.constraint(0.0, 0.0)
                    program.add([row], taken, [-float(count)])
                    for rank in range(ranks):
                        most = (1.0 if option.distinct else float(count)) if rank in option.usable else 0.0
                        pieces[kind, rank] = program.variable(upper=most)
                        program.add([row], int(pieces[kind, rank]), [1.0])
                        program.add(rows[:, rank], int(pieces[kind, rank]), own[:, kind])
                if option.distinct and len(pieces) > 1:
                    for rank in range(ranks):
                        row = program.constraint(-np.inf, 1.0)
                        for kind in range(len(pieces)):
                            program.add([row], int(pieces[kind, rank]), [1.0])
                ways.append(Way(table, at, taken, pieces, None))
                continue
            columns = [taken] if len(listed) == 1 else [program.variable() for _ in listed]
            if len(listed) > 1:
                row = program.constraint(0.0, 0.0)
                program.add([row], taken, [-1.0])
                for column in columns:
                    program.add([row], column, [1.0])
            for chosen, column in zip(listed, columns, strict=True):
                adds = np.zeros((len(rows), ranks))
                np.add.at(adds.T, np.asarray(chosen), own[:, option.of].T)
                r, w = adds.nonzero()
                program.add(rows[r, w], column, adds[r, w])
            ways.append(Way(table, at, taken, None, columns))
    below = program.constraint(-np.inf, now - problem.fixed_ms)
    for column, cost in enumerate(list(program.cost)):
        if cost:
            program.add([below], column, [cost])
    _break_symmetry(problem, program, ways)
    return program, ways


def _break_symmetry(problem: Problem, program: Program, ways: list[Way]) -> None:
    """If all ranks are interchangeable, places the table with most work on rank 0, if it is one shard."""
    if any(way.listed is not None for way in ways) or any(
        len(option.usable) < problem.num_ranks for choices in problem.options for option in choices
    ):
        return
    first = problem.by_work[0]
    for way in (way for way in ways if way.table == first):
        alone = way.pieces is not None and way.pieces.shape[0] == 1 and problem.options[first][way.at].counts[0] == 1
        if alone and way.pieces is not None:
            for column in way.pieces[0, 1:].tolist():
                program.upper[column] = 0.0


def _state(problem: Problem, ways: list[Way], x: Array) -> State | None:
    """The plan that HiGHS found. None if it does not fit after rounding."""
    state = problem.start()
    for way in ways:
        if x[way.taken] < 0.5:
            continue
        option = problem.options[way.table][way.at]
        put: Put
        if way.listed is not None:
            chosen = (option.proposal.assignments or ())[int(np.argmax(x[way.listed]))]
            put = problem.made(way.table, way.at, chosen)
        else:
            assert way.pieces is not None
            ranks = np.zeros(len(option.of), dtype=np.intp)
            for kind in range(len(way.pieces)):
                many = np.rint(x[way.pieces[kind]]).astype(int)
                where = np.flatnonzero(option.of == kind)
                dealt = np.repeat(np.arange(problem.num_ranks), many)
                if len(dealt) != len(where):
                    return None
                ranks[where] = dealt
            put = problem.made(way.table, way.at, ranks)
        if state.placed[way.table] is not None:
            return None
        problem.put(state, way.table, put)
    return state if all(put is not None for put in state.placed) and problem.fits(state) else None
