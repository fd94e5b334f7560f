"""Cached tables (compute kernel "fused_uvm_caching"): the same bits as without a cache."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from recshard_lab import (
    DynamicEmbeddingConfig,
    EmbeddingBagConfig,
    ParameterConstraints,
    ParameterSharding,
    PlanError,
    Shard,
    ShardingPlan,
)
from recshard_lab.distributed.step.lookup import choose_kernels
from recshard_lab.embedding import EmbOptimType, OptimizerSpec
from recshard_lab.embedding.dynamic.cached import Cache, CachedKernel
from recshard_lab.embedding.dynamic.config import EmulatedCost
from recshard_lab.embedding.kernels import KernelSpec, kernel_named
from recshard_lab.sharding import CacheParams
from tests.distributed import cached_jobs
from tests.distributed.cached_jobs import CACHED
from tests.grid import worlds
from tests.launched import launched

ranks = launched(worlds(2, 4))


def check(found: list[tuple[list[str], list[dict[str, float]]]]) -> None:
    """All ranks have the same bits with and without a cache, and the caches were used."""
    for different, counted in found:
        assert different == []
        for own in counted:
            assert own["hits"] + own["misses"] == own["lookups"]
            assert own["admissions"] - own["evictions"] == own["slots_in_use"] <= own["slots"]
    total = {name: sum(own[name] for _, counted in found for own in counted) for name in found[0][1][0]}
    assert min(total[name] for name in ("hits", "evictions", "write_backs", "staged")) > 50


@pytest.mark.parametrize("optimizer", ["exact_row_wise_adagrad", "adam"])
@pytest.mark.parametrize("scheme", cached_jobs.SCHEMES)
def test_training_and_evaluation_give_the_bits_of_the_fused_kernel(ranks: Any, scheme: str, optimizer: str) -> None:
    check([own for own in ranks.run(cached_jobs.compared, scheme, optimizer) if own[1]])


def test_the_least_frequently_used_row_may_leave_too(ranks: Any) -> None:
    check(ranks.run(cached_jobs.compared, "row_wise", "exact_sgd", "lfu"))


def test_cached_tables_move(ranks: Any) -> None:
    for different, counted in ranks.run(cached_jobs.moved, "row_wise", "grid_shard"):
        assert different == []
        assert all(own["hits"] > 0 and own["misses"] > 0 for own in counted)


def test_a_pipeline_prefetches_rows_and_gives_the_plain_loops_bits(ranks: Any) -> None:
    cost = EmulatedCost(2000)
    found = ranks.run(cached_jobs.piped, cost)
    for _, rewritten, _, prefetched in found:
        assert rewritten == []
        assert prefetched == 7  # the first batch is watched, and nothing follows the last
    check([(different, counted) for different, _, counted, _ in found])


def test_caches_count_as_memory_of_the_rank(ranks: Any) -> None:
    for more, weights in ranks.run(cached_jobs.memory):
        assert more["weights"] == weights > 0
        assert more["optimizer_state"] == 2 * weights + 2 * 8  # both moments, and the steps of both tables


def test_the_cache_is_part_of_a_plan_and_of_its_json() -> None:
    shards = [Shard(0, (0, 37), (0, 8))]
    made = ParameterSharding(
        "table_wise", CACHED, None, None, CacheParams("lfu", 0.3, EmulatedCost(20, 1.5)), shards=shards
    )
    assert {shard.tier for shard in made.shards} == {"ddr"}
    assert ParameterSharding("table_wise", CACHED, shards=shards).cache_params == CacheParams("lru", 0.2)
    for sharding in (made, made.with_route("direct"), replace(made, cache_params=CacheParams())):
        text = ShardingPlan({"": {"movies": sharding}}).to_json()  # type: ignore[dict-item]
        assert ShardingPlan.from_json(text).plan[""]["movies"] == sharding
    with pytest.raises(PlanError, match=r"cache_params=.* does not apply: compute_kernel is 'fused'"):
        ParameterSharding("table_wise", cache_params=CacheParams(), shards=shards)
    with pytest.raises(PlanError, match=r"load_factor must be above 0 and at most 1, got 1\.5"):
        CacheParams(load_factor=1.5)
    with pytest.raises(PlanError, match="algorithm 'fifo' does not exist"):
        CacheParams("fifo")
    with pytest.raises(PlanError, match="replicas are stepped by the batches of all ranks"):
        ParameterSharding("data_parallel", CACHED)
    with pytest.raises(ValueError, match="must be CacheParams, with compute_kernel 'fused_uvm_caching'"):
        ParameterConstraints(cache_params=CacheParams())
    wrong = text.replace('"load_factor"', '"share"')
    with pytest.raises(PlanError, match=r"cache_params lacks the field 'load_factor'"):
        ShardingPlan.from_json(wrong)


def test_tables_that_cannot_be_cached_are_refused() -> None:
    sgd, cpu = OptimizerSpec(EmbOptimType.EXACT_SGD, 0.1), torch.device("cpu")
    with pytest.raises(ValueError, match="fbgemm's kernel cannot compute on cached rows"):
        CachedKernel(KernelSpec([], [], sgd), kernel_named("fbgemm"), [Cache(128)])
    cols, hot, cold = (0, 8), (0, 10), (10, 40)
    shards = [Shard(0, hot, cols), Shard(1, hot, cols), Shard(0, cold, cols)]
    partly = ParameterSharding("flex_shard", CACHED, shards=shards)
    dynamic = ParameterSharding("table_wise", CACHED, shards=[Shard(0, (0, 1024), cols)])
    tables = [
        (EmbeddingBagConfig(40, 8, "t", feature_names=["f"]), partly, "'t' is cached .* and has replicas"),
        (DynamicEmbeddingConfig("d", 8, 1024), dynamic, "'d' is dynamic, so .* does not apply"),
    ]
    for config, sharding, message in tables:
        with pytest.raises(PlanError, match=message):
            choose_kernels([config], [sharding], [sgd], pooled=True, weighted=False, device=cpu, backend=None)


def test_a_model_in_eval_is_stepped_as_without_a_cache() -> None:
    found = []
    for plan in (cached_jobs.plan_of("table_wise", "fused"), cached_jobs.cached_plan("table_wise")):
        dmp = cached_jobs.model_of(plan, "exact_sgd").eval()
        for batch in cached_jobs.batches(3):
            cached_jobs.step(dmp, batch)
        found.append(cached_jobs.state_of(dmp))
    assert cached_jobs.apart(*found) == []
