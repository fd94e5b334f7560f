"""Enumeration: its bound is the best of all placements, and with nodes as bins it is below that."""

import itertools
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from recshard_lab.planner import CostModel, estimate
from recshard_lab.planner.search.bounds import FEW, mode_bounds, strong_bound, worth_of
from recshard_lab.planner.search.enumeration import Enumeration, _assignments, enumerated_bound
from recshard_lab.planner.search.options import options_of
from recshard_lab.planner.search.problem import Problem
from recshard_lab.sharding import PlanError
from tests.grid import examples, grid
from tests.planner.problems import best_plan
from tests.planner.test_bounds import small_problem
from tests.planner.test_bounds_near_the_best import every_placement
from tests.planner.test_packing_bound import whole_tables
from tests.planner.test_planner import problems
from tests.planner.test_strong_bound import two_nodes


@pytest.mark.parametrize(*grid(seed=range(examples(6, 12)), off=[1.005, 1.5]))
def test_the_bound_is_the_best_of_all_placements_on_two_ranks(seed: int, off: float) -> None:
    tables, topology, load, best = small_problem(seed)
    if not np.isfinite(best):
        return
    model = CostModel(tables, topology, load)
    problem = Problem(model, options_of(model, tables, {}))
    least = every_placement(model, problem)[0].min()
    bounds = mode_bounds(model, problem.priced)
    worth = worth_of(bounds, problem.priced, least * off)
    found = enumerated_bound(problem, worth, bounds[0].ms, least * off, bins=2)
    assert found == pytest.approx(least, rel=1e-6)
    assert enumerated_bound(problem, worth, bounds[0].ms, least * off, bins=1) <= least * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(examples(6, 12)))
def test_the_bound_is_the_best_of_whole_tables_on_three_ranks(seed: int) -> None:
    problem, best = whole_tables(seed)
    every = np.ones(len(problem.priced.cost), dtype=bool)
    if np.isfinite(best):
        fast = mode_bounds(problem.model, problem.priced)[0].ms
        assert enumerated_bound(problem, every, fast, best * 1.2, bins=3) == pytest.approx(best, rel=1e-6)
    else:
        assert Enumeration(problem, every, 1.0, bins=3).least(np.inf) == np.inf


@pytest.mark.parametrize(("seed", "tables", "local"), [*((seed, 2, 2) for seed in range(5)), (0, 3, 1), (1, 3, 1)])
def test_the_bound_is_the_best_of_all_placements_on_two_nodes(seed: int, tables: int, local: int) -> None:
    problem, best = two_nodes(seed, tables, local)
    bounds = mode_bounds(problem.model, problem.priced)
    worth = worth_of(bounds, problem.priced, best * 1.3)
    by_rank, by_node = (enumerated_bound(problem, worth, bounds[0].ms, best * 1.3, bins) for bins in (2 * local, 2))
    assert bounds[0].ms <= by_node <= by_rank * (1 + 1e-9)
    assert by_rank == pytest.approx(best, rel=1e-6)


def test_interchangeable_ranks_are_found_and_placements_that_differ_by_them_are_listed_once() -> None:
    problem, _ = whole_tables(0)
    every = Enumeration(problem, np.ones(len(problem.priced.cost), dtype=bool), 1.0, bins=3)
    assert every.classes == [[0, 1, 2]]
    both = every.ways[0].beside(every.ways[1])
    assert len(both.ms) == 9
    assert len(every._different(both)) == 2  # on one rank, or apart


def test_shards_of_one_size_are_dealt_once() -> None:
    problem, _ = two_nodes(0, local=2)
    for option in (option for options in problem.options for option in options if not option.proposal.assignments):
        for bins, local in ((4, 1), (2, 2)):
            dealt = [tuple(ranks) for ranks in _assignments(option, 4, bins)]
            free = itertools.product(range(4), repeat=len(option.of))
            expected = {
                tuple(sorted(zip(option.of.tolist(), (rank // local for rank in ranks), strict=True)))
                for ranks in free
                if not option.distinct or len(set(ranks)) == len(ranks)
            }
            found = [
                tuple(sorted(zip(option.of.tolist(), (r // local for r in ranks), strict=True))) for ranks in dealt
            ]
            assert sorted(found) == sorted(expected)


@settings(max_examples=examples(8, 25))
@given(problems())
def test_no_plan_found_by_any_means_is_below_the_strong_bound(drawn: Any) -> None:
    tables, topology, constraints, workload = drawn
    model = CostModel(tables, topology, workload, constraints)
    steps = []
    ways: list[dict[str, Any]] = [{}, {"local_search_passes": 0}, {"route": "direct"}, {"solver": "exact"}]
    for way in ways:
        options = {"constraints": constraints, "workload": workload, "time_limit_s": 0.2, "explain": False, **way}
        with suppress(PlanError):
            plan = best_plan(tables, topology, **options)
            steps.append(estimate(plan, tables, topology, workload, constraints=constraints).step_ms)
    if steps:
        problem = Problem(model, options_of(model, tables, constraints))
        bound = strong_bound(problem, max(steps))
        assert mode_bounds(model, problem.priced)[0].ms * (1 - 1e-9) <= bound <= min(steps) * (1 + 1e-9)


@pytest.mark.parametrize(*grid(seed=[2, 8, 22, 79], gate={"seed": [22, 79]}))
def test_models_of_few_tables_on_up_to_eight_ranks_are_solved(seed: int) -> None:
    from benchmarks.planner import random_model

    tables, topology, workload = random_model(seed)
    assert len(tables) * topology.world_size <= FEW
    plan = best_plan(tables, topology, workload=workload, explain=False)
    assert plan.gap < 0.005
