"""The step under a pipeline: by hand, within its bounds, and what planners choose by it."""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from recshard_lab.lab import views
from recshard_lab.lab.draw.theme import ms_text
from recshard_lab.planner import CostModel, Workload, estimate
from recshard_lab.planner.model.cost import PHASES, dense_step
from recshard_lab.planner.model.estimate import plan_loads
from recshard_lab.planner.model.overlap import FIGURES, FREE
from recshard_lab.planner.workload import PIPELINES
from recshard_lab.sharding import ShardingPlan, Topology, scheme_named
from tests.grid import examples, grid
from tests.planner.problems import best_plan, random_problem, random_tables, table
from tests.planner.test_routes import LOAD, plans
from tests.refusals import not_refused

TABLES, DRAWN = random_tables(6, 3)
PIPED = [name for name in PIPELINES if name != "none"]
LOADED = replace(DRAWN, dense_parameters=10**6, dense_features=13)


def even(top: Topology, scheme: str = "row_wise") -> ShardingPlan:
    return ShardingPlan({"": {t.name: scheme_named(scheme).default(t, top) for t in TABLES}})  # type: ignore[dict-item]


def under(top: Topology, pipeline: str, load: Workload = LOADED, scheme: str = "row_wise") -> Any:
    return estimate(even(top, scheme), TABLES, top, replace(load, pipeline=pipeline))


GPUS = Topology.preset("h100x16", host_ms=0.01, step_ms=0.05, peer_ms=0.001)
STRAGGLE = 1 + GPUS.straggler_sigma * math.sqrt(2 * math.log(GPUS.world_size))
NO_HOST = dict.fromkeys(FIGURES["host"], 0.0)
CORES = Topology(4, cores_per_host=4, ddr_cap=10**12)


@pytest.mark.parametrize("top", [GPUS, CORES])
def test_without_a_pipeline_no_number_changes(top: Topology) -> None:
    found, piped = under(top, "none"), under(top, "sparse_dist")
    assert found.overlap is None
    assert found.step_ms == found.plain_step_ms == found.ms.max(axis=0).sum() == piped.plain_step_ms
    np.testing.assert_array_equal(found.ms, piped.ms)
    assert "pipeline" not in str(found)
    assert "pipeline sparse_dist" in str(piped)
    assert max(map(len, str(piped).splitlines())) <= 100


def test_the_chain_on_gpus_is_the_step_without_the_input_side_the_host_and_the_averaged_gradient() -> None:
    top = replace(GPUS, **NO_HOST)
    plain = under(top, "none")
    alone = dense_step(LOADED, replace(top, world_size=1, local_world_size=1))[0]
    rest = plain.step_ms - plain.ms[:, 0].max() - plain.ms[:, PHASES.index("dense")].max() + alone * STRAGGLE
    for pipeline in PIPED:
        assert under(GPUS, pipeline).overlap.needs_ms["chain"] == pytest.approx(rest)


def test_resources_are_what_is_left_when_all_else_is_free() -> None:
    """Each resource beside a topology on which everything else costs nothing, and the copy counted by hand."""
    found = under(GPUS, "prefetch").overlap.needs_ms
    wires = dict.fromkeys(("inter_host_latency_ms", "intra_host_latency_ms", "peer_ms", "inter_host_peer_ms"), 0.0)
    wires |= dict.fromkeys(("intra_host_bw", "inter_host_bw"), FREE)
    compute = dict.fromkeys(("cache_bw", "hbm_mem_bw", "flops_per_ms", "tf32_flops_per_ms"), FREE)
    compute |= dict.fromkeys(("route_ns_per_id", "kernel_ms", "lookup_ns_per_id", "update_ns_per_id"), 0.0)

    def alone(**free: Any) -> float:
        return under(replace(GPUS, **free), "none").max_rank_ms

    sizes = GPUS.inter_host_latency_ms + GPUS.peer_ms * 7 + GPUS.inter_host_peer_ms * 8
    assert found["network"] == pytest.approx(alone(**NO_HOST, **compute) - sizes * STRAGGLE)
    assert found["host"] == pytest.approx(alone(**wires, **compute))
    assert found["device"] == pytest.approx(alone(**NO_HOST, **wires))
    ids = 512 * sum(LOADED.pooling_factor(t.feature_names[0]) for t in TABLES)
    copied = 8 * ids + 4 * 512 * len(TABLES) + 4 * 512 * (13 + 1)
    assert found["copy"] == pytest.approx(copied / GPUS.ddr_mem_bw)


def test_what_a_step_needs_longest_bounds_it() -> None:
    for name, value, bound in (("hbm_mem_bw", 1e6, "chain"), ("launch_ms", 1.0, "host"), ("ddr_mem_bw", 1e3, "copy")):
        found = under(replace(GPUS, **{name: value}), "prefetch").overlap
        assert found.bound_by == bound
        assert found.lower_bound_ms == found.needs_ms[bound] == max(found.needs_ms.values())
        assert found.lower_bound_ms <= found.step_ms * (1 + 1e-9)
        assert found.step_ms <= 1.1 * found.lower_bound_ms


def test_a_second_thread_takes_launches_off_the_host() -> None:
    slow = replace(GPUS, launch_ms=0.1)
    alone, helped = (under(slow, "prefetch", replace(LOADED, pipeline_threads=flag)).overlap for flag in (False, True))
    assert helped.needs_ms["thread"] > 0
    assert helped.needs_ms["host"] < alone.needs_ms["host"]
    assert helped.step_ms < alone.step_ms


def test_many_plans_at_once_are_simulated_like_one() -> None:
    found = CostModel(TABLES, GPUS, replace(LOADED, pipeline="prefetch"))
    loads = plan_loads(found, even(GPUS).pairs(TABLES))
    many = found.step_ms(np.repeat(loads[:, None], 50, axis=1))
    assert many.shape == (50,)
    np.testing.assert_allclose(many, float(found.step_ms(loads)))


def test_the_network_bounds_a_step_that_mostly_sends_ids() -> None:
    tiny = [table("t", 1000, 4)]
    load = Workload(4096, 200.0, pipeline="prefetch")
    top = Topology.preset("h100x16", inter_host_bw=1e6)
    plan = ShardingPlan({"": {"t": scheme_named("row_wise").default(tiny[0], top)}})  # type: ignore[dict-item]
    found = estimate(plan, tiny, top, load)
    assert found.overlap.bound_by == "network"
    assert found.overlap.lower_bound_ms <= found.step_ms < found.plain_step_ms


def test_on_cores_of_their_own_ranks_hide_the_waiting_share_alone() -> None:
    found, plain = under(CORES, "sparse_dist"), under(CORES, "none")
    ids = 512 * sum(LOADED.pooling_factor(t.feature_names[0]) for t in TABLES)
    wire = 3 * 4 * (ids / 4 + 512 * len(TABLES)) / CORES.intra_host_bw
    latency = CORES.intra_host_latency_ms + 3 * CORES.peer_ms
    assert plain.step_ms - found.step_ms == pytest.approx(wire + latency, rel=1e-3)
    assert plain.step_ms - under(CORES, "prefetch").step_ms == pytest.approx(wire + 2 * latency, rel=1e-3)


@pytest.mark.parametrize("pipeline", PIPED)
def test_ranks_that_share_cores_gain_nothing_and_are_told(pipeline: str) -> None:
    shared = replace(CORES, cores_per_host=2)
    found = under(shared, pipeline)
    assert found.step_ms == pytest.approx(found.plain_step_ms)
    assert "The ranks share cores, so the pipeline hides nothing" in " ".join(str(found).split())
    assert under(shared, "none").step_ms == pytest.approx(found.step_ms)


@given(plans())
def test_the_chains_terms_and_the_plain_step_hold_the_step_between_them(drawn: Any) -> None:
    tables, plan, top = drawn
    for device, pipeline in itertools.product(("cpu", "cuda"), PIPED):
        on = replace(top, compute_device=device, hbm_cap=10**9, ddr_mem_bw=1e12)
        model = CostModel(tables, on, replace(LOAD, pipeline=pipeline))
        loads = plan_loads(model, plan.pairs(tables))
        terms = model.terms.spent(loads, on.num_nodes)[:-1].max(axis=1).sum()
        step, plain = float(model.step_ms(loads)), float(model.step_of(model.phases(loads)))
        assert terms <= step * (1 + 1e-9)
        assert step <= plain * (1 + 1e-9)
        many = model.step_ms(np.stack([loads, 2 * loads], axis=1))
        assert many[0] == pytest.approx(step)
        parts = model.overlapped.split(loads)
        assert all((part >= -1e-9 * parts[0].max()).all() for part in parts)


@pytest.mark.parametrize(*grid(pipeline=PIPED, device=["cpu", "cuda"]))
def test_no_plan_is_shorter_than_the_bound_and_the_planners_is_near_the_best(device: str, pipeline: str) -> None:
    """Every way to put three tables on two ranks, each under the schemes that need no choice of cuts."""
    tables, load = random_tables(3, 11)
    load = replace(load, pipeline=pipeline)
    top = Topology(2, device, hbm_cap=10**12, ddr_cap=10**12, cores_per_host=2)
    plan = best_plan(tables, top, workload=load)
    found = plan.estimate
    ways = []
    for t in tables:
        whole = [scheme_named("table_wise").default(t, top, [rank]) for rank in range(2)]
        ways.append([*whole, *(scheme_named(name).default(t, top) for name in ("row_wise", "data_parallel"))])
    steps = []
    for chosen in itertools.product(*ways):
        plan = ShardingPlan({"": {t.name: one for t, one in zip(tables, chosen, strict=True)}})  # type: ignore[dict-item]
        steps.append(estimate(plan, tables, top, load).step_ms)
    assert found.lower_bound <= min(steps)
    assert found.step_ms <= min(steps) * 1.02


@pytest.mark.parametrize(*grid(seed=range(examples(3, 6)), gate={"seed": [2]}))
def test_a_plan_for_a_pipeline_is_no_worse_under_it_than_one_made_without(seed: int) -> None:
    tables, top, load = random_problem(seed)
    piped = replace(load, pipeline="prefetch")
    other = best_plan(tables, top, workload=load, explain=False)
    plan = best_plan(tables, top, workload=piped)
    found = plan.estimate
    assert found.step_ms <= estimate(other, tables, top, piped).step_ms * 1.05
    assert found.gap is not None
    assert found.step_ms == pytest.approx(estimate(plan, tables, top, piped).step_ms)
    assert plan.explain(tables[0].name).step_ms == pytest.approx(found.step_ms)


@pytest.mark.gate
def test_the_milp_keeps_a_bound_under_a_pipeline() -> None:
    tables, load = random_tables(4, 5)
    plan = best_plan(
        tables,
        Topology(4, "cuda", hbm_cap=10**12),
        workload=replace(load, pipeline="prefetch"),
        solver="exact",
        time_limit_s=5,
    )
    found = plan.estimate
    assert 0 <= found.gap < 0.2


def test_what_cannot_be_honoured_is_refused() -> None:
    piped = replace(LOADED, pipeline="prefetch")
    refusals: list[tuple[Any, str]] = [
        (lambda: Workload(pipeline="semi_sync"), "pipeline must be one of none, sparse_dist, prefetch"),
        (lambda: estimate(even(CORES), TABLES, CORES, piped, cost_model="torchrec"), r"torchrec.*no pipeline"),
        (lambda: Workload(pipeline_threads=2), "pipeline_threads must be True or False, got 2"),  # type: ignore[arg-type]
    ]
    assert not_refused(refusals) == []


def test_the_time_line_shows_the_plain_step_and_tells_the_other() -> None:
    found = under(GPUS, "prefetch")
    view = views.phases(found)
    assert f"under {found.overlap.pipeline}" in view.title
    assert "the chain from lookup to lookup" in view.summary
    assert view.title.index(ms_text(found.plain_step_ms)) < view.title.index(f"{ms_text(found.step_ms)} under")
