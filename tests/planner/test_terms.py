"""The linear terms: never more than the cost model, and equal to it where no rank waits for what it receives."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from recshard_lab.planner import CostModel, Workload
from recshard_lab.planner.model.estimate import plan_loads
from recshard_lab.planner.model.loads import HOST
from recshard_lab.planner.model.terms import modes
from recshard_lab.planner.search.options import options_of
from recshard_lab.planner.search.problem import Problem
from recshard_lab.sharding import (
    ROUTES,
    ParameterConstraints,
    PlanError,
    ShardingPlan,
    Topology,
    scheme_named,
    scheme_names,
)
from tests.grid import grid
from tests.planner.problems import best_plan, random_tables
from tests.planner.test_planner import problems
from tests.planner.test_routes import LOAD, plans

#: what only calibration sets
CALIBRATED: dict[str, Any] = {
    "contention": 0.6,
    "half_duplex": 0.8,
    "cache_bytes": 1e6,
    "bag_ns": 12.0,
    "sort_ns_per_id": 40.0,
    "sum_ns_per_number": 0.9,
    "replica_ms": 0.03,
    "replicas_ms": 0.3,
    "norm_ms": 0.9,
    "norm_ns_per_row": 45.0,
    "update_id_ns": {"exact_row_wise_adagrad": 7.0},
    "update_number_ns": {"exact_row_wise_adagrad": 1.0},
}


def compared(model: CostModel, loads: np.ndarray) -> tuple[float, float]:
    """The step by the terms and by the model, after checking that memory is the same."""
    spent = model.terms.spent(loads, model.topology.num_nodes)
    np.testing.assert_allclose(spent[-1], model.memory_total(loads), rtol=1e-9)
    return float(spent[:-1].max(axis=1).sum()), float(model.phases(loads).max(axis=-1).sum())


@given(plans())
def test_the_terms_never_say_more_than_the_model(drawn: Any) -> None:
    tables, plan, top = drawn
    for figures in ({}, CALIBRATED):
        model = CostModel(tables, replace(top, **figures), LOAD)
        terms, truth = compared(model, plan_loads(model, plan.pairs(tables)))
        assert terms <= truth * (1 + 1e-9)


@given(problems())
def test_the_terms_of_plans_are_the_models(problem: Any) -> None:
    tables, topology, constraints, workload = problem
    try:
        plan = best_plan(tables, topology, constraints=constraints, workload=workload, explain=False)
    except PlanError:
        return
    model = CostModel(tables, topology, workload, constraints)
    terms, truth = compared(model, plan_loads(model, plan.pairs(tables)))
    assert terms <= truth * (1 + 1e-9)
    if topology.num_nodes == 1 and (topology.compute_device == "cuda" or topology.world_size == 1):
        assert terms == pytest.approx(truth, rel=0.05)


@pytest.mark.parametrize(*grid(scheme=scheme_names(), route=ROUTES))
def test_the_terms_of_even_plans_are_exact(scheme: str, route: str) -> None:
    tables, _ = random_tables(5, 0)
    machines = [{"compute_device": device, "local_world_size": 4} for device in ("cpu", "cuda")]
    machines += [{**CALIBRATED, "local_world_size": local, "cores_per_host": 3} for local in (4, 8)]
    for figures in machines:
        top = Topology(8, ddr_cap=10**12, **figures)  # type: ignore[arg-type]
        plan = ShardingPlan({"": {t.name: scheme_named(scheme).default(t, top) for t in tables}})
        model = CostModel(tables, top, Workload(256, 10.0, optimizer="exact_row_wise_adagrad"))
        terms, truth = compared(model, plan_loads(model, plan.with_route(route).pairs(tables)))
        assert terms == pytest.approx(truth, rel=1e-6 if scheme in ("row_wise", "data_parallel") else 0.02)


def test_modes_are_all_unions() -> None:
    assert modes([1, 2, 4]) == [1, 2, 4, 3, 5, 6, 7]


@pytest.mark.parametrize("seed", range(3))
def test_a_placement_adds_to_a_plan_what_the_terms_say(seed: int) -> None:
    """Uneven row shards too, on nodes that hold several of them."""
    draw = np.random.default_rng(seed)
    tables, load = random_tables(4, seed)
    load = replace(load, zipf_alpha=1.1, frequency_ordered=True)
    top = Topology(8, "cuda", hbm_cap=10**12, local_world_size=2)
    wish = {t.name: ParameterConstraints(compute_kernels=["fused", "fused_uvm"]) for t in tables}
    model = CostModel(tables, top, load, wish)
    problem = Problem(model, options_of(model, tables, wish))
    for table, options in enumerate(problem.options):
        for at, option in enumerate(options):
            listed, count = option.proposal.assignments, len(option.of)
            ranks = draw.choice(8, count, replace=not option.distinct) if listed is None else listed[-1]
            if listed is None and draw.random() < 0.5:  # nodes with equally many shards
                ranks = np.arange(count) % 8
            state = problem.start()
            problem.put(state, table, problem.made(table, at, ranks))
            loads = problem.loads(state)
            spent = model.terms.spent(loads, top.num_nodes)
            what = f"{tables[table].name} {option.proposal.scheme} {option.route} {option.kernel} on {ranks}"
            assert problem.step_ms(state) == pytest.approx(spent[:-1].max(axis=1).sum(), rel=1e-9), what
            held = [spent[-1].max() - model.terms.fixed[-1], loads[HOST].max()]
            assert problem.held(state) == pytest.approx(held, rel=1e-9), what
