"""A bound from a linear program over the options of all tables, without ranks.

With ``x[t, o]`` the share of option o that table t takes, adding up to one per table, every plan satisfies ::

    peak[p]   >=  sum over t, o of mean[o, p] x[t, o]                    the slowest rank takes at least the mean
    peak[p]   >=  sum over o of alone[o, p] x[t, o],  for every table t  and at least what one shard of t takes alone
    switch[k] >=  sum over o that turn k on of x[t, o],  for every t     what is paid once
    total bytes  <=  memory of all ranks

and takes at least ``sum of peak + what options cost everyone + what is paid once``. A plan takes one option per table,
so `x` may be required to be whole, which raises the bound: HiGHS solves both.

`alone` counts a two-hop shard's message to other nodes in full: a node sends one message for all shards of the same
columns, however many it holds.

Shape letters: O options that a better plan may hold, T tables, P phases in which ranks differ, V variables (options,
phases, switches, extras).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from recshard_lab.planner.search.problem import Problem
from recshard_lab.planner.workload import Array

NODES = 20  # of the branch-and-bound tree with whole options
SAFE = 1e-6  # share of a bound that is left to the tolerances of HiGHS


class Relaxation:
    """The linear program; ms are shares of `scale`.

    Args:
        worth: ``[all options]`` those that a plan with a step below `scale` may hold.
        scale: the step of a plan.
    """

    def __init__(self, problem: Problem, worth: NDArray[np.bool_], scale: float) -> None:
        self.problem, self.scale = problem, scale
        priced, switches = problem.priced, problem.terms.switches
        self.kept = np.flatnonzero(worth)
        self.phases, self.count, self.tables = problem.phases, len(self.kept), len(problem.options)
        self.table = np.searchsorted(priced.starts, self.kept, side="right") - 1
        self.firsts = np.flatnonzero(np.diff(self.table, prepend=-1))
        extras = len(priced.extra_switches)
        self.at_switch = self.count + self.phases
        self.width = self.at_switch + len(switches) + extras
        paid = [float(switch.fixed[:-1].sum()) for switch in switches]
        shared = priced.shared_ms[self.kept]
        self.cost: Array = np.concatenate([shared, np.full(self.phases, scale), paid, np.full(extras, scale)]) / scale
        whole = np.arange(self.width) < self.count
        whole[self.at_switch : self.at_switch + len(switches)] = True
        self.whole = whole
        self.upper: Array = np.where(whole, 1.0, np.inf)
        self.rows, self.high = self._rows()
        self.one = self._by_table(np.ones(self.count))

    def solve(
        self,
        goal: Array | None = None,
        upper: Array | None = None,
        cuts: tuple[Any, Array] | None = None,
    ) -> Any:
        """SciPy's result of minimising `goal` ``[V]``, the step when left out.

        Args:
            upper: ``[V]`` upper ends of the variables.
            cuts: more rows ``[n, V]``, and the most that each may be.
        """
        import scipy.optimize
        import scipy.sparse

        rows, high = self.rows, self.high
        if cuts is not None:
            rows, high = scipy.sparse.vstack([rows, cuts[0]]), np.concatenate([high, cuts[1]])
        bounds = np.column_stack([np.zeros(self.width), self.upper if upper is None else upper])
        goal = self.cost if goal is None else goal
        return scipy.optimize.linprog(goal, rows, high, self.one, np.ones(self.tables), bounds, method="highs")

    def whole_bound(self) -> float:
        """The bound in ms that HiGHS proves with whole options in `NODES` nodes; 0 if it proves nothing."""
        import scipy.optimize

        linear = scipy.optimize.LinearConstraint
        found = scipy.optimize.milp(
            self.cost,
            integrality=self.whole,
            bounds=scipy.optimize.Bounds(0.0, self.upper),
            constraints=[linear(self.rows, -np.inf, self.high), linear(self.one, 1.0, 1.0)],
            options={"node_limit": NODES, "mip_rel_gap": 1e-4},
        )
        if found.status == 2:
            return np.inf
        return 0.0 if found.mip_dual_bound is None else self._ms(float(found.mip_dual_bound))

    def bound(self) -> float:
        """The bound in ms; infinite where no plan takes less than `scale`."""
        found = self.solve()
        if found.status == 2:
            return np.inf
        return self._ms(float(found.fun)) if found.status == 0 else 0.0

    def _ms(self, value: float) -> float:
        return value * self.scale * (1 - SAFE) + self.problem.fixed_ms

    def _by_table(self, values: Array, column: int | None = None, sign: float = -1.0) -> Any:
        """Sparse rows ``[T, V]``: the options' `values` in their table's row, and `sign` in `column`."""
        import scipy.sparse

        rows, columns, numbers = self.table, np.arange(self.count), values
        if column is not None:
            rows = np.concatenate([rows, np.arange(self.tables)])
            columns = np.concatenate([columns, np.full(self.tables, column)])
            numbers = np.concatenate([numbers, np.full(self.tables, sign)])
        return scipy.sparse.csr_array((numbers, (rows, columns)), shape=(self.tables, self.width))

    def _rows(self) -> tuple[Any, Array]:
        """The constraints that hold for any step: sparse rows ``[n, V]``, and the most that each may be."""
        import scipy.sparse

        priced, problem, none = self.problem.priced, self.problem, np.zeros(self.tables)
        blocks: list[Any] = []
        most: list[Array] = []

        def row(values: Array, high: float, **others: float) -> None:
            made = np.zeros((1, self.width))
            made[0, : self.count] = values
            for where, value in others.items():
                made[0, int(where[1:])] = value
            blocks.append(scipy.sparse.csr_array(made))
            most.append(np.array([high]))

        for phase in range(self.phases):
            column = self.count + phase
            row(priced.mean[self.kept, phase] / self.scale, 0.0, **{f"v{column}": -1.0})
            blocks.append(self._by_table(priced.alone[self.kept, phase] / self.scale, column))
            most.append(none)
        for k in range(len(problem.terms.switches)):
            turns = (priced.flags[self.kept] >> k & 1).astype(float)
            if turns.any():
                blocks.append(self._by_table(turns, self.at_switch + k))
                most.append(none)
        for x, k in enumerate(priced.extra_switches):  # counts in full while the switch is on
            extra = priced.extra[self.kept, x] / self.scale
            full = float(np.maximum.reduceat(extra, self.firsts).sum())
            column = self.at_switch + len(problem.terms.switches) + x
            row(extra, full, **{f"v{column}": -1.0, f"v{self.at_switch + k}": full})
        for total, capacity in zip(priced.total_bytes, problem.capacity, strict=True):
            row(total[self.kept] / (problem.num_ranks * capacity), 1.0)
        return scipy.sparse.vstack(blocks).tocsr(), np.concatenate(most)
