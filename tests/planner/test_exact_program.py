"""The program of the exact solver has the best placement, also where tables may not use every rank."""

import itertools

import numpy as np
import pytest
import scipy.optimize
import scipy.sparse

from recshard_lab.planner import CostModel, EmbeddingShardingPlanner, Workload, estimate
from recshard_lab.planner.search import greedy as search
from recshard_lab.planner.search.exact import _program
from recshard_lab.planner.search.greedy import Solution, _better
from recshard_lab.planner.search.options import Placement, options_of
from recshard_lab.planner.search.problem import Problem
from recshard_lab.sharding import ParameterConstraints, PlanError, Topology
from tests.planner.problems import best_plan, table


@pytest.mark.parametrize("pinned", [{}, {"small": [0]}, {"small": [0], "mid": [1]}, {"large": [1]}, {"mid": [0, 2]}])
def test_the_best_of_all_placements_is_a_solution(pinned: dict[str, list[int]]) -> None:
    tables = [table("small", 1_000, 64), table("mid", 20_000, 64), table("large", 300_000, 128)]
    load = Workload(512, {"small_id": 2.0, "mid_id": 9.0, "large_id": 20.0})
    top = Topology(3, "cuda", hbm_cap=10**9, reserve_fraction=0.0)
    wishes = {t.name: ParameterConstraints(sharding_types=["table_wise"], ranks=pinned.get(t.name)) for t in tables}
    model = CostModel(tables, top, load, wishes)
    problem = Problem(model, options_of(model, tables, wishes))
    best = np.inf
    for ranks in itertools.product(*(pinned.get(t.name, range(3)) for t in tables)):
        loads = np.zeros((len(problem.options[0][0].kinds), 3))
        for (option,), rank in zip(problem.options, ranks, strict=True):
            loads[:, rank] += option.loads[:, 0]
        best = min(best, float(model.terms.spent(loads, 1)[:-1].max(axis=1).sum()))
    program, _ = _program(problem, np.ones(len(problem.priced.cost), dtype=bool), best * 1.3)
    at = (np.concatenate(program.rows), np.concatenate(program.columns))
    shape = (len(program.low), len(program.cost))
    found = scipy.optimize.milp(
        np.array(program.cost),
        integrality=np.array(program.whole),
        bounds=scipy.optimize.Bounds(0.0, np.array(program.upper)),
        constraints=scipy.optimize.LinearConstraint(
            scipy.sparse.csc_matrix((np.concatenate(program.values), at), shape=shape),
            np.array(program.low),
            np.array(program.high),
        ),
    )
    assert found.status == 0
    assert found.fun + problem.fixed_ms == pytest.approx(best, rel=1e-5)


@pytest.mark.parametrize("swapped", [False, True])
def test_the_shorter_plan_and_the_higher_bound_are_kept_whichever_search_found_them(swapped: bool) -> None:
    tables = [table("small", 1_000, 64), table("large", 300_000, 128)]
    top = Topology(2, "cuda", hbm_cap=10**9, reserve_fraction=0.0)
    only = {t.name: ParameterConstraints(sharding_types=["table_wise"]) for t in tables}
    model = CostModel(tables, top, Workload(512, 20.0), only)
    options = [found[0] for found in options_of(model, tables, only)]
    apart = [Placement(option, (rank,)) for rank, option in enumerate(options)]
    together = [Placement(option, (0,)) for option in options]
    first, second = Solution(apart, 0.25), Solution(together, 0.5)
    found = _better(model, second, first) if swapped else _better(model, first, second)
    assert found.placements == apart
    assert found.bound_ms == 0.5


def test_tables_that_fit_nowhere_at_first_are_fitted_by_moving_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of 3 GB and three of 2 GB into two ranks of 6 GB: largest first on the emptier rank ends at 5 + 5 GB."""
    tables = [table(f"t{i}", rows, 125) for i, rows in enumerate([6 * 10**6] * 2 + [4 * 10**6] * 3)]
    top = Topology(2, "cuda", hbm_cap=6 * 10**9 + 5 * 10**7, reserve_fraction=0.0)
    only = {t.name: ParameterConstraints(sharding_types=["table_wise"]) for t in tables}
    load = Workload(64, optimizer="exact_sgd")
    greedy = EmbeddingShardingPlanner(top, constraints=only, workload=load)
    assert estimate(greedy.plan_tables(tables), tables, top, load).fits
    monkeypatch.setattr(search, "REPAIRS", 0)  # nothing moves: the exact solver still fits them
    with pytest.raises(PlanError, match="does not fit"):
        greedy.plan_tables(tables)
    plan = best_plan(tables, top, constraints=only, workload=load, solver="exact", time_limit_s=20)
    assert estimate(plan, tables, top, load).fits
    assert {plan.tables()[f"t{i}"].shards[0].rank for i in (0, 1)} in ({0}, {1})
    too_small = Topology(2, "cuda", hbm_cap=5 * 10**9, reserve_fraction=0.0)
    with pytest.raises(PlanError, match="does not fit"):
        best_plan(tables, too_small, constraints=only, workload=load, solver="exact")
