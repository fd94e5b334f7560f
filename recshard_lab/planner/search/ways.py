"""Candidates of many plans at once: by position in an order of the ranks, and the orders, which differ between plans.

The options' kinds of sets of ranks are those of `candidates.py`. One shard may go to each rank. Several go to the first
ranks of an order: by work; by work with noise; if memory is tight, by free memory; and under two hops, by work within
the nodes by work. Listed assignments are as they are.

Shape letters: R rows (P phases that ranks differ in, then M memories), W ranks, B plans, C ways, Q orders, X extras.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from recshard_lab.planner.search.candidates import Kind, dealt, kinds_of
from recshard_lab.planner.search.problem import Problem
from recshard_lab.planner.search.state import Index, Put
from recshard_lab.planner.workload import Array

QUIET, NOISY, EMPTY, NEAR = range(4)
TIGHT = 0.4  # share of the memory from which the emptiest ranks are tried too
NOISE = 0.3  # of the busiest rank's work
MOST_SETS = 64  # sets of ranks of listed assignments, beyond which there is too much to look at
OUTSIDE = 1e30  # work of a rank that may not be used
SEED, NOISES = 4, 16


class CannotAnneal(Exception):
    """A table whose ways are not of the kinds above, or too many."""


@dataclass(frozen=True, eq=False)
class Ways:
    """The candidates of one table.

    Attributes:
        option: ``[C]`` its option; column: ``[C]`` where `Orders.peaks` finds its ranks; order: ``[C]`` their order.
        kind: ``[C]``, and pieces: ``[R, W, kinds]`` what the k-th rank of that order gets.
        heaviest: ``[R, C, 1]`` the most that a rank gets; twice, square: ``[C, 1]`` of the squares of their work.
        shared: ``[1 + M + X, C]`` ms and bytes of all ranks each, and ms that count while a switch is on; the first
            and the last as ms ``[C, 1]`` and extra ``[C, 1, X]``.
        over: ``[C, 1]`` ms on the mean rank beyond the least of the table.
        flags: ``[C, 1]`` switches turned on.
        listed: the ranks of listed assignments, None for others.
        usable: the ranks allowed, None for all.
    """

    option: Index
    column: Index
    order: Index
    kind: Index
    pieces: Array
    heaviest: Array
    twice: Array
    square: Array
    shared: Array
    ms: Array
    extra: Array
    over: Array
    flags: Index
    listed: list[tuple[int, ...] | None]
    usable: Index | None


class Orders:
    """Orders of the ranks of B plans: W that begin with a rank, one as they are numbered, and Q by measures.

    Attributes:
        of: ``[W + 1 + Q, W, B]`` the ranks in order; work: ``[W, B]`` of each rank, all phases together.
    """

    def __init__(self, problem: Problem, copies: int) -> None:
        self.ranks, self.nodes, self.local, self.copies = problem.num_ranks, problem.num_nodes, problem.local, copies
        priced = problem.priced
        needed = float(np.minimum.reduceat(priced.total_bytes[0], priced.starts).sum()) / self.ranks
        tight = max(needed, float(priced.piece_bytes[0].max())) > TIGHT * problem.capacity[0]
        free = (option for options in problem.options for option in options if option.proposal.assignments is None)
        hops = any(option.route == "two_hop" for option in free)
        self.count = NEAR + 1 if hops else EMPTY + 1 if tight else NOISY + 1
        at = np.arange(self.ranks)
        self.of: Index = np.empty((self.ranks + 1 + self.count, self.ranks, copies), dtype=np.intp)
        self.of[: self.ranks] = ((at[:, None] + at) % self.ranks)[:, :, None]
        self.of[self.ranks] = at[:, None]
        self.sets: dict[tuple[int, ...], int] = {}
        self._noise: Array = np.random.default_rng(SEED).standard_normal((NOISES, self.ranks, copies)) * NOISE
        self._turn, self._each, self._lower = 0, np.arange(copies), np.tri(self.ranks)
        self._columns: Array | None = None
        self.phases = problem.phases
        self.work: Array = np.zeros((self.ranks, copies))

    def by(self, measure: int) -> int:
        """The number of the order by a measure."""
        return self.ranks + 1 + measure

    def first(self, measure: int, count: int) -> int:
        """The column of the first ranks of the order by a measure."""
        return self.ranks + (count - 1) * self.count + measure

    def set_of(self, ranks: tuple[int, ...]) -> int:
        """The column of a set of ranks.

        Raises:
            CannotAnneal: there are too many sets.
        """
        members = tuple(sorted(set(ranks)))
        if len(members) == 1:
            return members[0]
        if len(members) == self.ranks:
            return self.first(QUIET, self.ranks)
        found = self.ranks * (1 + self.count) + self.sets.setdefault(members, len(self.sets))
        if len(self.sets) > MOST_SETS:
            raise CannotAnneal
        return found

    def peaks(self, used: Array, ways: Ways) -> tuple[Array, Array]:
        """Of ``[R, W, B]``: the most that any rank of each way has, ``[R, C, B]``, and their work, ``[C, B]``."""
        rows, ranks, copies = used.shape
        count, width = self.count, ranks * (1 + self.count)
        if self._columns is None:
            self._columns = np.empty((rows + 1, width + len(self.sets), copies))
        columns = self._columns
        order = self._sorted(used, ways)  # [W, Q, B]
        places = (order * copies + self._each).ravel()
        by_order = used.reshape(rows, -1).take(places, axis=1).reshape(rows, ranks, count * copies)
        columns[:rows, :ranks] = used
        columns[rows, :ranks] = self.work
        spread = columns[:, ranks:width].reshape(rows + 1, ranks, count * copies)
        np.matmul(self._lower, self.work.ravel().take(places).reshape(ranks, -1), out=spread[rows])
        step = 1
        while step < ranks:  # maxima of the first ones, of twice as many each time
            longer = np.empty_like(by_order) if 2 * step < ranks else spread[:rows]
            longer[:, :step] = by_order[:, :step]
            np.maximum(by_order[:, step:], by_order[:, :-step], out=longer[:, step:])
            by_order, step = longer, 2 * step
        for at, members in enumerate(self.sets, width):
            mine = used[:, list(members)]
            columns[:rows, at] = mine.max(axis=1)
            columns[rows, at] = self.work[list(members)].sum(axis=0)
        found = columns.take(ways.column, axis=1)
        return found[:rows], found[rows]

    def _sorted(self, used: Array, ways: Ways) -> Index:
        """``[W, Q, B]`` the ranks by each measure, which are kept in `of`."""
        ranks, copies = used.shape[1:]
        work, held = used[: self.phases].sum(axis=0), used[self.phases :].max(axis=0)
        self.work = work
        if ways.usable is not None:
            barred = np.full((ranks, 1), OUTSIDE)
            barred[ways.usable] = 0.0
            work, held = work + barred, held + barred
        self._turn = (self._turn + 1) % NOISES
        measures = np.empty((self.count, ranks, copies))
        measures[QUIET] = work
        np.multiply(self._noise[self._turn], self.work[:, 0].max(), out=measures[NOISY])
        measures[NOISY] += work
        if self.count > EMPTY:
            measures[EMPTY] = held
        if self.count > NEAR:
            by_node = work.reshape(self.nodes, self.local, copies).sum(axis=1).argsort(axis=0).argsort(axis=0)
            measures[NEAR] = np.repeat(by_node, self.local, axis=0) * (2 * work.max() + 1) + work
        order = measures.argsort(axis=1)
        self.of[ranks + 1 :] = order
        return order.transpose(1, 0, 2)


def ways_of(problem: Problem, table: int, orders: Orders) -> Ways:
    """The ways of one table.

    Raises:
        CannotAnneal: there are none of these kinds, or too many.
    """
    candidates, priced, first = problem.candidates(table), problem.priced, int(problem.priced.starts[table])
    ranks, extras = problem.num_ranks, 1 + len(problem.capacity)
    usable = np.arange(ranks) if candidates.usable is None else candidates.usable
    found: list[tuple[int, int, int, int, tuple[int, ...] | None]] = []  # option, kind, column, order, listed ranks
    placements: list[Put] = []

    def add(at: int, chosen: Index, columns: Iterable[tuple[int, int]], listed: tuple[int, ...] | None = None) -> None:
        found.extend((at, len(placements), *place, listed) for place in columns)
        placements.append(problem.made(table, at, chosen))

    options = {at: problem.options[table][at] for at in np.unique(candidates.option).tolist()}
    kinds = {at: kinds_of(option, ranks, problem.local)[0] for at, option in options.items()}
    for at in sorted(options, key=lambda at: kinds[at]):
        option, near = options[at], options[at].route == "two_hop"
        if kinds[at] == Kind.LISTED:
            for chosen in option.proposal.assignments or ():
                add(at, np.array(chosen), [(orders.set_of(chosen), ranks)], chosen)
        elif not near or len(option.of) <= ranks == len(usable):  # nodes are next to one another in the order
            measures = [NEAR] if near else range(min(orders.count, NEAR))
            last = min(len(option.of), len(usable))
            columns = [(orders.first(m, last), orders.by(m)) for m in measures]
            alone = kinds[at] == Kind.RANK
            add(at, dealt(option, np.arange(len(usable))), [(r, r) for r in usable.tolist()] if alone else columns)
    if not found:
        raise CannotAnneal
    of, kind, column, order = np.array([each[:4] for each in found], dtype=np.intp).T
    pieces = np.zeros((len(placements), problem.num_rows, ranks))
    at = np.repeat(np.arange(len(placements)), [len(put.ranks) for put in placements])
    own = np.concatenate([put.own for put in placements], axis=1)
    np.add.at(pieces.swapaxes(1, 2), (at, np.concatenate([put.ranks for put in placements])), own.T)
    for piece, put in zip(pieces, placements, strict=True):
        problem.add_to_nodes(piece, put)
    shared = np.array([[put.ms, *put.nbytes, *put.extra] for put in placements]).T[:, kind]
    counts = np.array([min(len(put.ranks), ranks) for put in placements])[kind]
    heaviest = pieces.max(axis=2).T[:, kind, None]
    work = heaviest[: problem.phases].sum(axis=0)
    return Ways(
        of,
        column,
        order,
        kind,
        np.ascontiguousarray(pieces.transpose(1, 2, 0)),
        heaviest,
        2 * work,
        counts[:, None] * work**2,
        shared,
        shared[0][:, None],
        np.ascontiguousarray(shared[extras:].T)[:, None],
        priced.over[first + of][:, None],
        priced.flags[first + of][:, None],
        [each[4] for each in found],
        candidates.usable,
    )
