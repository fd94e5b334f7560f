"""Local search: exchanges shards of pairs of tables, then takes a few tables out of the plan and places them again.

The second part is ruin and recreate. A round takes tables of a slowest node and of another node (ranks, if there is one
node). It can therefore move a table, exchange two, or arrange a group afresh. The tables return from the largest down,
each to its best place beside the rest. The new plan stays unless its score is longer by more than a random share, which
shrinks to zero in each cycle. Source: Schrimpf et al., "Record Breaking Optimization Results Using the Ruin and
Recreate Principle", J. Comput. Phys. 159 (2000).

A plan may lack tables that did not fit. Each round then takes one of them too. The new plan stays if the tables that it
lacks have no more bytes than that one.

Every plan stays within memory. The draws come from a generator with a fixed seed.

Shape letters: R rows (phases that ranks differ in, and memories), T tables, C pairs of tables, U units (nodes, or ranks
if there is one node), L ranks of a unit.
"""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from recshard_lab.planner.search.problem import Problem
from recshard_lab.planner.search.state import TIE, Put, State
from recshard_lab.planner.workload import Array

Index: TypeAlias = NDArray[np.intp]
Watch: TypeAlias = Callable[[State], None]

LEAST = 1 - 1e-9  # a gain below is rounding
MOST_EXCHANGES = 100  # in one pass
MOST_PAIRS = 512  # exchanges looked at in one array operation
SEED = 30
CYCLES = 6  # in which the search starts again from the best plan, with other draws
TAKEN = 8  # tables that a round takes out, at most
BALANCE = 0.3  # weight of the balance term at first; `TIE` at the end
LONGER = 3e-3  # mean share by which a new plan may be longer, at first
NOISE = 0.3  # of the logarithm of a table's work, where it decides which table returns first
FIRST = 0.5  # share of the rounds in which the table that a plan lacks comes first
AFRESH = 50  # rounds after which the plan is added up afresh


def improve(
    problem: Problem,
    state: State,
    placings: int,
    enough_ms: float = 0.0,
    moved: Watch | None = None,
    exchanged: Watch | None = None,
) -> None:
    """Shortens a plan in place.

    Args:
        placings: number of tables to place.
        enough_ms: the search ends at a plan whose step is at most this.
        moved, exchanged: callbacks, called with each new plan.
    """
    exchange(problem, state, enough_ms, exchanged)
    problem.add_up(state)
    rounds = _Rounds(problem, state)
    best, best_ms = list(state.placed), problem.step_ms(state)
    left, length = placings, max(1, placings // CYCLES)
    cycle = left // length
    while left > 0 and best_ms > enough_ms:
        if left // length < cycle:
            cycle = left // length
            state.placed[:] = best
            problem.add_up(state)
            rounds = _Rounds(problem, state, SEED + cycle)
        share = left % length / length
        state.balance = TIE + (BALANCE - TIE) * share
        limit = problem.score(state) * (LEAST + LONGER * share * rounds.draws.exponential())
        tried, new = rounds.one(limit)
        left -= tried
        if new:
            if moved is not None:
                moved(state)
            if (ms := problem.step_ms(state)) < best_ms * LEAST:
                best, best_ms = list(state.placed), ms
    state.placed[:], state.balance = best, TIE
    problem.add_up(state)


def complete(problem: Problem, state: State, placings: int) -> int:
    """Places the tables that a plan lacks, for which others move, while there is room.

    Args:
        placings: number of tables to place, at most.

    Returns:
        The number of tables placed.
    """
    left = placings
    if None in state.placed:
        rounds = _Rounds(problem, state)
        while left > 0 and rounds.lacks:
            left -= rounds.one()[0]
        problem.add_up(state)
    return placings - left


class _Rounds:
    """Rounds of ruin and recreate on one plan, with what it `lacks`: tables that are not placed."""

    def __init__(self, problem: Problem, state: State, seed: int = SEED) -> None:
        self.problem, self.state = problem, state
        self.draws = np.random.default_rng(seed)
        self.width = problem.local if problem.num_nodes > 1 else 1
        self.work, self.nbytes = (
            np.minimum.reduceat(each, problem.priced.starts)
            for each in (problem.priced.cost, problem.priced.total_bytes.sum(axis=0))
        )
        self.there: NDArray[np.bool_] = np.zeros((len(self.work), problem.num_ranks // self.width), dtype=bool)
        for table, put in enumerate(state.placed):
            self._note(table, put)
        self.lacks = [table for table, put in enumerate(state.placed) if put is None]
        self.count = 0

    def one(self, limit: float = np.inf) -> tuple[int, bool]:
        """The number of tables placed, and whether the plan is new: it has to score less than `limit`."""
        problem, state = self.problem, self.state
        self.count += 1
        if self.count % AFRESH == 0:
            problem.add_up(state)
        lacking = int(self.draws.choice(self.lacks)) if self.lacks else None
        taken = self._taken(lacking).tolist()
        before = [(table, None if table == lacking else problem.take(state, table)) for table in taken]
        tried, back, left_out = 0, list[int](), list[int]()
        for table in taken:
            found = problem.best(state, table)
            tried += 1
            if found is not None and found[0] < limit:
                problem.put(state, table, found[1])
                back.append(table)
                continue
            left_out.append(table)
            if lacking is None or self.nbytes[left_out].sum() > self.nbytes[lacking]:
                break  # the other tables only add to it
        else:
            for table in taken:
                self._note(table, state.placed[table])
            self.lacks = [*(table for table in self.lacks if table != lacking), *left_out]
            return tried, True
        for table in back:
            problem.take(state, table)
        for table, put in before:
            if put is not None:
                problem.put(state, table, put)
        return tried, False

    def _taken(self, lacking: int | None) -> NDArray[np.intp]:
        """`lacking`, and tables of a slowest unit and another; of any two if the plan lacks tables. Largest first."""
        phases = self.state.used[: self.problem.phases]
        row = int(self.draws.integers(len(phases) + 1))
        busy = phases[row] if row < len(phases) else phases.sum(axis=0)
        units = self.draws.integers(self.there.shape[1], size=2)
        if lacking is None:
            units[0] = busy.argmax() // self.width
        among = np.flatnonzero(self.there[:, units].any(axis=1))
        taken = self.draws.choice(among, min(len(among), int(self.draws.integers(1, TAKEN + 1))), replace=False)
        if lacking is not None:
            taken = np.append(taken, lacking)
        size = (self.work if lacking is None else self.nbytes)[taken]
        if lacking is not None and self.draws.random() < FIRST:
            size[-1] = np.inf
        return taken[np.argsort(self.draws.normal(0.0, NOISE, len(taken)) - np.log(np.maximum(size, 1e-12)))]

    def _note(self, table: int, put: Put | None) -> None:
        self.there[table] = False
        if put is not None:
            self.there[table, put.ranks // self.width] = True


def exchange(problem: Problem, state: State, bound_ms: float = 0.0, exchanged: Watch | None = None) -> None:
    """Exchanges shards on the busiest nodes (ranks, if there is one node) with those on others while that helps.

    The shards of a table on a node move together, to the least busy ranks of the other node. Each keeps its option.
    """
    movable = _Movable.of(problem, state)
    if len(movable.tables) < 2:
        return
    now = problem.score(state)
    for _ in range(min(len(movable.tables), MOST_EXCHANGES)):
        if problem.step_ms(state) <= bound_ms:
            return
        phases = state.used[: problem.phases]
        busiest = [phases.sum(axis=0).argmax(), *phases.argmax(axis=1)]
        for unit in dict.fromkeys((np.array(busiest) // movable.width).tolist()):
            i, j, score = movable.scores(unit)
            if not len(j) or not score.min() < now * LEAST:
                continue
            c = int(score.argmin())
            before = movable.swap(int(i[c]), int(j[c]))
            found = problem.score(state)
            if not found < now * LEAST or not problem.fits(state):  # uneven shards: the scores are not exact
                movable.restore(before)
                continue
            now = found
            if exchanged is not None:
                exchanged(state)
            break
        else:
            return


class _Movable:
    """The shards of a table on one unit, for each table and unit: a node, or a rank if there is one node.

    A table on every unit has none: its shards have nowhere else to go.

    Attributes:
        tables: ``[T]`` of which table; at: ``[T]`` which of its shards; unit: ``[T]`` that they are on; width: ranks of
            a unit, L.
        whole: ``[T, R, L]`` what each adds to its unit, of which `own` ``[T, R]`` to the rank of each of its `shards`
            ``[T]``, and `node` ``[T, R]`` to all.
        fixed: ``[T]`` whether its shards are on the first ranks of a unit; else on the least busy ones.
        allowed: ``[T, U]`` units that are allowed.
    """

    def __init__(self, problem: Problem, state: State, windows: list[tuple[int, Index]], width: int) -> None:
        self.problem, self.state, self.width = problem, state, width
        self.tables = [table for table, _ in windows]
        self.at = [shards for _, shards in windows]
        rows, units, count = len(state.used), problem.num_ranks // width, len(windows)
        self.unit: Index = np.zeros(count, dtype=np.intp)
        self.shards = np.array([len(shards) for shards in self.at], dtype=np.intp)
        self.whole, self.own, self.node = np.zeros((count, rows, width)), *np.zeros((2, count, rows))
        self.fixed = np.zeros(count, dtype=bool)
        self.free = np.ones((count, units), dtype=bool)
        self.allowed = np.ones((count, units), dtype=bool)
        self.windows: dict[int, list[int]] = {}
        for window, table in enumerate(self.tables):
            self.windows.setdefault(table, []).append(window)
            put = state.placed[table]
            assert put is not None
            option = put.placement.option
            listed = option.proposal.assignments
            if listed is not None or len(option.usable) < problem.num_ranks:
                self.fixed[window] = listed is not None
                ways = [ranks for ranks in listed or [] if len({rank // width for rank in ranks}) == 1]
                free = np.bincount(np.array(sorted(option.usable)) // width, minlength=units) == width
                self.free[window] = False if listed is not None else free
                self.free[window, [ranks[0] // width for ranks in ways]] = True
        for table in self.windows:
            self._refresh(table)

    @classmethod
    def of(cls, problem: Problem, state: State) -> "_Movable":
        width = problem.local if problem.num_nodes > 1 else 1
        windows = []
        for table, put in enumerate(state.placed):
            if put is None or not put.distinct or (put.node is not None and width == 1):
                continue
            units = put.ranks // width
            there = np.unique(units)
            listed = put.placement.option.proposal.assignments is not None
            if len(there) == 1 or (not listed and len(there) < problem.num_ranks // width):
                windows += [(table, np.flatnonzero(units == unit)) for unit in there]
        return cls(problem, state, windows, width)

    def scores(self, unit: int) -> tuple[Index, Index, Array]:
        """Pairs of shards of a table on `unit` and of one elsewhere, and the score of the plan with these exchanged."""
        used = self.state.used.reshape(len(self.state.used), -1, self.width)  # [R, U, L]
        mine, others = np.flatnonzero(self.unit == unit), np.flatnonzero(self.unit != unit)
        others = others[self.allowed[others, unit]]
        near = min(len(others), -(-MOST_PAIRS // max(1, len(mine))))
        if near < len(others):  # of each, those with the next less work
            work = self.whole[:, : self.problem.phases].sum(axis=(1, 2))
            others = others[work[others].argsort(kind="stable")]
            last = np.searchsorted(work[others], work[mine]).clip(near)[:, None]
            i, j = np.repeat(mine, near), others[(last - near + np.arange(near)).ravel()]
        else:
            i, j = (pairs.ravel() for pairs in np.meshgrid(mine, others, indexing="ij"))
        ok = self.allowed[i, self.unit[j]]
        i, j = i[ok], j[ok]
        if not len(i):
            return i, j, np.zeros(0)
        there = self.unit[j]
        here = self._with(used[:, unit] - self.whole[i], j)
        other = self._with(used[:, there].transpose(1, 0, 2) - self.whole[j], i)  # [C, R, L]
        peaks = used.max(axis=2)
        first = np.argsort(-peaks, axis=1)[:, :3]  # [R, 3] units
        rest = np.full((len(peaks), len(i)), -np.inf)
        for k in range(first.shape[1] - 1, -1, -1):  # the most that any third unit has
            at = first[:, k, None]
            rest = np.where((at != unit) & (at != there), np.take_along_axis(peaks, at, axis=1), rest)
        most = np.maximum(np.maximum(here.max(axis=2), other.max(axis=2)).T, rest)
        count = self.problem.phases
        squares = np.einsum("rul,rul->ru", used[:count], used[:count])
        changed = sum(np.einsum("crl,crl->rc", one[:, :count], one[:, :count]) for one in (here, other))
        squares = squares.sum(axis=1)[:, None] - squares[:, unit, None] - squares[:, there] + changed
        spread = np.sqrt(np.maximum(squares, 0.0) / self.problem.num_ranks).sum(axis=0)
        shared = self.problem.step_ms(self.state) - float(peaks[:count].max(axis=1).sum())
        score = most[:count].sum(axis=0) + shared + self.state.balance * spread
        fits = (most[count:].T + self.state.nbytes <= self.problem.capacity).all(axis=1)
        return i, j, np.asarray(np.where(fits, score, np.inf))

    def _with(self, used: Array, tables: Index) -> Array:
        """``[C, R, L]`` of units with `used`, with one more table on each."""
        place = used[:, : self.problem.phases].sum(axis=1).argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
        place = np.where(self.fixed[tables, None], np.arange(self.width), place)
        shards = place < self.shards[tables, None]
        return np.asarray(used + self.own[tables][:, :, None] * shards[:, None] + self.node[tables][:, :, None])

    def swap(self, i: int, j: int) -> list[tuple[int, Put]]:
        """Exchanges the shards of two tables, and gives the tables' placements before."""
        problem, state = self.problem, self.state
        before = [(self.tables[at], problem.take(state, self.tables[at])) for at in (i, j)]
        units = [int(self.unit[j]), int(self.unit[i])]
        for window, (table, put), unit in zip((i, j), before, units, strict=True):
            option, mine = put.placement.option, self.at[window]
            ranks = np.arange(unit * self.width, (unit + 1) * self.width)
            if self.fixed[window]:
                chosen = next(one for one in option.proposal.assignments or () if one[0] // self.width == unit)
                placed = np.array(chosen)
            else:
                placed = put.ranks.copy()
                heavy = option.heavy_first[np.isin(option.heavy_first, mine)]
                placed[heavy] = ranks[state.used[: problem.phases, ranks].sum(axis=0).argsort(kind="stable")][
                    : len(mine)
                ]
            problem.put(state, table, problem.made(table, put.at, placed))
            self._refresh(table)
        return before

    def restore(self, before: list[tuple[int, Put]]) -> None:
        """Takes an exchange back."""
        for table, put in before:
            self.problem.take(self.state, table)
            self.problem.put(self.state, table, put)
            self._refresh(table)

    def _refresh(self, table: int) -> None:
        put = self.state.placed[table]
        assert put is not None
        units = put.ranks // self.width
        for window in self.windows[table]:
            shards = self.at[window]
            unit = self.unit[window] = units[shards[0]]
            self.own[window] = put.own[:, shards].max(axis=1)
            self.whole[window] = 0.0
            self.whole[window][:, put.ranks[shards] % self.width] = put.own[:, shards]
            if put.node is not None:
                self.node[window] = put.node[1][:, np.searchsorted(put.node[0], unit)]
                self.whole[window] += self.node[window][:, None]
            self.allowed[window] = self.free[window]
            self.allowed[window, units[units != unit]] = False
