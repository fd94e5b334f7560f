"""Local search: take one table out and put it back in the best way; exchange two; until nothing helps.

Every step keeps the plan valid and within memory and shortens the score, so it can stop at any time.

Shape letters: K loads, W ranks, C pairs of tables.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from recshard_lab.planner.options import Placement
from recshard_lab.planner.state import Problem, State

Index: TypeAlias = NDArray[np.intp]

ENOUGH = 1e-3  # a pass that gains less than this share is the last
MOST_PAIRS = 256  # exchanges looked at in one array operation
LEAST = 1 - 1e-9  # a gain below is rounding


def improve(problem: Problem, states: Sequence[State]) -> bool:
    """One pass over all tables, in each state; whether any state gained enough to go on."""
    before = [float(problem.score(state.base, state.balance)) for state in states]
    now = list(before)
    for table in problem.by_work:
        was = [state.take(table) for state in states]
        for i, found in enumerate(problem.best(table, states)):
            # nothing found: rounding at the last byte of a full rank
            if found is not None and found[0] < now[i] * LEAST:
                now[i], new = found
                states[i].put(table, new)
            else:
                states[i].put(table, was[i])
    for i, state in enumerate(states):
        now[i] = _exchange(problem, state, now[i])
        state.add_up()
    return any(after < first * (1 - ENOUGH) for first, after in zip(before, now, strict=True))


def _exchange(problem: Problem, state: State, now: float) -> float:
    """Exchanges one-piece tables of the busiest rank with those of others while that helps; the new score."""
    for _ in range(len(state.placed)):
        single = [(t, p) for t, p in enumerate(state.placed) if p is not None and len(p.ranks) == 1]
        rank_of = np.array([p.ranks[0] for _, p in single], dtype=np.intp)
        busiest = int(problem.model.phases(state.base).sum(axis=0).argmax())
        mine, others = np.flatnonzero(rank_of == busiest), np.flatnonzero(rank_of != busiest)
        if not len(mine) or not len(others):
            return now
        i, j = (pairs.ravel()[:MOST_PAIRS] for pairs in np.meshgrid(mine, others, indexing="ij"))
        allowed = _may_go([p for _, p in single], problem.num_ranks)
        own = np.stack([p.option.loads[:, 0] for _, p in single], axis=1)
        gain, at = own[:, j] - own[:, i], np.arange(len(i))
        loads = np.repeat(state.base[:, None, :], len(i), axis=1)
        loads[:, at, busiest] += gain
        loads[:, at, rank_of[j]] -= gain
        valid = allowed[i, rank_of[j]] & allowed[j, busiest] & problem.fits(loads)
        score = np.where(valid, problem.score(loads, state.balance), np.inf)
        c = int(score.argmin())
        if not score[c] < now * LEAST:
            return now
        (a, first), (b, second) = single[int(i[c])], single[int(j[c])]
        state.take(a), state.take(b)
        state.put(a, _moved(first, second.ranks[0]))
        state.put(b, _moved(second, first.ranks[0]))
        now = float(score[c])
    return now


def _may_go(placements: list[Placement], num_ranks: int) -> NDArray[np.bool_]:
    """Which of these one-piece tables may lie on which rank."""
    allowed = np.zeros((len(placements), num_ranks), dtype=bool)
    for row, placement in enumerate(placements):
        listed = placement.option.proposal.assignments
        ranks = placement.option.usable if listed is None else [rank for (rank,) in listed]
        allowed[row, list(ranks)] = True
    return allowed


def _moved(placement: Placement, rank: int) -> Placement:
    delta = np.zeros_like(placement.delta)
    delta[:, rank] = placement.option.loads[:, 0]
    return Placement(placement.option, (rank,), delta)
