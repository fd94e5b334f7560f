"""A bound for few tables on few ranks: all placements are listed that may lead to a shorter plan.

Tables are placed one after the other, the one with most work first. All placements of the first tables are kept that a
plan below Z ms may begin with. Such a plan takes at least ::

    sum over phases of  what the slowest rank takes so far,  or  the mean so far + the mean of the tables to come
    + what placements cost everyone + what is paid once + price of a byte x (bytes of all tables - memory)

for any choice in each phase and any price. The tables to come count with their cheapest options under that choice.
Placements that differ by interchangeable ranks are kept once. If nothing remains, no plan is below Z. Otherwise the
best plan is among those that remain. Z is lowered until at most `MOST` placements are listed.

On `bins` of several ranks, the same is a relaxation: a node's work is spread evenly over its ranks, except that a phase
takes as long as the largest shard alone.

Shape letters: R rows (P phases, then M memories), B bins, X extras, n placements of the first tables, m ways to place
a table, V choices (one per phase, and a price).
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recshard_lab.planner.search.options import Option
from recshard_lab.planner.search.problem import Problem
from recshard_lab.planner.search.state import Index
from recshard_lab.planner.workload import Array

MOST, MOST_WAYS = 300_000, 1_000  # placements listed for one Z; ways to place one table
STEPS = 5  # values of Z that are tried
CHUNK = 20_000  # placements scored at a time
PRICES = np.append(0.0, np.logspace(-4, 1, 26))  # of all memory, as shares of the step


class _Ways(NamedTuple):
    """Ways to place a table, or placements of several: what they add to each bin's mean rank, and what all ranks pay.

    Attributes:
        used: ``[m, R, B]``; peak: ``[m, P]`` the largest shard's.
        ms, nbytes, extra, flags: ``[m]``, ``[m, M]``, ``[m, X]`` and ``[m]``, see `state.Put`.
    """

    used: Any
    peak: Any
    ms: Any
    nbytes: Any
    extra: Any
    flags: Any

    def at(self, some: Index | slice | NDArray[np.bool_]) -> "_Ways":
        return _Ways(*(each[some] for each in self))

    def beside(self, more: "_Ways") -> "_Ways":
        """Every one of these with every one of `more`."""
        count = len(self.ms) * len(more.ms)
        both = _Ways(*(a[:, None] + b for a, b in zip(self, more, strict=True)))
        both = both._replace(peak=np.maximum(self.peak[:, None], more.peak), flags=self.flags[:, None] | more.flags)
        return _Ways(*(each.reshape(count, *each.shape[2:]) for each in both))


def enumerated_bound(problem: Problem, worth: NDArray[np.bool_], low: float, high: float, bins: int) -> float:
    """The most of `low` and of what enumeration proves, in ms; never more than `high`.

    Args:
        worth: ``[all options]`` those that a plan with a step below `high` may hold.
        low: a bound; high: the step of a plan.
        bins: the number of ranks, or of nodes.
    """
    try:
        every = Enumeration(problem, worth, high, bins)
    except OverflowError:
        return low
    cutoff, enough = high, high
    for _ in range(STEPS):
        found = every.least(cutoff)
        if found is None:
            enough = cutoff
        else:
            low = max(low, min(cutoff, found) * (1 - 1e-9))
            if enough == cutoff or found < cutoff:
                break
        cutoff = (low + enough) / 2
    return low


class Enumeration:
    """All ways to place each table, the one with most work first.

    Raises:
        OverflowError: a table has more than `MOST_WAYS`.
    """

    def __init__(self, problem: Problem, worth: NDArray[np.bool_], step_ms: float, bins: int) -> None:
        self.problem, self.bins, phases = problem, bins, problem.phases
        self.ways = [self._ways(table, worth) for table in problem.by_work]
        means = [ways.used.mean(axis=2) for ways in self.ways]  # [m, R]
        held = [mean[:, phases:] + ways.nbytes for mean, ways in zip(means, self.ways, strict=True)]
        by_mean = np.array(list(itertools.product([0.0, 1.0], repeat=phases)))
        prices = PRICES[:, None] * step_ms / problem.capacity  # [prices, M]

        def rest(by_mean: Array, prices: Array, level: int = 0) -> Array:
            """``[V]`` ms of the tables from number `level` on, with their bytes."""
            costs = (
                by_mean @ mean[:, :phases].T + prices @ own.T + ways.ms
                for mean, own, ways in zip(means[level:], held[level:], self.ways[level:], strict=True)
            )
            return np.asarray(sum((cost.min(axis=1) for cost in costs), np.zeros(len(by_mean))))

        whole = rest(np.ones((len(prices), phases)), prices) - prices @ problem.capacity
        self.price = np.zeros((2 * len(by_mean), prices.shape[1]))
        self.price[len(by_mean) :] = prices[whole.argmax()]
        self.by_mean = np.tile(by_mean, (2, 1))
        levels = range(1, len(self.ways) + 1)
        self.rest = [rest(self.by_mean, self.price, n) - self.price @ problem.capacity for n in levels]
        self.least_held = [sum((own.min(axis=0) for own in held[n:]), np.zeros(prices.shape[1])) for n in levels]
        self.classes = self._interchangeable()
        self.keys = np.random.default_rng(0).standard_normal((2, problem.num_rows, bins))

    def _ways(self, table: int, worth: NDArray[np.bool_]) -> _Ways:
        problem, start = self.problem, int(self.problem.priced.starts[table])
        found: dict[tuple[bytes, ...], tuple[Array, ...]] = {}
        for at in np.flatnonzero(worth[start : start + len(problem.options[table])]).tolist():
            option = problem.options[table][at]
            listed = option.proposal.assignments
            for ranks in _assignments(option, problem.num_ranks, self.bins) if listed is None else listed:
                put = problem.made(table, at, ranks)
                used = np.zeros((problem.num_ranks, problem.num_rows))
                np.add.at(used, put.ranks, put.own.T)
                if put.node is not None:
                    nodes, added = put.node
                    used.reshape(problem.num_nodes, problem.local, -1)[nodes] += added.T[:, None]
                by_bin = used.reshape(self.bins, -1, problem.num_rows).mean(axis=1).T
                peak = np.maximum(problem.priced.alone[start + at], used[:, : problem.phases].max(axis=0))
                each = (by_bin, peak, put.ms, put.nbytes, put.extra, put.flags)
                way = tuple(np.asarray(one) for one in each)
                found[tuple(one.tobytes() for one in way)] = way
                if len(found) > MOST_WAYS:
                    raise OverflowError
        if not found:
            raise OverflowError
        return _Ways(*(np.array(each) for each in zip(*found.values(), strict=True)))

    def _interchangeable(self) -> list[list[int]]:
        """Bins in classes: exchanging two of a class maps the ways of each table to one another."""
        known = [{tuple(one.tobytes() for one in way) for way in zip(*ways, strict=True)} for ways in self.ways]
        classes: list[list[int]] = []
        for mine in range(self.bins):
            for mates in classes:
                order = np.arange(self.bins)
                order[[mine, mates[0]]] = mates[0], mine
                changed = (ways._replace(used=ways.used[:, :, order]) for ways in self.ways)
                if all(
                    tuple(one.tobytes() for one in way) in own
                    for own, ways in zip(known, changed, strict=True)
                    for way in zip(*ways, strict=True)
                ):
                    mates.append(mine)
                    break
            else:
                classes.append([mine])
        return classes

    def least(self, cutoff: float) -> float | None:
        """The least step of all plans below `cutoff`; infinite if there is none, None if that takes too long."""
        first, listed, least = self.ways[0].at(slice(0, 1)), 0, np.zeros(1)
        kept = _Ways(*(np.zeros_like(each) for each in first))
        for level, ways in enumerate(self.ways):
            listed += len(kept.ms) * len(ways.ms)
            if listed > MOST:
                return None
            some = max(1, CHUNK // len(ways.ms))
            parts = [
                self._promising(kept.at(slice(n, n + some)).beside(ways), level, cutoff)
                for n in range(0, len(kept.ms), some)
            ]
            kept = _Ways(*(np.concatenate(each) for each in zip(*(part for part, _ in parts), strict=True)))
            least = np.concatenate([ms for _, ms in parts])
            if not len(least):
                return np.inf
            chosen = self._different(kept)
            kept, least = kept.at(chosen), least[chosen]
        return float(least.min())

    def _promising(self, found: _Ways, level: int, cutoff: float) -> tuple[_Ways, Array]:
        """Those that may lead to a plan below `cutoff`, and a bound of its ms."""
        problem, phases = self.problem, self.problem.phases
        top, mean = found.used.max(axis=2), found.used.mean(axis=2)
        held = mean[:, phases:] + found.nbytes
        ms = np.maximum(top[:, :phases], found.peak) @ (1 - self.by_mean).T + mean[:, :phases] @ self.by_mean.T
        ms = (ms + held @ self.price.T + self.rest[level]).max(axis=1) + found.ms + problem.fixed_ms
        ms += problem.paid[found.flags] + (problem.extra_on[found.flags] * found.extra).sum(axis=1)
        fits = np.maximum(top[:, phases:] + found.nbytes, held + self.least_held[level]) <= problem.capacity * (
            1 + 1e-9
        )
        good = (ms < cutoff * (1 - 1e-9)) & fits.all(axis=1)
        return found.at(good), ms[good]

    def _different(self, found: _Ways) -> Index:
        """One of those that differ only by interchangeable bins."""
        used = found.used / (1e-12 + found.used.max(axis=(0, 2))[:, None])
        for mates in self.classes:
            block = used[:, :, mates]
            order = np.einsum("nrb,r->nb", block, self.keys[0, :, 0]).argsort(axis=1)
            used[:, :, mates] = np.take_along_axis(block, order[:, None], axis=2)
        marks = [np.einsum("nrb,rb->n", used, key).round(9) for key in self.keys]
        columns = (*marks, found.ms.round(9), found.flags, *found.extra.T.round(9), *found.peak.T.round(9))
        return np.unique(np.column_stack(columns), axis=0, return_index=True)[1]


def _assignments(option: Option, ranks: int, bins: int) -> Iterator[Sequence[int]]:
    """Ranks of an option's shards, those of one size interchangeable, and so the ranks of a bin."""
    counts, by_bin = option.counts.astype(int).tolist(), [list[int]() for _ in range(bins)]
    for rank in sorted(option.usable):
        by_bin[rank * bins // ranks].append(rank)

    def fill(kind: int, taken: list[int], chosen: list[int]) -> Iterator[Sequence[int]]:
        if kind == len(counts):
            yield chosen
            return
        room = [len(own) - used if option.distinct else counts[kind] for own, used in zip(by_bin, taken, strict=True)]
        for split in _splits(counts[kind], room):
            now, dealt = list(chosen), iter(np.flatnonzero(option.of == kind).tolist())
            for own, used, count in zip(by_bin, taken, split, strict=True):
                for n in range(count):
                    now[next(dealt)] = own[(used + n) % len(own)]
            yield from fill(kind + 1, [used + more for used, more in zip(taken, split, strict=True)], now)

    yield from fill(0, [0] * bins, [0] * len(option.of))


def _splits(count: int, room: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every way to deal `count` shards to bins with so much room.

    >>> list(_splits(2, [1, 2]))
    [(0, 2), (1, 1)]
    """
    if not room:
        if not count:
            yield ()
        return
    for first in range(min(count, room[0]) + 1):
        for others in _splits(count - first, room[1:]):
            yield first, *others
