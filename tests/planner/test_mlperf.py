"""MLPerf's DLRM-DCNv2: its sums, its dense part against the real modules, its launches, and the worked example."""

from dataclasses import fields, replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.mlperf_launches import charged_launches, dense_launches, table_launches
from recshard_lab import mlperf
from recshard_lab.embedding import EmbeddingBagCollection
from recshard_lab.models import DLRM_DCN
from recshard_lab.planner import (
    EmbeddingShardingPlanner,
    estimate,
    mlperf_dlrm_dcnv2_tables,
    mlperf_dlrm_dcnv2_workload,
    mlperf_example,
)
from recshard_lab.planner.model.cost import PHASES, dense_step
from recshard_lab.planner.sweep.mlperf_dense import dlrm_dcn_dense, dlrm_dcn_launches
from recshard_lab.planner.sweep.mlperf_example import MISSED, MLPERF_IDEAS, RANGES, assumptions, mlperf_step, spread
from recshard_lab.sharding import Topology
from recshard_lab.sparse import KeyedJaggedTensor
from recshard_lab.text_table import TextTable
from tests.grid import grid
from tests.planner.problems import best_plan


def test_the_benchmarks_sums_are_the_published_ones() -> None:
    tables, load = mlperf_dlrm_dcnv2_tables(), mlperf_dlrm_dcnv2_workload(512)
    assert len(tables) == len(mlperf.MULTI_HOT_SIZES) == len(mlperf.FEATURES) == 26
    assert sum(t.num_embeddings for t in tables) == 204_184_588
    assert sum(t.weight_bytes for t in tables) / 1e9 == pytest.approx(104.5, abs=0.05)
    assert sum(load.pooling_factor(t.feature_names[0]) for t in tables) == 214
    assert [t.num_embeddings for t in tables].count(40_000_000) == 5
    assert load.optimizer == "exact_adagrad"
    assert load.dense_traffic_per_sample == 4 * dlrm_dcn_dense().traffic  # fp32, as in the published points
    top = Topology.preset("h100x8")
    planner = EmbeddingShardingPlanner(top, workload=mlperf_dlrm_dcnv2_workload(8192))
    held = estimate(planner.plan_tables(tables), tables, top, planner.workload).memory_bytes.sum(axis=0)
    assert held[1] == held[0] >= 104.5e9  # element-wise Adagrad doubles the weights, replicas included


def real_model() -> DLRM_DCN:
    tables = mlperf_dlrm_dcnv2_tables()
    for table in tables:
        table.num_embeddings = 4
    collection = EmbeddingBagCollection(tables)
    sizes = (list(mlperf.DENSE_ARCH_LAYERS), list(mlperf.OVER_ARCH_LAYERS), mlperf.DCN_LAYERS, mlperf.DCN_LOW_RANK)
    return DLRM_DCN(collection, mlperf.DENSE_FEATURES, *sizes)


def test_the_dense_part_by_formula_is_that_of_the_real_model() -> None:
    model, cost, batch = real_model(), dlrm_dcn_dense(), 2
    dense = [p for name, p in model.named_parameters() if "embedding_bag" not in name]
    assert cost.parameters == sum(p.numel() for p in dense)
    assert cost.tensors == len(dense)
    lengths = torch.ones(26 * batch, dtype=torch.int32)
    ids = KeyedJaggedTensor(list(mlperf.FEATURES), torch.zeros(26 * batch, dtype=torch.long), lengths=lengths)
    with FlopCounterMode(display=False) as forward:
        logits = model(torch.rand(batch, mlperf.DENSE_FEATURES), ids)
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    # torch counts matrix products alone: biases, products and sums are the rest, a thousandth
    assert cost.forward_flops == pytest.approx(forward.get_total_flops() / batch, rel=2e-3)
    assert cost.backward_flops == pytest.approx(backward.get_total_flops() / batch, rel=2e-3)
    assert cost.forward_flops > forward.get_total_flops() / batch


def test_the_dense_launches_by_formula_are_those_of_the_real_modules() -> None:
    stated = dlrm_dcn_launches()
    assert {name: stated[name] for name in ("forward", "backward", "optimizer")} == dense_launches()


@pytest.mark.gate
def test_the_launches_charged_for_the_tables_are_those_counted_under_the_same_plan() -> None:
    charged, counted = charged_launches(), table_launches()
    assert charged.pop("dense") == pytest.approx(sum(dlrm_dcn_launches().values()))
    assert counted.pop("dense") == 0
    for phase, count in counted.items():  # launch_counts.py leaves out one or two operators
        assert charged[phase] == pytest.approx(count, abs=max(1, 0.15 * count)), phase


def test_the_example_is_the_planners_plan_and_the_cost_models_estimate() -> None:
    step, tables = mlperf_step(64), mlperf_dlrm_dcnv2_tables()
    top = Topology.preset("h100x64")
    assert step.topology == top
    assert step.workload == mlperf_dlrm_dcnv2_workload(1024, pipeline="sparse_dist")
    own = estimate(best_plan(tables, top, workload=step.workload), tables, top, step.workload)
    assert step.step_ms == pytest.approx(own.step_ms)
    assert sum(step.schemes.values()) == len(tables)
    dense = PHASES.index("dense")
    assert step.parts.host[dense] >= sum(dlrm_dcn_launches().values()) * top.launch_ms
    host = step.overlap.needs_ms["host"]
    assert host == pytest.approx(step.parts.host.sum() + step.parts.sync_ms)


def test_each_change_is_one_of_the_topology_or_of_the_workload() -> None:
    before, after = mlperf_step(128), mlperf_step(128, tuple(MLPERF_IDEAS))
    assert after.workload == replace(before.workload, pipeline="prefetch", pipeline_threads=True, dense_launches=2)
    names = [spec.name for spec in fields(Topology)]
    changed = {name for name in names if getattr(after.topology, name) != getattr(before.topology, name)}
    assert changed <= {"launch_ms", "sync_ms"}
    assert after.topology.launch_ms == before.topology.launch_ms / 2
    varied = mlperf_step(128, (), {"launch_ms": 3.0})
    assert varied.plan == before.plan
    assert varied.topology.launch_ms == 3 * before.topology.launch_ms


@pytest.mark.parametrize(*grid(ranks=[8, 128], gate={"ranks": [128]}))
def test_no_change_makes_a_step_longer_and_all_of_them_gain_most(ranks: int) -> None:
    before = mlperf_step(ranks).step_ms
    each = [mlperf_step(ranks, (name,)).step_ms for name in MLPERF_IDEAS]
    together = mlperf_step(ranks, tuple(MLPERF_IDEAS)).step_ms
    slack = 1.01  # each is planned anew
    assert all(together <= slack * one <= slack**2 * before for one in each)


@pytest.mark.gate
def test_on_many_ranks_the_host_needs_a_larger_share_than_on_few() -> None:
    few, many = (mlperf_step(ranks).overlap.needs_ms for ranks in (8, 128))
    assert few["device"] > few["host"]
    assert many["host"] / many["device"] > 3 * few["host"] / few["device"]


@pytest.mark.gate
def test_the_spread_holds_the_middle() -> None:
    found, middle = spread(), mlperf_step(128).step_ms
    assert set(found) == {*RANGES, "all together"}
    for name, ends in found.items():
        assert min(ends) <= middle * (1 + 1e-9), name
        assert max(ends) >= middle * (1 - 1e-9), name
    low, high = found["all together"]
    assert low <= min(min(ends) for ends in found.values())
    assert high >= max(max(ends) for ends in found.values())


def test_the_dense_gradient_goes_by_all_links_of_a_node() -> None:
    load, top = mlperf_dlrm_dcnv2_workload(512, dense_launches=0), Topology.preset("h100x128")
    size = 4 * dlrm_dcn_dense().parameters
    latency = 2 * (top.inter_host_latency_ms + 7 * top.peer_ms + 4 * top.inter_host_peer_ms)  # a tree of 16 nodes
    alone = dense_step(load, Topology.preset("h100x1"))[0]
    across = 2 * 15 / 16 * size / 8 / top.inter_host_bw
    inside = 2 * 7 / 8 * size / top.intra_host_bw
    assert dense_step(load, top)[0] - alone == pytest.approx(max(across, inside) + latency)


def test_all_that_is_assumed_is_printed_beside_what_was_published() -> None:
    found = mlperf_example([8, 128])
    text = str(found)
    assert max(map(len, text.splitlines())) <= 100
    words = " ".join(text.split())
    assert words.startswith("Simulated, not measured")
    table = next(part for part in found.parts() if isinstance(part, TextTable))
    assert [tuple(row) for row in table.rows] == assumptions()
    named = {name for name, _, _ in assumptions()}
    assert {"hbm_mem_bw", "intra_host_bw", "inter_host_bw", "launch_ms", "dense launches"} <= named
    assert all(source for _, _, source in assumptions())
    assert "7.68 published" in words
    assert "3.4 published" in words
    for limit in MISSED:
        assert " ".join(limit.split()) in words
    html = found._repr_html_()
    assert "Simulated, not measured" in html
    assert all(record["simulated"] for record in found.records())
    known = [r["published_ms"] for r in found.records() if r["world_size"] == 128]
    assert known[0] == 7.68
    assert known[-1] == 3.4
    assert not any(known[1:-1])
    assert all(r["lower_bound_ms"] <= r["step_ms"] * (1 + 1e-9) for r in found.records())


def test_other_numbers_of_ranks_are_refused() -> None:
    for wrong in ([], [7], [0], ["8"], [True]):
        with pytest.raises(ValueError, match=r"world_sizes|fill hosts"):
            mlperf_example(wrong)  # type: ignore[arg-type]
