"""Local search: take one table out and put it back in the best way; exchange two; until nothing helps.

Every step keeps the plan valid and within memory and shortens the score, so it can stop at any time.

Shape letters: R rows (phases that ranks differ in, and memory), W ranks, C pairs of tables.
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
        moved, exchanged: told each plan that comes of it.
    """
    now = before = problem.score(state)
    for table in problem.by_work:
        was = problem.take(state, table)
        found = problem.best(state, table)
        # nothing found: rounding at the last byte of a full rank
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
    """Exchanges one-piece tables of the busiest ranks with those of others while that helps and pays."""
    now = problem.score(state)
    single = [(t, put) for t, put in enumerate(state.placed) if put is not None and len(put.ranks) == 1]
    single = [(t, put) for t, put in single if put.node is None]
    if len(single) < 2:
        return
    allowed = [_may_go(problem, t, put) for t, put in single]
    free = all(ranks is None for ranks in allowed)
    rank_of = np.array([put.ranks[0] for _, put in single], dtype=np.intp)
    own = np.concatenate([put.own for _, put in single], axis=1)  # [R, singles]
    for _ in range(min(len(single), MOST_EXCHANGES)):
        if problem.step_ms(state) <= bound_ms:
            return
        busiest = list(
            dict.fromkeys([int(state.used[:-1].sum(axis=0).argmax()), *state.used[:-1].argmax(axis=1).tolist()])
        )
        for rank in busiest:
            mine, others = np.flatnonzero(rank_of == rank), np.flatnonzero(rank_of != rank)
            if not len(mine) or not len(others):
                continue
            i, j = (pairs.ravel() for pairs in np.meshgrid(mine, others, indexing="ij"))
            if len(i) > MOST_PAIRS:  # those whose work differs least, but gains something
                gain = own[:-1, i].sum(axis=0) - own[:-1, j].sum(axis=0)
                near = np.argsort(np.where(gain > 0, gain, np.inf), kind="stable")[:MOST_PAIRS]
                i, j = i[near], j[near]
            score = _scores(problem, state, own[:, j] - own[:, i], rank, rank_of[j])
            if not free:
                ok = [
                    _goes(allowed[a], int(rank_of[b])) and _goes(allowed[b], rank)
                    for a, b in zip(i.tolist(), j.tolist(), strict=True)
                ]
                score = np.where(ok, score, np.inf)
            c = int(score.argmin())
            if not score[c] < now * LEAST:
                continue
            a, b = int(i[c]), int(j[c])
            there = int(rank_of[b])
            for k, to in ((a, there), (b, rank)):
                table, put = single[k]
                problem.take(state, table)
                moved = problem.made(table, put.at, [to])
                problem.put(state, table, moved)
                single[k] = (table, moved)
                rank_of[k] = to
            now = float(score[c])
            if exchanged is not None:
                exchanged(state)
            break
        else:
            return


def _scores(problem: Problem, state: State, gain: Array, rank: int, there: Index) -> Array:
    """``[C]`` scores where `gain` ``[R, C]`` goes to `rank` and comes from ranks `there` ``[C]``."""
    used = state.used
    new_here, new_there = used[:, rank, None] + gain, used[:, there] - gain
    first = np.argsort(-used, axis=1)[:, :3] if used.shape[1] <= 64 else _top_three(used)  # [R, 3] ranks
    rest = np.full(gain.shape, -np.inf)
    for k in range(first.shape[1] - 1, -1, -1):  # the most that any third rank has
        at = first[:, k, None]
        value = np.take_along_axis(used, at, axis=1)
        rest = np.where((at != rank) & (at != there[None, :]), value, rest)
    most = np.maximum(np.maximum(new_here, new_there), rest)
    squares = np.einsum("rw,rw->r", used[:-1], used[:-1])[:, None]
    squares = squares + gain[:-1] * (2 * (used[:-1, rank, None] - used[:-1, there]) + 2 * gain[:-1])
    spread = np.sqrt(np.maximum(squares, 0.0) / problem.num_ranks).sum(axis=0)
    shared = problem.step_ms(state) - float(used[:-1].max(axis=1).sum())
    score = most[:-1].sum(axis=0) + shared + state.balance * spread
    return np.asarray(np.where(most[-1] + state.nbytes <= problem.capacity, score, np.inf))


def _top_three(used: Array) -> Index:
    found = np.argpartition(-used, 2, axis=1)[:, :3]
    return np.asarray(np.take_along_axis(found, np.argsort(-np.take_along_axis(used, found, axis=1), axis=1), axis=1))


def _may_go(problem: Problem, table: int, put: Put) -> frozenset[int] | None:
    """Where a one-piece table may lie; None: anywhere."""
    option = problem.options[table][put.at]
    if option.proposal.assignments is not None:
        return frozenset(rank for (rank,) in option.proposal.assignments)
    return None if len(option.usable) == problem.num_ranks else option.usable


def _goes(ranks: frozenset[int] | None, rank: int) -> bool:
    return ranks is None or rank in ranks
