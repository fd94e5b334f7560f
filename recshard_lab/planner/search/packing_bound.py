"""A bound from packing: no plan takes at most Z ms, since its rectangles would not go onto the ranks.

Suppose that a plan takes at most Z ms. Then in any set S of phases its slowest ranks take at most ``C_S``: Z without
what everyone pays and without the least that the other phases take. A rank's sum over S is at most the sum of those
phases' slowest, so the plan's rectangles, as items of size ``load over S / C_S``, go into W bins of size one; and as
bytes into the ranks' memory. A function f with ``sum f(x_i) <= 1`` whenever ``sum x_i <= 1`` (dual feasible) turns that
into a linear inequality on the options taken ::

    sum over rectangles of f(load / C_S)  <=  W

Where not even fractions of options, adding up to one a table, meet all of them at cost Z, no plan takes Z or less.
Z is found by bisection; each step is a few small linear programs for HiGHS.

Functions: the identity; ``floor((k + 1) x) / k``, and ``1 above 1 - e, 0 below e, else x`` (Fekete and Schepers,
Mathematical Programming 91, 2001: u_k, without its gain at whole multiples, and U_e).

Shape letters: P phases in which ranks differ, O options that a better plan may hold, N sizes of rectangles, W ranks,
V variables of the linear program (options, phases, switches, extras), F functions.
"""

import itertools
import time

import numpy as np
from numpy.typing import NDArray

from recshard_lab.planner.search.problem import Problem
from recshard_lab.planner.workload import Array

ORDERS = range(1, 9)  # k
CUTOFFS = (0.1, 0.2, 0.25, 1 / 3, 0.4, 0.5)  # e
PRECISION = 5e-4  # of the bisection, as a share of Z
SAFE = 1e-7  # sizes are taken to be that much smaller
ROUNDS = 2  # of tightening what phases take
MOST = 3e6  # options x tables x cuts beyond which it would take too long


def packing_bound(problem: Problem, worth: NDArray[np.bool_], low: float, high: float, seconds: float) -> float:
    """The most of `low` and of what packing proves, in ms; never more than `high`.

    Args:
        worth: ``[all options]`` those that a plan with a step below `high` may hold.
        low: a bound; high: the step of a plan.
        seconds: about how long it may take.
    """
    end = time.monotonic() + seconds
    packing = Packing(problem, worth, high)
    if packing.kept.size * len(problem.options) * 2 ** len(problem.rows) > MOST:
        return low
    best, proved = high, low
    while best - proved > PRECISION * proved and time.monotonic() < end:
        middle = (proved + best) / 2
        if packing.possible(middle):
            best = middle
        else:
            proved = middle
    return proved * (1 - 1e-9) if proved > low else low


class Packing:
    """Which options plans of at most so many ms may take, as a linear program; ms are shares of `scale`."""

    def __init__(self, problem: Problem, worth: NDArray[np.bool_], scale: float) -> None:
        self.problem, self.scale = problem, scale
        priced, terms = problem.priced, problem.terms
        self.kept = np.flatnonzero(worth)
        self.phases, self.count = len(problem.rows), len(self.kept)
        switches, extras = len(terms.switches), len(priced.extra_switches)
        self.width = self.count + self.phases + switches + extras
        self.table = np.searchsorted(priced.starts, self.kept, side="right") - 1
        self.firsts = np.flatnonzero(np.diff(self.table, prepend=-1))
        sizes = [np.arange(*priced.kind_starts[at : at + 2]) for at in self.kept]
        flat = [option for choices in problem.options for option in choices]
        self.of = np.repeat(np.arange(self.count), [len(own) for own in sizes])  # [N] its option
        self.many = np.concatenate([flat[at].counts for at in self.kept])
        self.loads: Array = (
            priced.own[:, np.concatenate(sizes)] / np.append(np.full(self.phases, scale), problem.capacity)[:, None]
        )
        subsets = (itertools.combinations(range(self.phases), k) for k in range(1, self.phases + 1))
        self.sets = [list(chosen) for some in subsets for chosen in some]
        paid = [float(switch.fixed[:-1].sum()) for switch in terms.switches]
        shared = priced.shared_ms[self.kept]
        self.cost: Array = np.concatenate([shared, np.full(self.phases, scale), paid, np.full(extras, scale)]) / scale
        self.upper = np.where(np.arange(self.width) < self.count, 1.0, np.inf)
        self._base()

    def possible(self, ms: float) -> bool:
        """False where no plan takes so long or less."""
        room = (ms - self.problem.fixed_ms) / self.scale * (1 + SAFE)
        cuts, upper = self.memory, self.upper
        everyone = self.cost.copy()
        everyone[self.count : self.count + self.phases] = 0.0
        for _ in range(ROUNDS):
            least = np.zeros(self.phases)
            for phase in range(self.phases):
                goal = np.zeros(self.width)
                goal[self.count + phase] = 1.0
                found = self._least(goal, cuts, upper, room)
                if found is None:
                    return False
                least[phase] = found
            shared = self._least(everyone, cuts, upper, room)
            if shared is None:
                return False
            cuts, upper = self._cuts(room - shared - least.sum() + SAFE, least)
            if not np.maximum.reduceat(upper[: self.count], self.firsts).all():
                return False
        return self._least(np.zeros(self.width), cuts, upper, room) is not None

    def _base(self) -> None:
        """What holds whatever Z is: one option a table, phases take their mean, switches, and bytes."""
        priced, terms, ranks = self.problem.priced, self.problem.terms, self.problem.num_ranks
        at_phase, at_switch = self.count, self.count + self.phases
        at_extra = at_switch + len(terms.switches)
        rows: list[Array] = []
        high: list[float] = []

        def row(values: Array, most: float, **others: float) -> None:
            made = np.zeros(self.width)
            made[: self.count] = values
            for where, value in others.items():
                made[int(where[1:])] = value
            rows.append(made)
            high.append(most)

        for phase in range(self.phases):
            row(priced.mean[self.kept, phase] / self.scale, 0.0, **{f"v{at_phase + phase}": -1.0})
        for k in range(len(terms.switches)):
            turns = (priced.flags[self.kept] >> k & 1).astype(float)
            for table in np.unique(self.table[turns > 0]):
                row(turns * (self.table == table), 0.0, **{f"v{at_switch + k}": -1.0})
        for x, k in enumerate(priced.extra_switches):  # counts in full while the switch is on
            extra = priced.extra[self.kept, x] / self.scale
            most = float(np.maximum.reduceat(extra, self.firsts).sum())
            row(extra, most, **{f"v{at_extra + x}": -1.0, f"v{at_switch + k}": most})
        row(priced.total_bytes[self.kept] / (ranks * self.problem.capacity), 1.0)
        self.rows, self.high = np.array(rows), np.array(high)
        self.one = np.zeros((len(self.problem.options), self.width))
        self.one[self.table, np.arange(self.count)] = 1.0
        self.memory = self._cut(np.minimum(self.loads[-1], 1.0))

    def _cuts(self, left: float, least: Array) -> tuple[Array, Array]:
        """The inequalities ``[cuts, V]`` of all sets of phases, and the upper ends of variables ``[V]``.

        Args:
            left: what phases may take beyond `least` ``[P]``, in all.
        """
        found, upper = [self.memory], self.upper.copy()
        for chosen in self.sets:
            size = self.loads[chosen].sum(axis=0) / max(1e-12, left + float(least[chosen].sum()))
            too_large = np.bincount(self.of, weights=size > 1 + 1e-6, minlength=self.count) > 0
            upper[: self.count][too_large] = 0.0
            found.append(self._cut(np.minimum(size, 1.0)))
        return np.concatenate(found), upper

    def _cut(self, sizes: Array) -> Array:
        """``[F, V]`` of items of `sizes` ``[N]``, those functions that may not hold anyway."""
        values = dual_feasible(sizes) * self.many
        made = np.zeros((len(values), self.width))
        for i, own in enumerate(values):
            made[i, : self.count] = np.bincount(self.of, weights=own, minlength=self.count)
        most = np.maximum.reduceat(made[:, : self.count], self.firsts, axis=1).sum(axis=1)
        return np.asarray(made[most > self.problem.num_ranks])

    def _least(self, goal: Array, cuts: Array, upper: Array, room: float) -> float | None:
        """The least of a goal ``[V]``; None where nothing is possible."""
        import scipy.optimize

        matrix = np.concatenate([self.rows, cuts, self.cost[None]])
        high = np.concatenate([self.high, np.full(len(cuts), float(self.problem.num_ranks)), [room]])
        bounds = np.column_stack([np.zeros(self.width), upper])
        one = np.ones(len(self.one))
        result = scipy.optimize.linprog(goal, matrix, high, self.one, one, bounds, method="highs")
        if result.status == 2:
            return None
        return max(0.0, float(result.fun) - SAFE) if result.status == 0 else 0.0


def dual_feasible(sizes: Array) -> Array:
    """``[F, n]`` every function of items of `sizes` ``[n]``, which are shares of a bin.

    >>> [round(float(f), 2) for f in dual_feasible(np.array([0.6]))[:3, 0]]
    [0.6, 1.0, 0.5]
    """
    low = np.maximum(sizes - SAFE, 0.0)
    found = [low, *(np.floor((k + 1) * low) / k for k in ORDERS)]
    found += [np.where(low > 1 - cutoff, 1.0, np.where(low < cutoff, 0.0, low)) for cutoff in CUTOFFS]
    return np.array(found)
