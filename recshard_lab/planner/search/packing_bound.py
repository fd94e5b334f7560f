"""A bound from packing: no plan takes at most Z ms, because its shards would not go onto the ranks.

Suppose that a plan takes at most Z ms. Then in any set S of phases its slowest ranks take at most ``C_S``: Z without
what everyone pays and without the least that the other phases take. A rank's sum over S is at most the sum of those
phases' slowest, so the plan's shards, as items of size ``load over S / C_S``, go into W bins of size one; and as
bytes into the ranks' memory. A function f with ``sum f(x_i) <= 1`` whenever ``sum x_i <= 1`` (dual feasible) turns that
into a linear inequality on the options taken ::

    sum over shards of f(load / C_S)  <=  W

The inequalities of all single phases, of all pairs and of all phases together join those of `Relaxation`. Where not
even fractions of options meet all of them at cost Z, no plan takes Z or less. Z is found by bisection; each step is a
few linear programs for HiGHS.

Functions: the identity; ``floor((k + 1) x) / k``, and ``1 above 1 - e, 0 below e, else x`` (Fekete and Schepers,
Mathematical Programming 91, 2001: u_k, without its gain at whole multiples, and U_e).

Shape letters: P phases in which ranks differ, N sizes of shards, F functions, V variables of the linear program.
"""

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recshard_lab.planner.search.problem import Problem
from recshard_lab.planner.search.relaxation import Relaxation
from recshard_lab.planner.workload import Array

ORDERS = range(1, 9)  # k
CUTOFFS = (0.1, 0.2, 0.25, 1 / 3, 0.4, 0.5)  # e
PRECISION = 5e-4  # of the bisection, as a share of Z
WORK = 4_000  # options times steps of the bisection
SAFE = 1e-7  # sizes are taken to be that much smaller
ROUNDS = 2  # of tightening what phases take


def packing_bound(problem: Problem, worth: NDArray[np.bool_], low: float, high: float) -> float:
    """The most of `low` and of what packing proves, in ms; never more than `high`.

    Args:
        worth: ``[all options]`` those that a plan with a step below `high` may hold.
        low: a bound; high: the step of a plan.
    """
    packing = Packing(problem, worth, high)
    best, proved = high, low
    for _ in range(WORK // packing.count):
        if best - proved <= PRECISION * proved:
            break
        middle = (proved + best) / 2
        if packing.possible(middle):
            best = middle
        else:
            proved = middle
    return proved * (1 - 1e-9) if proved > low else low


class Packing(Relaxation):
    """Which options plans of at most so many ms may take."""

    def __init__(self, problem: Problem, worth: NDArray[np.bool_], scale: float) -> None:
        super().__init__(problem, worth, scale)
        priced = problem.priced
        sizes = [np.arange(*priced.kind_starts[at : at + 2]) for at in self.kept]
        flat = [option for choices in problem.options for option in choices]
        self.of = np.repeat(np.arange(self.count), [len(own) for own in sizes])  # [N] its option
        self.many = np.concatenate([flat[at].counts for at in self.kept])
        self.loads: Array = (
            priced.own[:, np.concatenate(sizes)] / np.append(np.full(self.phases, scale), problem.capacity)[:, None]
        )
        lengths = sorted({1, 2, self.phases} & set(range(1, self.phases + 1)))
        self.sets = [list(some) for k in lengths for some in itertools.combinations(range(self.phases), k)]
        self.memory = np.concatenate([self._cut(np.minimum(one, 1.0)) for one in self.loads[self.phases :]])

    def possible(self, ms: float) -> bool:
        """False where no plan takes so long or less."""
        room = (ms - self.problem.fixed_ms) / self.scale * (1 + SAFE)
        cuts, upper = self.memory, self.upper
        everyone = self.cost.copy()
        everyone[self.count : self.at_switch] = 0.0
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

    def _cuts(self, left: float, least: Array) -> tuple[Array, Array]:
        """The inequalities ``[cuts, V]`` of the sets of phases, and the upper ends of variables ``[V]``.

        Args:
            left: what phases may take beyond `least` ``[P]``, in all.
        """
        priced = self.problem.priced
        found, upper = [self.memory], self.upper.copy()
        alone = priced.alone[self.kept] / self.scale
        for phase in range(self.phases):
            upper[: self.count][alone[:, phase] > (left + least[phase]) * (1 + 1e-6)] = 0.0
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
        """The least of a goal ``[V]`` at cost `room`; None if no solution exists."""
        rows: Any = np.concatenate([cuts, self.cost[None]])
        high = np.append(np.full(len(cuts), float(self.problem.num_ranks)), room)
        result = self.solve(goal, upper, (rows, high))
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
