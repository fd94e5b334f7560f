"""Memory and time of dense and data-parallel tables and of the dense part, counted by hand on a bare machine.

On a bare machine everything is free but what a test switches on.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from recshard_lab.embedding.configs import EmbeddingBagConfig
from recshard_lab.planner import Estimate, Workload, estimate
from recshard_lab.planner.model.cost import dense_step
from recshard_lab.planner.model.launch_counts import LAUNCHES
from recshard_lab.sharding import ParameterSharding, Shard, ShardingPlan, Topology, scheme_named

FREE_BW = (
    "hbm_mem_bw", "ddr_mem_bw", "cache_bw", "intra_host_bw", "inter_host_bw", "flops_per_ms", "tf32_flops_per_ms",
)  # fmt: skip
NO_COST = (
    "intra_host_latency_ms", "inter_host_latency_ms", "peer_ms", "lookup_ns_per_id", "update_ns_per_id",
    "route_ns_per_id", "launch_ms", "host_ms", "shard_feature_ms", "row_split_ms", "norm_ms", "norm_ns_per_row",
    "bag_ns", "sort_ns_per_id", "sum_ns_per_number", "replica_ms", "replicas_ms", "cache_bytes", "contention",
    "half_duplex", "step_ms", "inter_host_peer_ms", "sync_ms", "kernel_ms", "gather_row_bytes", "matrix_half_batch",
    "straggler_sigma",
)  # fmt: skip

W, B, BAG, E, D = 4, 128, 10, 10_000, 64
IDS = B * BAG  # of one rank
TABLE = EmbeddingBagConfig(name="movies", num_embeddings=E, embedding_dim=D, feature_names=["movie"])
LOAD = Workload(B, float(BAG), unique_fraction=0.5)  # 2,560 distinct rows in the global batch
DISTINCT = 0.5 * W * IDS


def bare(world_size: int = W, device: str = "cpu", **figures: Any) -> Topology:
    """A machine on which only `figures` cost anything."""
    local = figures.pop("local_world_size", world_size)
    costs = dict.fromkeys(FREE_BW, 1e30) | dict.fromkeys(NO_COST, 0.0) | {"reduce_scatter_cost": 1.0}
    sizes = {"hbm_cap": 10**9, "ddr_cap": 10**9, "local_world_size": local, "cores_per_host": local}
    return Topology(world_size, device, **{**sizes, **costs, **figures})


def of(top: Topology, load: Workload = LOAD, scheme: str = "table_wise", kernel: str = "fused") -> Estimate:
    made = scheme_named(scheme).default(TABLE, top, [0] if scheme == "table_wise" else None)
    sharding = ParameterSharding(scheme, kernel, shards=made.shards)
    return estimate(ShardingPlan({"": {"movies": sharding}}), [TABLE], top, load)  # type: ignore[dict-item]


def held(found: Estimate, name: str) -> list[float]:
    return found.memory_bytes[:, found.memory_categories.index(name)].tolist()


def ms(found: Estimate, name: str) -> list[float]:
    return found.ms[:, found.phases.index(name)].tolist()


# ---- memory ----


def test_a_dense_table_holds_its_gradient_beside_the_optimizers_state() -> None:
    for optimizer, a_row, an_element in (
        ("exact_sgd", 0, 0), ("exact_row_wise_adagrad", 4, 0), ("exact_adagrad", 0, 4), ("adam", 0, 8),
        ("partial_row_wise_adam", 4, 4),
    ):  # fmt: skip
        load = Workload(B, float(BAG), unique_fraction=0.5, optimizer=optimizer)
        state = E * a_row + E * D * an_element
        fused, dense = (of(bare(), load, kernel=kernel) for kernel in ("fused", "dense"))
        assert held(fused, "weights") == held(dense, "weights") == [4 * E * D, 0, 0, 0]
        assert held(fused, "optimizer_state") == [state, 0, 0, 0], optimizer
        assert held(dense, "optimizer_state") == [state + 4 * E * D, 0, 0, 0], optimizer


def test_a_data_parallel_table_holds_weights_and_state_on_every_rank_and_a_gradient_of_every_rank() -> None:
    load = Workload(B, float(BAG), unique_fraction=0.5, optimizer="exact_adagrad")
    found = of(bare(), load, "data_parallel")
    assert held(found, "weights") == held(found, "optimizer_state") == [4 * E * D] * W
    assert held(of(bare(), load, "data_parallel", "dense"), "optimizer_state") == [8 * E * D] * W
    # bags of every rank: int32 ids and lengths; fp32 gradients of all bags sent and received; the joined output
    assert held(found, "input_buffers") == [4 * W * (IDS + B)] * W
    assert held(found, "output_buffers") == [4 * D * (W * B + W * B + B)] * W


def test_the_dense_part_takes_what_a_parameter_takes_on_every_rank() -> None:
    load = Workload(B, dense_parameters=1000)
    assert held(of(bare(), load), "dense") == [8 * 1000] * W
    more = Workload(B, dense_parameters=1000, dense_bytes_per_parameter=16)
    assert held(of(bare(), more), "dense") == [16 * 1000] * W


def test_a_table_in_the_hosts_memory_has_its_optimizer_state_there_too() -> None:
    shards = [Shard(0, (0, E // 2), (0, D)), Shard(1, (E // 2, E), (0, D), "ddr")]
    plan = ShardingPlan({"": {"movies": ParameterSharding("row_wise", shards=shards)}})  # type: ignore[dict-item]
    states = {"exact_sgd": 0, "exact_row_wise_adagrad": 4 * E, "exact_adagrad": 4 * E * D, "adam": 8 * E * D}
    for optimizer, state in states.items():
        found = estimate(plan, [TABLE], bare(2, "cuda"), Workload(B, float(BAG), optimizer=optimizer))
        assert held(found, "weights") == [4 * E * D / 2, 0]
        assert held(found, "optimizer_state") == [state / 2, 0], optimizer
        assert found.host_bytes.tolist() == [0, (4 * E * D + state) / 2], optimizer
        assert found.host_weight_bytes.tolist() == [0, 4 * E * D / 2]


def test_the_host_keeps_its_reserve_as_the_device_does() -> None:
    for reserve in (0.0, 0.25):
        found = of(bare(2, "cuda", ddr_cap=8 * 10**8, hbm_cap=4 * 10**8, reserve_fraction=reserve))
        assert found.host_room_bytes == pytest.approx(8e8 * (1 - reserve))
        assert found.usable_bytes.tolist() == pytest.approx([4e8 * (1 - reserve)] * 2)


# ---- time ----

M = 1e6  # bytes per ms


def test_backward_of_a_dense_table_adds_three_passes_over_the_whole_table() -> None:
    top = bare(ddr_mem_bw=M)
    rows = 2 * DISTINCT * 4 * D * 1.15 / M  # read and written, by the optimizer's factor
    assert ms(of(top), "lookup_backward") == pytest.approx([rows, 0, 0, 0])
    table = 3 * 4 * E * D / M
    assert ms(of(top, kernel="dense"), "lookup_backward") == pytest.approx([rows + table, 0, 0, 0])
    assert (
        ms(of(top, kernel="dense"), "lookup") == ms(of(top), "lookup") == pytest.approx([DISTINCT * 4 * D / M, 0, 0, 0])
    )


def test_every_replica_looks_up_its_own_batch_and_in_backward_that_of_all_ranks() -> None:
    found = of(bare(ddr_mem_bw=M), scheme="data_parallel")
    assert ms(found, "lookup") == pytest.approx([DISTINCT / W * 4 * D / M] * W)
    assert ms(found, "lookup_backward") == pytest.approx([DISTINCT * 4 * D * (2 * 1.15 + 1) / M] * W)
    dense = of(bare(ddr_mem_bw=M), scheme="data_parallel", kernel="dense")
    assert ms(dense, "lookup_backward") == pytest.approx([(DISTINCT * 3.3 + 3 * E) * 4 * D / M] * W)


def test_a_data_parallel_tables_gradients_go_to_every_rank_and_its_rows_to_none() -> None:
    found = of(bare(intra_host_bw=M), scheme="data_parallel")
    assert ms(found, "input_dist") == pytest.approx([(W - 1) * 4 * (IDS + B) / M] * W)
    assert ms(found, "output_dist") == [0] * W
    assert ms(found, "output_dist_backward") == pytest.approx([(W - 1) * 4 * B * D / M] * W)


def test_replicas_cost_the_host_in_the_phases_that_it_packs_them() -> None:
    for figures, gradient_ms in (({"replica_ms": 2.0}, 2.0), ({"replica_ms": 2.0, "replicas_ms": 5.0}, 7.0)):
        top = bare(**figures)
        expected = [[2.0, 0, 0, 0, gradient_ms, 0]] * W
        np.testing.assert_allclose(of(top, scheme="data_parallel").ms, expected, atol=1e-12)
        assert of(top).step_ms == pytest.approx(0, abs=1e-12)
        alone = bare(1, **figures)  # one rank sends to no other
        assert of(alone, scheme="data_parallel").step_ms == pytest.approx(0, abs=1e-12)


# ---- the dense part ----

P = 10**6
DENSE = Workload(B, dense_parameters=P)


def test_the_dense_part_computes_six_operations_a_parameter_and_sample() -> None:
    assert dense_step(DENSE, bare(1, flops_per_ms=M)) == (6 * P * B / M, 4 * P)
    named = Workload(B, dense_parameters=P, dense_flops_per_sample=1000)
    assert dense_step(named, bare(1, flops_per_ms=M))[0] == 1000 * B / M


def test_small_matrices_reach_a_part_of_the_rate_and_tf32_has_its_own() -> None:
    top = bare(1, "cuda", flops_per_ms=M, tf32_flops_per_ms=8 * M, matrix_half_batch=float(B))
    assert dense_step(DENSE, top)[0] == pytest.approx(2 * 6 * P * B / M)  # half of the rate
    assert dense_step(replace(DENSE, batch_size=3 * B), top)[0] == pytest.approx(4 / 3 * 3 * 6 * P * B / M)
    assert dense_step(replace(DENSE, matmul_precision="high"), top)[0] == pytest.approx(2 * 6 * P * B / (8 * M))
    starts = bare(1, "cuda", kernel_ms=0.1, launch_ms=0.01)
    assert dense_step(replace(DENSE, dense_launches=5), starts)[0] == pytest.approx(0.5)


# ---- launches, messages, random reads, stragglers ----


def ms_of(top: Topology, scheme: str = "table_wise", route: str = "direct") -> list[float]:
    """ms of each phase on the slowest rank."""
    made = scheme_named(scheme).default(TABLE, top, [0] if scheme == "table_wise" else None).with_route(route)
    plan = ShardingPlan({"": {"movies": made}})  # type: ignore[dict-item]
    found: list[float] = estimate(plan, [TABLE], top, LOAD).ms.max(axis=0).tolist()
    return found


@pytest.mark.parametrize(("figure", "counts"), [("launch_ms", 0), ("kernel_ms", 1)])
def test_a_gpus_phases_take_the_launches_that_are_counted(figure: str, counts: int) -> None:
    whole, rows, replicas = (LAUNCHES[name][counts] for name in ("table_wise", "row_shards", "replicas"))
    top = bare(4, "cuda", local_world_size=2, **{figure: 1.0})
    assert ms_of(top) == pytest.approx(list(whole))
    assert ms_of(top, "row_wise") == pytest.approx([a + b for a, b in zip(whole, rows, strict=True)])
    hops = [a + b + c for a, b, c in zip(whole, rows, LAUNCHES["two_hop"][counts], strict=True)]
    assert ms_of(top, "row_wise", "two_hop") == pytest.approx(hops)
    alone = [a + b for a, b in zip(whole, replicas, strict=True)]
    alone[2] -= whole[2]  # no rows travel
    assert ms_of(top, "data_parallel") == pytest.approx(alone)
    assert ms_of(bare(launch_ms=1.0)) == pytest.approx([0, 1, 0, 0, 0, 1])  # on a CPU, the table-batched kernels


def test_host_and_device_start_kernels_at_the_same_time() -> None:
    operators, kernels = LAUNCHES["table_wise"]
    expected = [max(2.0 * host, 0.5 * device) for host, device in zip(operators, kernels, strict=True)]
    assert ms_of(bare(2, "cuda", launch_ms=2.0, kernel_ms=0.5)) == pytest.approx(expected)


def test_every_exchange_costs_the_host_and_the_read_of_sizes_once() -> None:
    assert ms_of(bare(4, "cuda", host_ms=1.0)) == pytest.approx([2, 0, 1, 0, 1, 0])
    assert ms_of(bare(4, "cuda", host_ms=1.0, local_world_size=2), "row_wise", "two_hop") == pytest.approx(
        [2, 0, 2, 0, 2, 0]
    )
    assert ms_of(bare(4, "cuda", sync_ms=1.0)) == pytest.approx([1, 0, 0, 0, 0, 0])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_messages_to_other_hosts_have_their_own_cost_and_two_hops_send_fewer(device: str) -> None:
    top = bare(64, device, local_world_size=8, peer_ms=1.0, inter_host_peer_ms=10.0)
    direct, hops = 7 * 1.0 + 56 * 10.0, 7 * 1.0 + 7 * 10.0
    assert ms_of(top, "row_wise") == pytest.approx([2 * direct, 0, direct, 0, direct, 0])
    assert ms_of(top, "row_wise", "two_hop") == pytest.approx([2 * direct, 0, hops, 0, hops, 0])
    if device == "cuda":  # a tree of 8 nodes, of 8 ranks each, there and back
        assert dense_step(DENSE, top)[0] == pytest.approx(2 * (7 * 1.0 + 3 * 10.0))


def test_random_rows_are_read_with_an_overhead_and_rows_of_as_many_bytes_at_half_the_rate() -> None:
    plain, half = (bare(1, "cuda", hbm_mem_bw=M, gather_row_bytes=size) for size in (0.0, 4.0 * D))
    assert ms_of(plain)[1] == pytest.approx(0.5 * IDS * 4 * D / M)  # of which half are first uses
    assert ms_of(half)[1] == pytest.approx(2 * ms_of(plain)[1])
    assert ms_of(half)[5] == pytest.approx(2 * ms_of(plain)[5])


def test_ranks_wait_for_the_slowest_which_grows_with_their_number() -> None:
    for ranks in (1, 2, 64):
        plain, slower = (ms_of(bare(ranks, "cuda", launch_ms=1.0, straggler_sigma=s)) for s in (0.0, 0.02))
        factor = 1 + 0.02 * math.sqrt(2 * math.log(ranks))
        assert slower == pytest.approx([factor * each for each in plain])


def test_the_dense_gradient_is_averaged_around_a_ring() -> None:
    wire = 2 * (W - 1) / W * 4 * P / M
    assert dense_step(DENSE, bare(intra_host_bw=M))[0] == pytest.approx(wire)
    assert dense_step(DENSE, bare(1, intra_host_bw=M))[0] == pytest.approx(0, abs=1e-12)
    assert dense_step(Workload(B), bare(intra_host_bw=M, intra_host_latency_ms=1.0))[0] == 0
    fixed = bare(intra_host_latency_ms=1.0, peer_ms=0.1, inter_host_latency_ms=7.0)
    assert dense_step(DENSE, fixed)[0] == pytest.approx(2 * 1.0 + 3 * 0.1)
    nodes = bare(local_world_size=2, inter_host_bw=M, inter_host_latency_ms=7.0)
    assert dense_step(DENSE, nodes)[0] == pytest.approx(wire + 2 * 7.0)
    assert dense_step(DENSE, bare(intra_host_bw=M, cores_per_host=2))[0] == pytest.approx(2 * wire)


def test_distinct_rows_are_sent_without_bags_and_return_unpooled() -> None:
    """12 rows, all of them touched by the 1,280 lookups of each rank: 3 rows of each shard, for any batch."""
    table = EmbeddingBagConfig(name="small", num_embeddings=12, embedding_dim=8, feature_names=["f"])
    made = scheme_named("row_wise").default(table, bare(), list(range(W)))
    sent = {}
    for route in ("direct", "distinct_rows"):
        sharding = ParameterSharding("row_wise", shards=made.shards, route=route)
        plan = ShardingPlan({"": {"small": sharding}})  # type: ignore[dict-item]
        found = estimate(plan, [table], bare(), Workload(B, float(BAG))).traffic_by_phase
        labels = ("input_dist/ids", "output_dist/rows", "output_dist_backward/rows")
        sent[route] = [float(found[label][0, 1]) for label in labels]
    assert sent["distinct_rows"] == pytest.approx([4 * 3, 4 * 3 * 8, 4 * 3 * 8])
    assert sent["direct"] == pytest.approx([4 * (IDS / W + B), 4 * B * 8, 4 * B * 8])
