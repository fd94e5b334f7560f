"""Plans and prices of cached tables (compute kernel "fused_uvm_caching")."""

from dataclasses import replace

import pytest

from recshard_lab import (
    EmbeddingBagConfig,
    EmbeddingShardingPlanner,
    ParameterConstraints,
    PlanError,
    ShardingPlan,
    Topology,
    Workload,
    estimate,
    row_wise,
)
from recshard_lab.sharding import CacheParams
from tests.planner.problems import best_plan

KERNEL = "fused_uvm_caching"
GPUS = Topology(2, "cuda", hbm_cap=2_000_000, ddr_cap=10**9)
TABLE = EmbeddingBagConfig(10_000, 64, "t", feature_names=["f"])
LOAD = Workload(256, 10.0, optimizer="exact_row_wise_adagrad", zipf_alpha=1.2)
ROW = 64 * 4 + 4


def planned(share: float, workload: Workload = LOAD, topology: Topology = GPUS) -> ShardingPlan:
    wish = ParameterConstraints(compute_kernels=[KERNEL], cache_params=CacheParams(load_factor=share))
    return best_plan([TABLE], topology, workload=workload, constraints={"t": wish})


def price(share: float, workload: Workload = LOAD) -> float:
    """Predicted ms of a row-wise step."""
    sharding = replace(row_wise(compute_kernel=KERNEL)(TABLE, GPUS), cache_params=CacheParams(load_factor=share))
    return estimate(ShardingPlan({"": {"t": sharding}}), [TABLE], GPUS, workload).step_ms  # type: ignore[dict-item]


def test_a_table_that_exceeds_the_devices_memory_is_cached_there() -> None:
    plan = planned(0.1)
    sharding = plan.tables()["t"]
    assert (sharding.compute_kernel, sharding.cache_params) == (KERNEL, CacheParams(load_factor=0.1))
    assert not sharding.replicated
    found = plan.estimate
    assert found.host_bytes is not None
    assert found.host_bytes.sum() == 10_000 * ROW
    held = found.memory_bytes[:, [found.memory_categories.index(name) for name in ("weights", "optimizer_state")]]
    assert held.sum() == pytest.approx(0.1 * 10_000 * ROW)
    with pytest.raises(PlanError, match="fit"):
        planned(1.0, topology=replace(GPUS, hbm_cap=1_000_000))


def test_a_larger_cache_and_more_skew_cost_less_and_prefetch_hides_misses() -> None:
    assert price(0.5) < price(0.1) < price(0.01)
    missed = [
        price(0.1, replace(LOAD, zipf_alpha=alpha)) - price(1.0, replace(LOAD, zipf_alpha=alpha))
        for alpha in (0.5, 1.2)
    ]
    assert 0 < missed[1] < missed[0]
    ahead = replace(LOAD, pipeline="prefetch")
    assert price(0.01, ahead) == price(1.0, ahead)


def test_torchrecs_formulas_here_have_no_cache() -> None:
    wish = {"t": ParameterConstraints(compute_kernels=[KERNEL])}
    planner = EmbeddingShardingPlanner(Topology(2), workload=LOAD, constraints=wish, cost_model="torchrec")
    with pytest.raises(PlanError, match=r"'t' may only be on kernel 'fused_uvm_caching'.*allow 'fused' too"):
        planner.plan_tables([TABLE])
