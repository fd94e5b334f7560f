"""Local search: moves one table to its best place, and exchanges two, until neither shortens the step.

Every step keeps the plan valid and within memory and shortens the score, so the search can stop at any time.

Shape letters: R rows (phases that ranks differ in, and memories), T tables, C pairs of tables, U units (nodes, or ranks
if there is one node), L ranks of a unit.
"""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from recshard_lab.planner.search.problem import Problem
from recshard_lab.planner.search.state import Put, State
from recshard_lab.planner.workload import Array

Index: TypeAlias = NDArray[np.intp]
Watch: TypeAlias = Callable[[State], None]

ENOUGH = 1e-3  # a pass that gains less than this share is the last
MOST_EXCHANGES = 100  # in one pass
MOST_PAIRS = 1024  # exchanges looked at in one array operation
LEAST = 1 - 1e-9  # a gain below is rounding


def improve(
    problem: Problem, state: State, bound_ms: float = 0.0, moved: Watch | None = None, exchanged: Watch | None = None
) -> bool:
    """One pass over all tables; whether the plan gained enough to go on. Ends where the step is down to `bound_ms`.

    Args:
        moved, exchanged: callbacks, called with each new plan.
    """
    now = before = problem.score(state)
    for table in problem.by_work:
        was = problem.take(state, table)
        found = problem.best(state, table)
        # None: rounding at the last byte of a full rank
        if found is None or found[0] >= now * LEAST:
            problem.put(state, table, was)
            continue
        problem.put(state, table, found[1])
        now = found[0]
        if moved is not None:
            moved(state)
        if problem.step_ms(state) <= bound_ms:
            break
    exchange(problem, state, bound_ms, exchanged)
    problem.add_up(state)
    return problem.score(state) < before * (1 - ENOUGH)


def exchange(problem: Problem, state: State, bound_ms: float = 0.0, exchanged: Watch | None = None) -> None:
    """Exchanges tables of the busiest nodes (ranks, if there is one node) with those of others while that helps.

    Only tables of one node take part. Each keeps its option, on the least busy ranks of the other's node.
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
    """The tables of a plan with all shards on one unit: on one node, or on one rank if there is one node.

    Attributes:
        tables: their numbers; unit: ``[T]`` that each is on; width: ranks of a unit, L.
        whole: ``[T, R, L]`` what each adds to its unit, of which `own` ``[T, R]`` to the rank of each of its `shards`
            ``[T]``, and `node` ``[T, R]`` to all.
        fixed: ``[T]`` whether its shards are on the first ranks of a unit; else on the least busy ones.
        allowed: ``[T, U]`` units that are allowed.
    """

    def __init__(self, problem: Problem, state: State, tables: list[int], width: int) -> None:
        self.problem, self.state, self.tables, self.width = problem, state, tables, width
        puts = [state.placed[table] for table in tables]
        rows, units = len(state.used), problem.num_ranks // width
        self.unit = np.array([put.ranks[0] // width for put in puts if put], dtype=np.intp)
        self.shards = np.array([len(put.ranks) for put in puts if put], dtype=np.intp)
        self.whole, self.own, self.node = np.zeros((len(tables), rows, width)), *np.zeros((2, len(tables), rows))
        self.fixed = np.zeros(len(tables), dtype=bool)
        self.allowed = np.ones((len(tables), units), dtype=bool)
        for at, put in enumerate(puts):
            assert put is not None
            self.own[at] = put.own.max(axis=1)
            self._refresh(at, put)
            option = put.placement.option
            listed = option.proposal.assignments
            if put.node is not None:
                self.node[at] = put.node[1][:, 0]
            if listed is not None or len(option.usable) < problem.num_ranks:
                self.fixed[at] = listed is not None
                ways = [ranks for ranks in listed or [] if len({rank // width for rank in ranks}) == 1]
                free = np.bincount(np.array(sorted(option.usable)) // width, minlength=units) == width
                self.allowed[at] = False if listed is not None else free
                self.allowed[at, [ranks[0] // width for ranks in ways]] = True

    @classmethod
    def of(cls, problem: Problem, state: State) -> "_Movable":
        width = problem.local if problem.num_nodes > 1 else 1
        tables = []
        for table, put in enumerate(state.placed):
            if put is not None and put.distinct and len(put.ranks) <= width and (put.node is None or width > 1):
                nodes = put.ranks // width
                if (nodes == nodes[0]).all():
                    tables.append(table)
        return cls(problem, state, tables, width)

    def scores(self, unit: int) -> tuple[Index, Index, Array]:
        """Pairs of a table on `unit` and one elsewhere, and the score of the plan with these exchanged."""
        used = self.state.used.reshape(len(self.state.used), -1, self.width)  # [R, U, L]
        mine, others = np.flatnonzero(self.unit == unit), np.flatnonzero(self.unit != unit)
        others = others[self.allowed[others, unit]]
        i, j = (pairs.ravel() for pairs in np.meshgrid(mine, others, indexing="ij"))
        ok = self.allowed[i, self.unit[j]]
        i, j = i[ok], j[ok]
        if len(i) > MOST_PAIRS:  # those whose work differs least, but gains something
            work = self.whole[:, : self.problem.phases].sum(axis=(1, 2))
            gain = work[i] - work[j]
            near = np.sort(np.argpartition(np.where(gain > 0, gain, np.inf), MOST_PAIRS)[:MOST_PAIRS])
            i, j = i[near], j[near]
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
        """Exchanges two tables, and gives their placements before."""
        problem, state = self.problem, self.state
        before = [(at, problem.take(state, self.tables[at])) for at in (i, j)]
        units = [int(self.unit[j]), int(self.unit[i])]
        for (at, put), unit in zip(before, units, strict=True):
            option = put.placement.option
            ranks = np.arange(unit * self.width, (unit + 1) * self.width)
            if self.fixed[at]:
                chosen = next(one for one in option.proposal.assignments or () if one[0] // self.width == unit)
                ranks = np.array(chosen)
            else:
                order = ranks[state.used[: problem.phases, ranks].sum(axis=0).argsort(kind="stable")][: len(put.ranks)]
                ranks = np.empty(len(order), dtype=np.intp)
                ranks[option.heavy_first] = order
            self._put(at, problem.made(self.tables[at], put.at, ranks))
        return before

    def restore(self, before: list[tuple[int, Put]]) -> None:
        """Takes an exchange back."""
        for at, put in before:
            self.problem.take(self.state, self.tables[at])
            self._put(at, put)

    def _put(self, at: int, put: Put) -> None:
        self.problem.put(self.state, self.tables[at], put)
        self.unit[at] = put.ranks[0] // self.width
        self._refresh(at, put)

    def _refresh(self, at: int, put: Put) -> None:
        self.whole[at] = 0.0
        self.whole[at][:, put.ranks % self.width] = put.own
        if put.node is not None:
            self.whole[at] += put.node[1]
