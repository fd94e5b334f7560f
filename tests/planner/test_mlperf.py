"""MLPerf's DLRM-DCNv2: its sums, its dense part against the real modules, and a worked example with its sources."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.mlperf_launches import dense_launches, sparse_launches
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
from recshard_lab.planner.sweep.mlperf_example import IDEAS, SPARSE_LAUNCHES, UNCERTAIN, simulate, spread, with_ideas
from recshard_lab.sharding import Topology
from recshard_lab.sparse import KeyedJaggedTensor


def test_the_benchmarks_sums_are_the_published_ones() -> None:
    tables, load = mlperf_dlrm_dcnv2_tables(), mlperf_dlrm_dcnv2_workload(512)
    assert len(tables) == len(mlperf.MULTI_HOT_SIZES) == len(mlperf.FEATURES) == 26
    assert sum(t.num_embeddings for t in tables) == 204_184_588
    assert sum(t.weight_bytes for t in tables) / 1e9 == pytest.approx(104.5, abs=0.05)
    assert sum(load.pooling_factor(t.feature_names[0]) for t in tables) == 214
    assert [t.num_embeddings for t in tables].count(40_000_000) == 5
    assert load.optimizer == "exact_adagrad"
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
    ids = KeyedJaggedTensor(
        list(mlperf.FEATURES),
        torch.zeros(26 * batch, dtype=torch.long),
        lengths=torch.ones(26 * batch, dtype=torch.int32),
    )
    with FlopCounterMode(display=False) as forward:
        logits = model(torch.rand(batch, mlperf.DENSE_FEATURES), ids)
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    # torch counts matrix products alone: biases, products and sums are the rest, a thousandth
    assert cost.forward_flops == pytest.approx(forward.get_total_flops() / batch, rel=2e-3)
    assert cost.backward_flops == pytest.approx(backward.get_total_flops() / batch, rel=2e-3)
    assert cost.forward_flops > forward.get_total_flops() / batch


def test_the_stated_launches_are_those_that_are_counted() -> None:
    stated = dlrm_dcn_launches()
    assert {name: stated[name] for name in ("forward", "backward", "optimizer")} == dense_launches()
    counted = sparse_launches()
    assert counted.keys() == SPARSE_LAUNCHES.keys()
    for part, count in counted.items():  # the executor may change, and the example's range is from half to double
        assert count / 2 <= SPARSE_LAUNCHES[part] <= count * 2, part


def test_a_step_is_the_sum_of_its_parts() -> None:
    found = simulate(64)
    assert found.launches.sum() == sum(SPARSE_LAUNCHES.values()) + sum(dlrm_dcn_launches().values())
    us, copies = UNCERTAIN["launch_us"].value, UNCERTAIN["d2h_us"].value
    assert found.host_ms.sum() == pytest.approx((found.launches.sum() * us + 2 * copies) / 1000)
    dense = PHASES.index("dense")
    by_hand = (
        sum(found.network_ms[p] + found.device_ms[p] + found.host_ms[p] for p in range(len(PHASES)) if p != dense)
        + found.network_ms[dense]
        + max(found.device_ms[dense], found.host_ms[dense])
    )
    assert found.overlap.plain_ms == pytest.approx(by_hand)
    flops = 1024 * (dlrm_dcn_dense().forward_flops + dlrm_dcn_dense().backward_flops)
    assert found.device_ms[dense] == pytest.approx(flops / (494.5e9 * UNCERTAIN["tf32_share"].value))
    top = Topology.preset("h100x64")
    first = top.inter_host_latency_ms + 7 * top.peer_ms + 56 * top.inter_host_peer_ms
    assert found.overlap.needs_ms["chain"] == pytest.approx(by_hand - found.phases_ms[0] + first)


@pytest.mark.parametrize("ranks", [8, 128])
def test_no_idea_makes_a_step_longer_and_all_of_them_gain_most(ranks: int) -> None:
    before = simulate(ranks).overlap.step_ms
    each = [simulate(ranks, **with_ideas(name)).overlap.step_ms for name in IDEAS]
    together = simulate(ranks, **with_ideas(*IDEAS)).overlap.step_ms
    assert all(together <= one <= before for one in each)
    assert together < before


def test_the_launch_bound_step_is_the_one_on_many_ranks() -> None:
    few, many = simulate(8).overlap.needs_ms, simulate(128).overlap.needs_ms
    assert few["device"] > few["host"]
    assert many["host"] > 2 * many["device"]


def test_the_spread_holds_the_middle_and_moves_with_what_matters() -> None:
    found, middle = spread(), simulate(128).overlap.step_ms
    assert set(found) == {*UNCERTAIN, "all together"}
    for name, ends in found.items():
        assert min(ends) <= middle * (1 + 1e-9), name
        assert max(ends) >= middle * (1 - 1e-9), name
    widest = max(UNCERTAIN, key=lambda name: abs(found[name][1] - found[name][0]))
    assert widest == "launch_us"
    assert found["all together"][0] <= 1.02 * min(min(ends) for ends in found.values())  # each has its own plan


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
    for name, value, source in found.assumptions():
        assert " ".join(f"{name} {value} {source}".split()) in words, name
    assert "7.68 published" in words
    assert "3.4 published" in words
    for figure in ("hbm_mem_bw", "intra_host_bw", "inter_host_bw"):
        assert figure in text
    assert "What the simulation misses" in text
    html = found._repr_html_()
    assert "Simulated, not measured" in html
    assert all(record["simulated"] for record in found.records())
    known = [r["published_ms"] for r in found.records() if r["world_size"] == 128]
    assert known[0] == 7.68
    assert known[-1] == 3.4
    assert not any(known[1:-1])
    assert all(np.isfinite(r["step_ms"]) for r in found.records())


@pytest.mark.parametrize("wrong", [[], [7], [0], ["8"], [True]])
def test_other_numbers_of_ranks_are_refused(wrong: list[object]) -> None:
    with pytest.raises(ValueError, match=r"world_sizes|fill hosts"):
        mlperf_example(wrong)  # type: ignore[arg-type]
