"""Local search: take one table out and put it back in the best way; exchange two; until nothing helps.

Every step keeps the plan valid and within memory and shortens the score, so it can stop at any time.

Shape letters: K loads, W ranks, C pairs of tables.
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from recshard_lab.planner.cost import K
from recshard_lab.planner.greedy import Greedy
from recshard_lab.planner.options import DoesNotFit, Placement

Index: TypeAlias = NDArray[np.intp]

ENOUGH = 1e-3  # a pass that gains less than this share is the last
MOST_PAIRS = 256  # exchanges looked at in one array operation


def improve(state: Greedy) -> None:
    """Improves the placements in `state`, at most ``state.passes`` rounds."""
    now = float(state.score(state.base))
    for _ in range(state.passes):
        before = now
        for table in state.by_work:
            was = state.take(table)
            try:
                score, new = state.best(table)
            except DoesNotFit:  # rounding at the last byte of a full rank
                score, new = now, was
            better = score < now * (1 - 1e-9)
            state.put(table, new if better else was)
            now = score if better else now
        now = _exchange(state, now)
        if now > before * (1 - ENOUGH):
            break
    # sums of differences drift by rounding: add up afresh
    state.base = sum((placement.delta for placement in state.placements()), np.zeros((K, state.num_ranks)))


def _exchange(state: Greedy, now: float) -> float:
    """Exchanges one-piece tables of the busiest rank with those of others while that helps; the new score."""
    for _ in range(len(state.placed)):
        single = [(t, p) for t, p in enumerate(state.placed) if p is not None and len(p.ranks) == 1]
        rank_of = np.array([p.ranks[0] for _, p in single], dtype=np.intp)
        busiest = int(state.model.phases(state.base).sum(axis=0).argmax())
        mine, others = np.flatnonzero(rank_of == busiest), np.flatnonzero(rank_of != busiest)
        if not len(mine) or not len(others):
            return now
        i, j = (pairs.ravel()[:MOST_PAIRS] for pairs in np.meshgrid(mine, others, indexing="ij"))
        allowed = _may_go([p for _, p in single], state.num_ranks)
        own = np.stack([p.option.loads[:, 0] for _, p in single], axis=1)
        gain, at = own[:, j] - own[:, i], np.arange(len(i))
        loads = np.repeat(state.base[:, None, :], len(i), axis=1)
        loads[:, at, busiest] += gain
        loads[:, at, rank_of[j]] -= gain
        valid = allowed[i, rank_of[j]] & allowed[j, busiest] & state.fits(loads)
        score = np.where(valid, state.score(loads), np.inf)
        c = int(score.argmin())
        if not score[c] < now * (1 - 1e-9):
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
