"""The strong bound: below the best of all placements, below plans of constrained searches, and above the fast bound."""

import itertools

import numpy as np
import pytest

from recshard_lab.planner import CostModel, Workload
from recshard_lab.planner.search.bounds import mode_bounds, strong_bound, worth_of
from recshard_lab.planner.search.options import Placement, options_of
from recshard_lab.planner.search.problem import Problem
from recshard_lab.planner.search.relaxation import Relaxation
from recshard_lab.sharding import ParameterConstraints, Topology
from tests.grid import examples
from tests.planner.problems import best_plan, random_tables, table
from tests.planner.test_packing_bound import whole_tables

SCHEMES = ["table_wise", "row_wise", "table_row_wise"]


def two_nodes(seed: int, num_tables: int = 2, local: int = 2) -> tuple[Problem, float]:
    """Tables that nodes of two GPUs share under any route, with ample memory; and the best step of all placements."""
    draw = np.random.default_rng(seed)
    tables = [table(f"t{i}", int(10 ** draw.uniform(2, 6)), int(draw.choice([16, 64, 128]))) for i in range(num_tables)]
    load = Workload(int(draw.choice([256, 2048])), {f"t{i}_id": draw.uniform(1, 40) for i in range(num_tables)})
    top = Topology(2 * local, "cuda", hbm_cap=10**11, local_world_size=local)
    wishes = {config.name: ParameterConstraints(sharding_types=SCHEMES) for config in tables}
    model = CostModel(tables, top, load, wishes)
    problem = Problem(model, options_of(model, tables, wishes))
    ways = []
    for options in problem.options:
        own = {}
        for option in options:
            free = itertools.product(range(top.world_size), repeat=len(option.of))
            for ranks in option.proposal.assignments or free:
                loads = Placement(option, tuple(ranks)).loads(top)
                own[loads.tobytes()] = loads
        ways.append(np.stack(list(own.values())))
    best = np.inf
    for first in itertools.product(*ways[:-1]):
        loads = np.sum(first, axis=0) + ways[-1]  # [n, K, W]
        best = min(best, float(np.min(model.step_ms(np.moveaxis(loads, 0, 1)))))
    return problem, best


@pytest.mark.parametrize("seed", range(examples(2, 5)))
def test_no_bound_is_above_the_best_of_all_placements_on_two_nodes(seed: int) -> None:
    problem, best = two_nodes(seed)
    assert any(option.route == "two_hop" for options in problem.options for option in options)
    bounds = mode_bounds(problem.model, problem.priced)
    for step in (best, best * 1.005, best * 1.5):
        relaxation = Relaxation(problem, worth_of(bounds, problem.priced, step * (1 + 1e-9)), step)
        assert relaxation.bound() <= best * (1 + 1e-9)
        assert relaxation.whole_bound() <= best * (1 + 1e-9)
        assert bounds[0].ms <= strong_bound(problem, step) <= best * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(examples(4, 12)))
def test_no_bound_is_above_the_best_of_whole_tables_on_three_ranks(seed: int) -> None:
    problem, best = whole_tables(seed)
    if np.isfinite(best):
        assert strong_bound(problem, best * 1.2) <= best * (1 + 1e-6)


def test_shards_alone_prove_more_than_averages_and_whole_options_more_than_shares() -> None:
    tables, workload = random_tables(26, seed=0)
    top = Topology(64, "cuda", hbm_cap=80 * 10**9, local_world_size=8)
    model = CostModel(tables, top, workload)
    problem = Problem(model, options_of(model, tables, {}))
    fast = mode_bounds(model, problem.priced)
    step = fast[0].ms * 1.2
    relaxation = Relaxation(problem, worth_of(fast, problem.priced, step), step)
    shares, whole = relaxation.bound(), relaxation.whole_bound()
    assert fast[0].ms * 1.005 < shares
    assert shares * 1.005 < whole < step


@pytest.mark.gate
@pytest.mark.parametrize(("count", "ranks"), [(12, 16), (20, 32), (26, 64)][: examples(1, 3)])
def test_no_plan_of_a_constrained_search_is_below_the_bound(count: int, ranks: int) -> None:
    tables, workload = random_tables(count, seed=count)
    top = Topology(ranks, "cuda", hbm_cap=80 * 10**9, local_world_size=8)
    model = CostModel(tables, top, workload)
    problem = Problem(model, options_of(model, tables, {}))
    steps = []
    for scheme in (None, "row_wise", "column_wise", "grid_shard", "table_row_wise", "table_wise"):
        wish = ParameterConstraints(forbidden_sharding_types=[scheme] if scheme else None)
        steps.append(
            best_plan(tables, top, constraints={t.name: wish for t in tables}, workload=workload).estimate.step_ms
        )
    bound = strong_bound(problem, max(steps))
    assert mode_bounds(model, problem.priced)[0].ms <= bound <= min(steps) * (1 + 1e-9)
