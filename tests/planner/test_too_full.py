"""A plan that two ranks cannot hold names both, wherever it is refused or shown; and neither is the first rank."""

from dataclasses import replace

import numpy as np
import pytest

from recshard_lab.lab import compare_plans, views
from recshard_lab.planner import Estimate, Workload, estimate
from recshard_lab.sharding import EmbeddingModuleShardingPlan, ParameterSharding, Shard, ShardingPlan, Topology
from tests.planner.problems import table

LOAD = Workload(64)
TABLES = [table("small", 1_000, 64), table("large", 9_000, 64), table("mid", 2_000, 64), table("largest", 10_000, 64)]


def plan_of(tiers: tuple[str, ...] = ("hbm",) * 4) -> ShardingPlan:
    """Table i whole on rank i: ranks 1 and 3 hold most, and rank 3 more than rank 1."""
    entries = {
        t.name: ParameterSharding("table_wise", shards=[Shard(rank, (0, t.num_embeddings), (0, 64), tiers[rank])])
        for rank, t in enumerate(TABLES)
    }
    return ShardingPlan({"": EmbeddingModuleShardingPlan(entries)})


def found(cap: int, **more: int) -> Estimate:
    return estimate(plan_of(), TABLES, Topology(4, ddr_cap=cap, reserve_fraction=0.0, **more), LOAD)


def between(*tables: int) -> int:
    """A capacity that the ranks of these tables exceed, and the others do not."""
    held = estimate(plan_of(), TABLES, Topology(4, ddr_cap=10**9), LOAD).memory_bytes.sum(axis=1)
    others = [held[rank] for rank in range(4) if rank not in tables]
    return int((min(held[list(tables)]) + max(others)) / 2)


@pytest.mark.parametrize(
    ("too_full", "words"), [((3,), "too full: rank 3"), ((1, 3), "too full: ranks 1,3"), ((1, 2, 3), "ranks 1-3")]
)
def test_an_estimate_names_every_rank_that_is_too_full(too_full: tuple[int, ...], words: str) -> None:
    shown = found(between(*too_full))
    assert not shown.fits
    assert shown.overfull_ranks == list(too_full)
    assert words in str(shown)
    assert "too full" not in str(found(10**9))
    assert found(10**9).overfull_ranks == []


def test_a_comparison_and_the_memory_view_name_both_and_measure_the_fuller() -> None:
    top = Topology(4, ddr_cap=between(1, 3), reserve_fraction=0.0)
    shown = compare_plans(TABLES, top, {"given": plan_of()}, LOAD)
    assert not shown["given"].fits
    held = estimate(plan_of(), TABLES, top, LOAD).memory_bytes.sum(axis=1)
    assert held[3] > held[1] > top.ddr_cap > held[2]
    assert f"rank 3 needs {held[3] / 1e6:.1f} MB" in shown["given"].problem
    assert "too full: ranks 1,3" in shown["given"].problem
    view = views.memory(estimate(plan_of(), TABLES, top, LOAD))
    assert "rank 3 needs" in view.summary
    assert "ranks 1,3 need more than they have" in view.summary


def test_ranks_that_are_too_full_in_the_hosts_memory_are_named_too() -> None:
    top = Topology(4, "cuda", ddr_cap=2_200_000, hbm_cap=10**9, reserve_fraction=0.0)
    plan = plan_of(("ddr",) * 4)
    shown = estimate(plan, TABLES, top, LOAD)
    assert not shown.fits
    assert shown.overfull_ranks == []
    assert shown.host_overfull_ranks == [1, 3]
    assert "too full in the host's memory: ranks 1,3" in str(shown)
    problem = compare_plans(TABLES, top, {"given": plan}, LOAD)["given"].problem
    assert "ranks 1,3: more in the host's memory than 2.2 MB a rank" in problem
    assert replace(shown, host_bytes=np.zeros(4)).fits


def test_a_rank_that_is_exactly_full_fits() -> None:
    held = found(10**9).memory_bytes.sum(axis=1)
    assert found(int(held[3])).fits
    assert found(int(held[3]) - 1).overfull_ranks == [3]
