"""Plans to TorchRec and back: every scheme, exactly; what TorchRec would run otherwise is refused."""

import copy
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.apparatus.environments import TorchRecEnv
from recshard_lab import EmbeddingBagConfig, ParameterSharding, PlanError, Shard, ShardingPlan, Topology
from recshard_lab.compat import plans
from recshard_lab.sharding import CacheParams, flex_shard, row_wise, scheme_named, scheme_names, tiling

RANKS, LOCAL, CACHING = 4, 2, "fused_uvm_caching"
NEEDS_PEERS = pytest.mark.skipif(
    "RECSHARD_PEERS" not in os.environ, reason="RECSHARD_PEERS does not name an interpreter that has TorchRec"
)


@dataclass
class Theirs:
    """What TorchRec's own ``ParameterSharding`` says."""

    sharding_type: str
    compute_kernel: str
    ranks: list[int] | None = None
    sharding_spec: Any = None
    cache_params: Any = None


class TheirTables(dict[str, Any]):
    pass


@dataclass
class TheirPlan:
    plan: dict[str, Any]


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes of the shape of TorchRec's, so that these tests need no TorchRec."""
    types = SimpleNamespace(
        ShardingPlan=TheirPlan,
        EmbeddingModuleShardingPlan=TheirTables,
        ParameterSharding=Theirs,
        CacheParams=SimpleNamespace,
    )
    monkeypatch.setattr(plans, "_torchrec", lambda: types)


def table(rows: int) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(name="t", num_embeddings=rows, embedding_dim=64, feature_names=["f"])


def plan_of(scheme: str, rows: int, **settings: str) -> ShardingPlan:
    made = scheme_named(scheme).default(table(rows), Topology(RANKS, local_world_size=LOCAL))
    return ShardingPlan({"ebc": {"t": ParameterSharding(scheme, shards=made.shards, **settings)}})


def custom(*rects: Shard) -> ShardingPlan:
    return ShardingPlan({"": {"t": ParameterSharding("custom", shards=rects)}})


@pytest.mark.parametrize("rows", [64, 37, 5, 1])
@pytest.mark.parametrize("scheme", sorted({*scheme_names()} - {"flex_shard"}))
def test_every_schemes_plan_comes_back_as_it_went(scheme: str, rows: int) -> None:
    plan = plan_of(scheme, rows)
    there = plans.to_torchrec(plan, RANKS, LOCAL)
    assert there.plan["ebc"]["t"].sharding_type == scheme
    assert plans.from_torchrec(there) == plan
    assert plans.from_torchrec(copy.deepcopy(there)) == plan


def test_row_stripes_that_are_empty_are_spelled_out_for_torchrec() -> None:
    entry = plans.to_torchrec(plan_of("row_wise", 5), RANKS).plan["ebc"]["t"]
    assert [s.shard_sizes[0] for s in entry.sharding_spec.shards] == [2, 2, 1, 0]
    assert entry.ranks == [0, 1, 2, 3]


def test_what_torchrec_has_no_place_for_comes_back_too() -> None:
    plan = plan_of("row_wise", 64, route="reduce_scatter")
    assert plans.from_torchrec(plans.to_torchrec(plan)).tables()["t"].route == "reduce_scatter"
    drawn = custom(Shard(1, (0, 8), (0, 32)), Shard(0, (0, 8), (32, 64)))
    there = plans.to_torchrec(drawn)
    assert there.plan[""]["t"].sharding_type == "column_wise"
    assert plans.from_torchrec(there) == drawn


def test_an_entry_that_was_changed_there_is_read_anew() -> None:
    there = plans.to_torchrec(plan_of("row_wise", 64, route="reduce_scatter"))
    there.plan["ebc"]["t"].compute_kernel = "dense"
    back = plans.from_torchrec(there).tables()["t"]
    assert (back.compute_kernel, back.route) == ("dense", "direct")


def test_a_replicated_table_is_dense_there_and_has_no_rectangles() -> None:
    entry = plans.to_torchrec(plan_of("data_parallel", 8)).plan["ebc"]["t"]
    assert (entry.compute_kernel, entry.ranks, entry.sharding_spec) == ("dense", [0, 1, 2, 3], None)


def test_a_plan_of_theirs_is_resolved_like_any_other() -> None:
    theirs = TheirPlan({"": {"t": Theirs("data_parallel", "dense", [0, 1])}})
    plan = plans.from_torchrec(theirs).resolved([table(8)], world_size=2)
    assert [shard.rank for shard in plan.tables()["t"].shards] == [0, 1]


def test_module_paths_can_differ() -> None:
    there = plans.to_torchrec(plan_of("table_wise", 8), RANKS, paths={"ebc": "sparse_arch.ebc"})
    assert list(there.plan) == ["sparse_arch.ebc"]
    assert list(plans.from_torchrec(there, paths={"sparse_arch.ebc": "ebc"}).plan) == ["ebc"]


@pytest.mark.parametrize(
    "generator",
    [
        row_wise(boundaries=[10]),
        row_wise(ranks=[1, 0, 2, 3]),
        tiling([(0, (0, 4), None), (1, (4, 64), (0, 32)), (2, (4, 64), (32, 64))]),
    ],
    ids=["uneven", "other order", "drawn"],
)
def test_what_torchrec_would_run_otherwise_is_refused(generator: Any) -> None:
    made = generator(table(64), Topology(RANKS, local_world_size=LOCAL))
    with pytest.raises(PlanError, match=r"table 't' .* is not split as by .*Fix:"):
        plans.to_torchrec(ShardingPlan({"": {"t": made}}), RANKS, LOCAL)


def test_replicas_of_some_rows_are_refused_by_name() -> None:
    with pytest.raises(PlanError, match=r"'t' .flex_shard. has rows 0 to 2 on every rank .* TorchRec does not support"):
        plans.to_torchrec(ShardingPlan({"": {"t": flex_shard(hot_rows=3)(table(64), Topology(RANKS))}}), RANKS)


def test_tables_in_the_hosts_memory_come_back_as_they_went_unless_they_are_split() -> None:
    slow = row_wise(compute_kernel="fused_uvm")(table(64), Topology(RANKS))
    there = plans.to_torchrec(ShardingPlan({"": {"t": slow}}), RANKS)
    assert (there.plan[""]["t"].sharding_type, there.plan[""]["t"].compute_kernel) == ("row_wise", "fused_uvm")
    assert plans.from_torchrec(there).tables()["t"] == slow
    split = custom(Shard(0, (0, 8), (0, 64)), Shard(0, (8, 64), (0, 64), "ddr"))
    with pytest.raises(PlanError, match=r"'t' .custom. has shards in both memories of a rank"):
        plans.to_torchrec(split, RANKS)


def test_kernels_that_are_not_here_are_refused() -> None:
    with pytest.raises(PlanError, match="'key_value'"):
        plans.from_torchrec(TheirPlan({"": {"t": Theirs("table_wise", "key_value", [0])}}))


def test_cached_tables_come_back_as_they_went() -> None:
    made = row_wise(compute_kernel="fused_uvm_caching")(table(64), Topology(RANKS))
    cached = replace(made, cache_params=CacheParams("lru", 0.1))
    there = plans.to_torchrec(ShardingPlan({"": {"t": cached}}), RANKS)
    assert (there.plan[""]["t"].compute_kernel, there.plan[""]["t"].cache_params.load_factor) == (CACHING, 0.1)
    assert plans.from_torchrec(there).tables()["t"] == cached
    theirs = Theirs("table_wise", CACHING, [0], None, SimpleNamespace(algorithm=None, load_factor=None))
    assert plans.from_torchrec(TheirPlan({"": {"t": theirs}})).tables()["t"].cache_params == CacheParams("lru", 0.2)


def test_too_few_ranks_are_refused() -> None:
    with pytest.raises(PlanError, match="rank 3, but world_size is 2"):
        plans.to_torchrec(custom(Shard(3, (0, 8), (0, 64))), world_size=2)


def test_names_served_by_this_library_are_no_other_library(served: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(ImportError, match="uninstall"):
        plans.to_torchrec(plan_of("table_wise", 8))


@NEEDS_PEERS
@pytest.mark.timeout(900)
def test_torchrec_itself_agrees(tmp_path: Path) -> None:
    root = Path(plans.__file__).parents[2]
    job = Path(__file__).with_name("torchrec_plans.py")
    with TorchRecEnv() as env:
        done = subprocess.run(
            [env.python, str(job), str(tmp_path)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": str(root)},
        )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line for line in lines if line.startswith("NO")] == []
    assert sum(line.startswith("ok") for line in lines) == 3 * (2 + 6) + 3, sys.version
