"""Lower bounds and the exact solver: never above the best of all placements, and the exact plan is that best."""

import random
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from recshard_lab.planner import CostModel, EmbeddingShardingPlanner, Workload, estimate
from recshard_lab.planner.model.loads import MEMORY
from recshard_lab.planner.search import enumeration, ways
from recshard_lab.planner.search.options import options_of
from recshard_lab.sharding import ParameterConstraints, PlanError, Topology, scheme_names
from tests.grid import examples, grid
from tests.planner.problems import best_plan, best_step, random_problem, random_tables, table
from tests.planner.test_planner import problems


def small_problem(seed: int) -> tuple[list[Any], Topology, Workload, float]:
    """Two or three tables on two ranks, memory from ample to hardly enough; and the best step of all placements."""
    draw = random.Random(seed)
    tables = [table(f"t{i}", int(10 ** draw.uniform(1, 6)), draw.choice([4, 16, 64])) for i in range(2 + seed % 2)]
    optimizer = draw.choice(["exact_sgd", "exact_row_wise_adagrad"])
    load = Workload(
        draw.choice([64, 512, 4096]), {f"t{i}_id": draw.uniform(1, 30) for i in range(3)}, optimizer=optimizer
    ).for_tables(tables)
    device, slack = draw.choice(["cpu", "cuda"]), draw.choice([1.15, 1.4, 100])
    ample = CostModel(tables, Topology(2, device, hbm_cap=10**13, ddr_cap=10**13, reserve_fraction=0), load)
    least = sum(min(o.loads[MEMORY:].sum() for o in options) for options in options_of(ample, tables, {})) / 2
    cap = int((least + ample.fixed_memory.sum()) * slack)
    topology = Topology(2, device, hbm_cap=cap, ddr_cap=cap, reserve_fraction=0)
    model = CostModel(tables, topology, load)
    return tables, topology, load, best_step(model, options_of(model, tables, {}))


def test_bounds_lie_below_the_best_of_all_placements_and_exact_plans_are_that_best() -> None:
    compared = 0
    for seed in range(examples(8, 24)):
        tables, topology, load, best = small_problem(seed)
        for solver in ("greedy", "exact"):
            planner = EmbeddingShardingPlanner(topology, workload=load, solver=solver, time_limit_s=20)
            if not np.isfinite(best):
                with pytest.raises(PlanError):
                    planner.plan_tables(tables)
                continue
            plan = planner.plan_tables(tables)
            found = plan.estimate
            assert found.gap is not None
            assert found.lower_bound <= best * (1 + 1e-9), (seed, solver)
            compared += 1
            if solver == "exact":
                assert found.step_ms == pytest.approx(best, rel=2e-5), seed
                assert found.gap < 1e-4 or topology.compute_device == "cpu"
    assert compared >= examples(8, 30)


@settings(max_examples=examples(8, 60))
@given(problems())
def test_a_bound_is_below_every_plan(problem: Any) -> None:
    tables, topology, constraints, workload = problem
    try:
        plan = best_plan(tables, topology, constraints=constraints, workload=workload, explain=False)
    except PlanError:
        return
    bound = plan.estimate.lower_bound
    assert 0 <= bound <= plan.estimate.step_ms * (1 + 1e-9)
    for name in scheme_names():
        wish = {config.name: ParameterConstraints(sharding_types=[name]) for config in tables}
        try:
            other_plan = best_plan(tables, topology, constraints=wish, workload=workload, explain=False)
        except PlanError:
            continue
        free_plan = best_plan(tables, topology, workload=workload, explain=False)
        assert (free_plan.estimate.lower_bound or 0) <= other_plan.estimate.step_ms * (1 + 1e-9), name


@pytest.mark.parametrize(*grid(seed=range(examples(2, 6)), gate={"seed": [1]}))
def test_exact_is_never_worse_than_greedy_and_its_bound_never_weaker(seed: int) -> None:
    tables, topology, workload = random_problem(seed)
    found = {}
    for solver in ("greedy", "exact"):
        plan = best_plan(tables, topology, workload=workload, solver=solver, time_limit_s=1.0)
        plan.validate(tables, topology.world_size)
        again = estimate(plan, tables, topology, workload)
        assert again.fits
        found[solver] = plan.estimate
        assert plan.estimate.step_ms == pytest.approx(again.step_ms)
    assert found["exact"].step_ms <= found["greedy"].step_ms * (1 + 1e-9)
    assert found["exact"].lower_bound >= found["greedy"].lower_bound * (1 - 1e-9)


def test_a_search_that_would_list_too_much_lists_less(monkeypatch: pytest.MonkeyPatch) -> None:
    tables, load = random_tables(6, 1)
    full = best_plan(tables, Topology(4), workload=load)
    monkeypatch.setattr(enumeration, "MOST_WAYS", 0)
    monkeypatch.setattr(ways, "MOST_SETS", -1)
    found = best_plan(tables, Topology(4), workload=load)
    assert found.estimate.step_ms >= full.estimate.lower_bound >= found.estimate.lower_bound > 0


def test_an_optimizer_whose_cost_is_unknown_is_refused() -> None:
    tables, load = random_tables(1, 1)
    with pytest.raises(ValueError, match=r"update_cost has no entry for 'exact_sgd'.*Fix: add one"):
        CostModel(tables, replace(Topology(2), update_cost={"adam": 2.0}), replace(load, optimizer="exact_sgd"))


def test_the_gap_is_told_and_a_hand_made_plan_has_none() -> None:
    tables, workload = random_tables(26, 0)
    topology = Topology(8, "cuda", hbm_cap=80 * 10**9)
    plan = best_plan(tables, topology, workload=workload)
    assert plan.estimate.lower_bound <= plan.bound_ms <= plan.estimate.step_ms
    by_hand = estimate(plan, tables, topology, workload)
    assert by_hand.lower_bound is None
    assert by_hand.gap is None


def test_plans_are_near_the_exhaustive_optimum_with_ample_and_tight_memory() -> None:
    gaps = []
    for seed in range(40):
        tables, topology, workload, best = small_problem(seed)
        if np.isfinite(best):
            gaps.append(best_plan(tables, topology, workload=workload).estimate.step_ms / best - 1)
    assert len(gaps) > 30
    assert min(gaps) > -1e-9
    assert np.median(gaps) < 0.005
    assert np.mean(gaps) < 0.02
    assert max(gaps) < 0.1


def test_solvers_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="did you mean 'exact'"):
        EmbeddingShardingPlanner(Topology(2), solver="exakt")
    with pytest.raises(ValueError, match="time_limit_s must be positive, got 0"):
        EmbeddingShardingPlanner(Topology(2), time_limit_s=0)


@pytest.mark.gate
def test_only_the_exact_solver_loads_scipy() -> None:
    code = (
        "import sys; from recshard_lab import *; import recshard_lab as rs;"
        "from recshard_lab.planner.search import exact;"
        "t=[rs.EmbeddingBagConfig(name=n, num_embeddings=10**5, embedding_dim=64, feature_names=[n]) for n in 'abc'];"
        "rs.EmbeddingShardingPlanner(rs.Topology(2)).plan_tables(t); assert 'scipy' not in sys.modules;"
        "rs.EmbeddingShardingPlanner(rs.Topology(2), solver='exact').plan_tables(t)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.gate
def test_plans_of_random_models_are_near_the_best_plan_of_the_exact_solver() -> None:
    from benchmarks.planner import EXACT_RANKS, gap_of, random_model

    small = [seed for seed in range(20) if random_model(seed)[1].world_size <= EXACT_RANKS][: examples(3, 8)]
    found = [gap_of(seed, seconds=0.5) for seed in small]
    assert not any(gap.refused for gap in found)
    assert np.median([gap.bound for gap in found]) < 3
    assert max(gap.best for gap in found) < 4


@pytest.mark.gate
@pytest.mark.parametrize(("count", "ranks"), [(500, 8), pytest.param(300, 256, marks=pytest.mark.nightly)])
def test_many_tables_on_many_ranks_get_a_plan_that_fits(count: int, ranks: int) -> None:
    tables, workload = random_tables(count, 0)
    topology = Topology(ranks, "cuda", hbm_cap=120 * 10**9, local_world_size=8)
    plan = best_plan(tables, topology, workload=workload)
    assert estimate(plan, tables, topology, workload).fits
