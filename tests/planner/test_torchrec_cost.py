"""``cost_model="torchrec"``: TorchRec's own numbers, and plans that are short by them."""

from __future__ import annotations

import os

import numpy as np
import pytest

from benchmarks.apparatus.plan_sides import NoPlan, asked, plan_of, put_to_torchrec
from benchmarks.plan import fitting
from recshard_lab.embedding import EmbeddingBagConfig, EmbeddingConfig
from recshard_lab.embedding.configs import BaseEmbeddingConfig, DataType
from recshard_lab.planner import EmbeddingShardingPlanner, Workload, estimate
from recshard_lab.planner.model.estimate import plan_loads
from recshard_lab.planner.model.loads import BACK, BY_NODE, LOOKUP, MEMORY, OUT, UPDATE, Rects
from recshard_lab.planner.model.torchrec_cost import TorchRecCostModel
from recshard_lab.sharding import ParameterSharding, PlanError, Shard, ShardingPlan, Topology, scheme_names
from tests.grid import examples, grid
from tests.planner.problems import best_plan, random_tables

NEEDS_PEERS = pytest.mark.skipif(
    "RECSHARD_PEERS" not in os.environ, reason="RECSHARD_PEERS does not name an interpreter that has TorchRec"
)

TOPOLOGIES = [Topology(8, "cuda", hbm_cap=10**12), Topology(16, "cuda", local_world_size=8)]
GPUS, BIG = {"compute_device": "cuda", "local_world_size": 8}, 2_000_003
PROBLEMS = {
    "one node, half precision, two features": (Topology(8, **GPUS), Workload(512, {"a": 0.25, "b": 3.7}), True, "FP16"),
    "two nodes, row-wise": (Topology(16, **GPUS), Workload(300, 7.3, optimizer="exact_row_wise_adagrad"), True, "FP32"),
    "three nodes, weighted": (Topology(24, **GPUS), Workload(512, 7.3, optimizer="adam", weighted=True), True, "FP32"),
    "sequences": (Topology(16, **GPUS), Workload(128, 7.3, optimizer="exact_adagrad"), False, "FP32"),
    "CPUs": (Topology(4, "cpu", local_world_size=2, cores_per_host=2), Workload(64, 2.6), True, "FP32"),
}


def tables_for(pooled: bool, data_type: str) -> list[BaseEmbeddingConfig]:
    kind = EmbeddingBagConfig if pooled else EmbeddingConfig
    columns = (256, 64, 32, 16, 512) if pooled else [256] * 5
    sizes = zip((BIG, 5_001, 100_000, 1_234_567, 999), columns, strict=True)
    return [
        kind(rows, cols, f"t{i}", DataType[data_type], [f"f{i}"] if i else ["a", "b"])
        for i, (rows, cols) in enumerate(sizes)
    ]


THEIRS = {*scheme_names()} - {"flex_shard"}


def loads_of(model: TorchRecCostModel, table: int, scheme: str, kernel: str, rows: int, cols: int) -> np.ndarray:
    """``[K, 1]`` of one shard."""
    flags = [scheme == "data_parallel", kernel == "dense", scheme in BY_NODE]
    replicated, dense, by_node = (np.array([float(flag)]) for flag in flags)
    at, sizes = np.array([table]), [np.array([float(size)]) for size in (rows, cols)]
    return model.rect_loads(Rects(at, *sizes, replicated, dense, by_node=by_node))


@NEEDS_PEERS
@pytest.mark.parametrize("name", PROBLEMS)
def test_every_number_of_every_option_is_torchrecs(name: str) -> None:
    topology, workload, pooled, data_type = PROBLEMS[name]
    tables = tables_for(pooled, data_type)
    model = TorchRecCostModel(tables, topology, workload)
    names = [table.name for table in tables]
    order = asked("enumerate", tables, topology, workload)
    if pooled and topology.num_nodes > 1:
        order["schemes"] = sorted(THEIRS)  # else it leaves out grids
    told = put_to_torchrec(os.environ["RECSHARD_PEERS"], order, 120)
    seen = set()
    for option in told:
        if option["kernel"] not in ("fused", "dense"):
            continue
        seen.add(option["scheme"])
        for shard in option["shards"]:
            if not np.prod(shard["size"]):
                continue
            rows, cols = shard["size"]
            loads = loads_of(model, names.index(option["table"]), option["scheme"], option["kernel"], rows, cols)
            what = f"{option['table']} {option['scheme']} {option['kernel']}"
            np.testing.assert_allclose(model.phases(loads)[:, 0], shard["ms"], rtol=1e-12, err_msg=what)
            assert model.terms.own[0] @ loads[:, 0] == pytest.approx(shard["total_ms"], rel=1e-12), what
            assert abs(loads[MEMORY:].sum() - shard["bytes"]) <= 2, what  # it rounds parts of a table up
    if topology.compute_device == "cuda" and pooled:
        assert seen == THEIRS - (set() if topology.num_nodes > 1 else {"grid_shard"})
    assert seen >= {"table_wise", "column_wise"}


@NEEDS_PEERS
def test_a_plan_of_torchrec_costs_what_it_says_and_ours_is_not_longer() -> None:
    tables, workload = random_tables(12, 3)
    topology = Topology(8, "cuda", hbm_cap=80 * 10**9)
    told = put_to_torchrec(os.environ["RECSHARD_PEERS"], asked("plan", tables, topology, workload), 300)
    plan = plan_of(told["tables"])
    plan.validate(tables, 8)
    theirs = estimate(plan, tables, topology, workload, cost_model="torchrec")
    spent = np.zeros(8)
    for one in told["tables"]:
        for shard in one["shards"]:
            spent[shard["rank"]] += shard["total_ms"]
    np.testing.assert_allclose(theirs.ms.sum(axis=1), spent, rtol=1e-9)
    assert theirs.step_ms == pytest.approx(spent.max())
    ours = estimate(
        best_plan(tables, topology, workload=workload, cost_model="torchrec"),
        tables,
        topology,
        workload,
        cost_model="torchrec",
    )
    assert ours.step_ms <= theirs.step_ms * 1.01


@NEEDS_PEERS
def test_no_plan_in_time_is_said() -> None:
    tables, workload = random_tables(12, 3)
    order = asked("plan", tables, Topology(8, "cuda"), workload)
    with pytest.raises(NoPlan, match=r"no plan in 0\.01 s"):
        put_to_torchrec(os.environ["RECSHARD_PEERS"], order, 0.01)


TOLD = {
    ("data_parallel", "dense", 2_000_003, 256): (0.005694830098678436, 0, 96.43075835611775, 2_056_674_624),
    ("table_wise", "fused", 2_000_003, 256): (0.06833794145713018, 1.171875, 1.171875, 2_072_120_025),
    ("column_wise", "fused", 2_000_003, 128): (0.03437055015278235, 0.5859375, 0.5859375, 1_036_254_163),
    ("row_wise", "fused", 83_334, 256): (0.018497455113441783, 1.171875, 1.2119663200250836, 101_412_172),
    ("table_row_wise", "fused", 250_001, 256): (0.02283141008654034, 0.1708984375, 0.21098975752508362, 272_778_206),
    ("grid_shard", "fused", 250_001, 128): (0.011440902665971779, 0.08544921875, 0.10549487876254181, 136_413_372),
}
"""TorchRec 1.8's figures for the first shards of one table: ms of forward and communication, and bytes."""


def test_the_numbers_that_torchrec_once_told() -> None:
    table = EmbeddingBagConfig(name="t", num_embeddings=BIG, embedding_dim=256, feature_names=["a", "b"])
    workload = Workload(512, {"a": 0.25, "b": 3.7}, optimizer="exact_row_wise_adagrad")
    model = TorchRecCostModel([table], Topology(24, **GPUS), workload)
    for (scheme, kernel, rows, cols), (forward, there, back, nbytes) in TOLD.items():
        loads = loads_of(model, 0, scheme, kernel, rows, cols)
        expected = [forward, there, back, 2 * forward]
        np.testing.assert_allclose(loads[[LOOKUP, OUT, BACK, UPDATE], 0], expected, rtol=1e-12, err_msg=scheme)
        assert abs(loads[MEMORY:].sum() - nbytes) <= 2, scheme


def test_a_table_on_one_rank_by_hand() -> None:
    """Bytes over a bandwidth, written out."""
    table = EmbeddingBagConfig(name="t", num_embeddings=1000, embedding_dim=64, feature_names=["f"])
    topology = Topology(2, "cuda", hbm_mem_bw=1e6, intra_host_bw=1e5, hbm_cap=10**9)
    shards = [Shard(1, (0, 1000), (0, 64))]
    plan = ShardingPlan({"": {"t": ParameterSharding("table_wise", shards=shards)}})  # type: ignore[dict-item]
    found = estimate(plan, [table], topology, Workload(100, 5.0), cost_model="torchrec")
    ids, rows_home = 2 * 500, 2 * 100 * 64 * 4
    forward = 1.15 * (8 * ids + ids * 64 * 4 + rows_home) / 1e6
    np.testing.assert_allclose(found.ms[1], [forward, rows_home / 1e5, rows_home / 1e5, 2 * forward])
    assert not found.ms[0].any()
    assert found.step_ms == found.max_rank_ms == pytest.approx(3 * forward + 2 * rows_home / 1e5)
    assert found.memory_bytes[1].sum() - found.memory_bytes[0].sum() == 1000 * 64 * 4 + 8 * ids + rows_home
    assert np.isnan(found.traffic_bytes).all()


def test_the_step_is_the_busiest_ranks_sum_and_not_the_sum_over_phases() -> None:
    tables, workload = random_tables(8, 1)
    topology = Topology(4, "cuda", hbm_cap=10**12)
    plan = best_plan(tables, topology, workload=workload)
    by_theirs = estimate(plan, tables, topology, workload, cost_model="torchrec")
    assert by_theirs.step_ms == by_theirs.ms.sum(axis=1).max() <= by_theirs.ms.max(axis=0).sum()


@pytest.mark.parametrize(*grid(seed=range(examples(2, 4)), top=TOPOLOGIES))
def test_its_terms_are_its_costs_and_its_plans_shorter_by_them(seed: int, top: Topology) -> None:
    tables, workload = random_tables(10, seed)
    by_ours = best_plan(tables, top, workload=workload)
    plan = best_plan(tables, top, workload=workload, cost_model="torchrec")
    model = TorchRecCostModel(tables, top, workload)
    loads = plan_loads(model, plan.pairs(tables))
    spent = model.terms.spent(loads, top.num_nodes)
    np.testing.assert_allclose(spent[0], model.phases(loads).sum(axis=0), rtol=1e-12)
    np.testing.assert_allclose(spent[1], model.memory_total(loads), rtol=1e-12)
    np.testing.assert_allclose(model.memory(loads).sum(axis=0), model.memory_total(loads), rtol=1e-12)
    made = plan.estimate
    assert made.lower_bound <= made.step_ms * (1 + 1e-9)
    assert made.fits
    assert made.step_ms == pytest.approx(estimate(plan, tables, top, workload, cost_model="torchrec").step_ms)
    for sharding in plan.tables().values():
        assert sharding.sharding_type != "row_wise" or len(sharding.shards) == top.world_size
    stripes = {len(s.shards) for s in by_ours.tables().values() if s.sharding_type == "row_wise"}
    if stripes <= {top.world_size}:  # else it has cuts that TorchRec cannot make
        assert made.step_ms <= estimate(by_ours, tables, top, workload, cost_model="torchrec").step_ms * 1.001


def test_many_tables_take_the_option_that_costs_least_over_all_ranks() -> None:
    """Each of 74 tables is cheapest by rows, and no single move from the balanced table-wise plan shows it."""
    tables, topology, workload = fitting(500, 8, seed=0)
    plan = best_plan(tables, topology, workload=workload, cost_model="torchrec")
    assert plan.gap < 0.005
    assert 60 < sum(sharding.sharding_type != "table_wise" for sharding in plan.tables().values()) < 110


def test_the_route_changes_nothing() -> None:
    tables, workload = random_tables(6, 0)
    top = Topology(16, "cuda", local_world_size=8, hbm_cap=10**12)
    plan = best_plan(tables, top, workload=workload, cost_model="torchrec")
    assert {sharding.route for sharding in plan.tables().values()} == {"direct"}
    other = estimate(plan.with_route("two_hop"), tables, top, workload, cost_model="torchrec")
    assert other.step_ms == plan.estimate.step_ms


def test_what_does_not_fit_by_torchrecs_count_is_refused_with_a_fix() -> None:
    table = EmbeddingBagConfig(name="t", num_embeddings=10**7, embedding_dim=64, feature_names=["f"])
    with pytest.raises(PlanError, match=r"does not fit .*Topology\(hbm_cap="):
        best_plan([table], Topology(2, "cuda", hbm_cap=10**9), cost_model="torchrec")
    with pytest.raises(ValueError, match=r"cost_model 'torchrek' does not exist.*recshard, torchrec"):
        EmbeddingShardingPlanner(Topology(2), cost_model="torchrek")
