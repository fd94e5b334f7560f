"""Bounds that start from a plan 0.5% off the best: none is too high, and no option of a better plan is left out.

From a plan far off the best, everything is still allowed, and a rule that leaves out too much passes unnoticed.
"""

import itertools

import numpy as np
import pytest

from recshard_lab.planner import CostModel
from recshard_lab.planner.search.bounds import mode_bounds
from recshard_lab.planner.search.exact import solve_exactly
from recshard_lab.planner.search.greedy import Search
from recshard_lab.planner.search.options import options_of
from recshard_lab.planner.search.packing_bound import packing_bound
from recshard_lab.planner.search.problem import Problem
from tests.planner.problems import placed_loads
from tests.planner.test_bounds import small_problem
from tests.planner.test_packing_bound import whole_tables

OFF = 1.005


def every_placement(model: CostModel, problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """``[n]`` ms of all placements that fit, by the linear terms; ``[n, T]`` the options that each takes."""
    ways = []
    for start, options in zip(problem.priced.starts.tolist(), problem.options, strict=True):
        every = ((at, loads) for at, option in enumerate(options) for loads in placed_loads(model, option))
        ways.append({(start + at, loads.tobytes()): loads for at, loads in every})
    steps, taken = [], []
    for combination in itertools.product(*(own.items() for own in ways)):
        loads = np.sum([delta for _, delta in combination], axis=0)
        spent = model.terms.spent(loads, model.topology.num_nodes)
        if model.memory_total(loads).max() <= model.usable_bytes:
            steps.append(float(spent[:-1].max(axis=1).sum()))
            taken.append([option for (option, _), _ in combination])
    return np.array(steps), np.array(taken)


@pytest.mark.parametrize("seed", range(0, 24, 2))
def test_options_of_better_plans_stay_and_no_bound_is_above_the_best(seed: int) -> None:
    tables, topology, load, best = small_problem(seed)
    if not np.isfinite(best):
        return
    model = CostModel(tables, topology, load)
    problem = Problem(model, options_of(model, tables, {}))
    steps, taken = every_placement(model, problem)
    bounds = mode_bounds(model, problem.priced)
    least, start = steps.min(), steps.min() * OFF
    assert bounds[0].ms <= least * (1 + 1e-9)
    worth = np.logical_or.reduce([bound.worth(problem.priced, start) for bound in bounds])
    assert worth[taken[steps < start]].all()
    for bound in bounds:  # each by itself: of plans that turn on its switches
        mine = (problem.priced.flags[taken] & ~bound.bits == 0).all(axis=1)
        mine &= np.bitwise_or.reduce(problem.priced.flags[taken], axis=1) == bound.bits
        if mine.any():
            assert bound.ms <= steps[mine].min() * (1 + 1e-9)
            assert bound.worth(problem.priced, start)[taken[mine & (steps < start)]].all()
    assert packing_bound(problem, worth, bounds[0].ms, start) <= least * (1 + 1e-6)


@pytest.mark.parametrize("seed", [1, 2, 3, 7, 10])
def test_packing_of_whole_tables_proves_most_from_a_plan_near_the_best_and_never_too_much(seed: int) -> None:
    problem, best = whole_tables(seed)
    if not np.isfinite(best):
        return
    search = Search(problem, passes=3)
    search.run()
    worth = np.logical_or.reduce([bound.worth(problem.priced, best * OFF) for bound in search.bounds])
    near = packing_bound(problem, worth, search.bound_ms, best * OFF)
    far = packing_bound(problem, np.ones(len(worth), dtype=bool), search.bound_ms, best * 1.2)
    assert search.bound_ms <= near <= best * (1 + 1e-6)
    assert near >= far * (1 - 2e-3)


def test_an_exact_search_that_starts_half_a_percent_off_ends_at_the_best() -> None:
    """The plan that it starts from is one that greedy search did not improve."""
    started = 0
    for seed in range(40):
        problem, best = whole_tables(seed)
        if not np.isfinite(best):
            continue
        search = Search(problem, passes=0)
        search.run()
        if not best * 1.001 < search.best_ms:
            continue
        started += 1
        solution = solve_exactly(problem, search, time_limit_s=5)
        state = problem.start()
        for at, placed in enumerate(solution.placements):
            problem.put(state, at, problem.made(at, problem.options[at].index(placed.option), placed.ranks))
        assert problem.step_ms(state) == pytest.approx(best, rel=2e-5)
        assert solution.bound_ms <= best * (1 + 1e-6)
        if started == 3:
            return
    assert started == 3
