"""What a planner keeps of its search: real plans at their real cost, bounded; nothing where it is not asked."""

import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from recshard_lab.planner import EmbeddingShardingPlanner, Workload, estimate
from recshard_lab.planner.search import record as search_record
from recshard_lab.planner.search.trace import STAGES, SearchTrace
from recshard_lab.planner.sweep.points import undominated
from recshard_lab.sharding import ParameterConstraints, PlanError, ShardingPlan, Topology
from tests.grid import NIGHT, examples, grid
from tests.planner.problems import best_plan, random_problem, random_tables, table

CASES: dict[str, dict[str, Any]] = {
    "annealed": {},
    "tight": {"cap": 1.35},
    "two nodes": {"local": 2},
    "pipeline": {"workload": Workload(pipeline="sparse_dist")},
    "TorchRec's costs": {"cost_model": "torchrec"},
    "one route": {"route": "two_hop", "local": 2},
    "together": {"constraints": {"t1": ParameterConstraints(colocate_with=["t0"])}},
    "two memories": {
        "constraints": {f"t{n}": ParameterConstraints(compute_kernels=["fused", "fused_uvm"]) for n in range(12)},
        "cap": 1.1,
    },
}


def planned(case: str, keep_search: bool = True, **own: Any) -> tuple[Any, ShardingPlan, list[Any]]:
    given = {**CASES[case], **own}
    tables, workload = random_tables(12, 0)
    ranks, local, cap = given.pop("ranks", 4), given.pop("local", 4), given.pop("cap", 100.0)
    fair = sum(each.weight_bytes for each in tables) / ranks
    topology = Topology(ranks, "cuda", local_world_size=local, hbm_cap=int(cap * 1.1 * fair))
    given.setdefault("workload", workload)
    planner = EmbeddingShardingPlanner(topology, keep_search=keep_search, **given)
    return planner, planner.plan_tables(tables), tables


def kept(plan: ShardingPlan) -> SearchTrace:
    assert plan.search is not None
    return plan.search


DAY = ["annealed", "together", "TorchRec's costs"]
GATE = ["two nodes", "two memories"]
CASE = grid(case=list(CASES) if NIGHT else DAY + GATE, gate={"case": GATE})


@pytest.mark.parametrize(*CASE)
def test_a_candidate_costs_what_estimate_says_of_its_plan(case: str) -> None:
    planner, made, tables = planned(case)
    found = kept(made)
    sample = [*found.candidates[:: max(1, len(found.candidates) // 12)], *found.single_schemes.values()]
    for one in sample:
        plan = found.plan(one)
        plan.validate({"": tables}, planner.topology.world_size)
        own = planner.topology, planner.workload, planner.constraints
        truth = estimate(plan, tables, *own, cost_model=planner.cost_model)
        assert one.step_ms == pytest.approx(truth.step_ms, rel=1e-9)
        assert one.memory_bytes == pytest.approx(float(truth.memory_bytes.sum(axis=1).max()), rel=1e-9)
        assert one.fits == truth.fits
        assert one.stage in STAGES


@pytest.mark.parametrize(*CASE)
def test_the_plan_is_the_one_that_is_made_without_keeping(case: str) -> None:
    _, plan, _ = planned(case)
    _, plain, _ = planned(case, keep_search=False)
    assert plan == plain
    found = kept(plan)
    assert found.chosen in found.candidates
    assert found.plan(found.chosen) == plan
    assert found.chosen.step_ms == pytest.approx(plan.estimate.step_ms, rel=1e-9)
    assert found.lower_bound == plan.bound_ms


@pytest.mark.parametrize(*grid(seed=range(examples(2, 4)), gate={"seed": [1]}))
def test_no_plan_that_fits_is_below_the_bound_and_the_frontier_is_that_of_all_pairs(seed: int) -> None:
    tables, topology, workload = random_problem(seed)
    plan = best_plan(tables, topology, workload=workload, keep_search=True)
    found = kept(plan)
    assert all(one.step_ms >= found.lower_bound * (1 - 1e-9) for one in found.candidates if one.fits)
    fitting = [one for one in (*found.candidates, *found.single_schemes.values()) if one.fits]
    values = np.array([(one.step_ms, one.memory_bytes) for one in fitting])
    assert {tuple(v) for v in values[undominated(values)]} == {(o.step_ms, o.memory_bytes) for o in found.frontier()}
    best = [one.step_ms for one in found.best_so_far()]
    assert best == sorted(best, reverse=True)
    assert best[-1] == min(one.step_ms for one in found.candidates if one.fits)
    assert [one.number for one in found.candidates] == sorted({one.number for one in found.candidates})


def test_a_single_scheme_is_every_table_under_it_where_it_can_cut_them() -> None:
    _, plan, _ = planned("annealed", constraints={"t3": ParameterConstraints(sharding_types=["row_wise"])})
    found = kept(plan).single_schemes
    assert {"table_wise", "row_wise", "column_wise", "data_parallel"} <= set(found)
    for scheme, one in found.items():
        others = [place.option.proposal.scheme for place in one.placements if place.option.proposal.scheme != scheme]
        assert others == ([] if scheme == "row_wise" else ["row_wise"])
        assert one.elsewhere == len(others)


def test_a_long_search_is_thinned_and_says_so_and_loses_neither_the_best_nor_the_frontier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = kept(planned("tight")[1])
    monkeypatch.setattr(search_record, "MOST", 40)
    thin = kept(planned("tight")[1])
    assert whole.every == 1
    assert whole.thinned == f"All {whole.seen:,} plans looked at."
    assert thin.seen == whole.seen
    assert thin.every > 1
    assert len(thin.candidates) < len(whole.candidates) / 3
    assert f"{len(thin.candidates):,} of {thin.seen:,} plans looked at: one in {thin.every}" in str(thin)

    def costs(some: Any) -> np.ndarray:
        return np.array([(one.step_ms, one.memory_bytes) for one in some])

    np.testing.assert_allclose(costs(thin.best_so_far()), costs(whole.best_so_far()), rtol=1e-12)
    np.testing.assert_allclose(costs(thin.frontier()), costs(whole.frontier()), rtol=1e-12)
    strided = [one.number for one in whole.candidates if one.number % thin.every == 0]
    assert set(strided) <= {one.number for one in thin.candidates}


def test_where_nothing_fits_the_search_is_kept_and_none_of_it_fits() -> None:
    planner = EmbeddingShardingPlanner(Topology(2, "cuda", hbm_cap=10**6), keep_search=True)
    with pytest.raises(PlanError, match="does not fit") as refused:
        planner.plan_tables([table("a", 10**6, 64)], explain=False)
    found = refused.value.search
    assert found.chosen is None
    assert found.lower_bound is None
    assert not any(one.fits for one in (*found.candidates, *found.single_schemes.values()))
    assert found.single_schemes["row_wise"].memory_bytes < found.single_schemes["table_wise"].memory_bytes


@pytest.mark.nightly
def test_a_search_by_local_moves_is_kept_move_by_move() -> None:
    tables, workload = random_tables(90, 1)
    plan = best_plan(tables, Topology(16, "cuda"), workload=workload, keep_search=True)
    stages = {one.stage for one in kept(plan).candidates}
    assert {"placed", "moved"} <= stages
    steps = [one.step_ms for one in kept(plan).best_so_far()]
    assert len(steps) > 3


def test_the_exact_solver_tells_its_own_plans_too() -> None:
    _, plan, _ = planned("tight", solver="exact", time_limit_s=1.5)
    greedy = kept(planned("tight")[1])
    found = kept(plan)
    assert found.seen > greedy.seen
    assert found.plan(found.chosen) == plan


def test_what_is_kept_does_not_travel_with_the_plan() -> None:
    _, plan, _ = planned("annealed")
    assert plan.search is not None
    assert pickle.loads(pickle.dumps(plan)).search is None
    assert not plan.planned.planner.keep_search


@pytest.mark.gate
def test_a_search_that_is_not_kept_loads_and_remembers_nothing() -> None:
    script = (
        "import sys; from recshard_lab.sharding import Topology; from tests.planner.problems import *\n"
        "tables, workload = random_tables(12, 0)\n"
        "assert best_plan(tables, Topology(4, 'cuda'), workload=workload).search is None\n"
        "kept = {'recshard_lab.planner.search.record', 'recshard_lab.planner.search.trace'}\n"
        "print(sorted(kept & set(sys.modules)))\n"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_a_search_that_is_not_kept_calls_what_it_called_before_and_nothing_else() -> None:
    """Number of calls of each function of the planner, without those that only check for a recorder."""

    def calls(keep: bool) -> dict[str, int]:
        found: dict[str, int] = {}

        def count(frame: Any, event: str, _: Any) -> None:
            if event == "call" and "recshard_lab/planner" in frame.f_code.co_filename:
                found[frame.f_code.co_qualname] = found.get(frame.f_code.co_qualname, 0) + 1

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            planned("annealed", keep_search=keep)
        finally:
            sys.setprofile(before)
        return found

    plain, told = calls(False), calls(True)
    assert told["Recorder.offer"] > 100
    assert not any(name.startswith(("Recorder", "SearchTrace", "Candidate")) for name in plain)
    assert "Anneal._tell" not in plain
    asks = ("Search.watch", "Search._watches", "EmbeddingShardingPlanner._recorder")
    assert sum(plain.get(name, 0) for name in asks) < 40
