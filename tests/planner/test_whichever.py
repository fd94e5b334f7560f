"""A case on both sides of every "whichever is smaller" and "whichever is larger" of the cost and memory models."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from recshard_lab.embedding.configs import DataType, EmbeddingBagConfig
from recshard_lab.planner import AccessProfile, CostModel, Workload, estimate
from recshard_lab.planner.model.cost import dense_step
from recshard_lab.planner.model.estimate import norm_traffic
from recshard_lab.planner.model.lookup_costs import CACHE_LINE
from recshard_lab.planner.model.route_costs import RouteCosts
from recshard_lab.planner.model.row_hits import row_hits
from recshard_lab.sharding import (
    EmbeddingModuleShardingPlan,
    ParameterConstraints,
    ParameterSharding,
    Shard,
    ShardingPlan,
    Topology,
    scheme_named,
)
from recshard_lab.sharding.plan.row_shares import RowShares
from tests.planner.test_costs_by_hand import bare

M = 1e6  # bytes per ms


def table(cols: int = 64, rows: int = 10_000, **more: Any) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(name="movies", num_embeddings=rows, embedding_dim=cols, feature_names=["movie"], **more)


# ---- the dense part ----


def test_the_dense_part_takes_its_arithmetic_or_its_launches() -> None:
    top = bare(1, flops_per_ms=M, launch_ms=1.0)
    for launches, expected in ((1, 6.0), (5, 6.0), (7, 7.0)):
        load = Workload(10, dense_parameters=100_000, dense_launches=launches)
        assert dense_step(load, top)[0] == pytest.approx(expected)


def test_the_dense_gradient_takes_the_link_inside_or_between_nodes() -> None:
    for device, inside, across, expected in (
        ("cuda", 1e30, M, 2 * (2 - 1) / 2 * 4 / 4),  # 4 ranks a node, each sends a quarter across
        ("cuda", M, 1e30, 2 * (4 - 1) / 4 * 4),
        ("cuda", M, 10 * M, 2 * (4 - 1) / 4 * 4),
        ("cuda", 10 * M, M, 1.0),
        ("cpu", M, 10 * M, 2 * (8 - 1) / 8 * 4 / 10),  # one ring over all ranks, at the speed of the slower link
    ):
        top = bare(8, device, local_world_size=4, intra_host_bw=inside, inter_host_bw=across)
        assert dense_step(Workload(1, dense_parameters=10**6), top)[0] == pytest.approx(expected), (device, inside)


# ---- lookups ----


def test_a_row_is_read_in_whole_cache_lines() -> None:
    top, half = bare(1, ddr_mem_bw=M), DataType.FP16
    for cols, kind, read in (
        (4, DataType.FP32, CACHE_LINE), (16, DataType.FP32, 64), (17, DataType.FP32, 68), (24, half, CACHE_LINE),
        (40, half, 80),
    ):  # fmt: skip
        config = table(cols, data_type=kind)
        plan = ShardingPlan({"": {"movies": scheme_named("table_wise").default(config, top)}})
        found = estimate(plan, [config], top, Workload(100, 10.0, unique_fraction=1.0))
        assert found.ms[0, found.phases.index("lookup")] == pytest.approx(1000 * read / M), (cols, kind)


@pytest.mark.parametrize(
    ("rows", "weighted", "as_rows"),
    [(40, False, True), (260, False, True), (300, False, False), (10_000, False, False), (10_000, True, False)],
)
def test_replicas_send_bags_or_touched_rows(rows: int, weighted: bool, as_rows: bool) -> None:
    top, config = bare(2), table(8, rows)
    load = Workload(128, 10.0, weighted=weighted)
    plan = ShardingPlan({"": {"movies": scheme_named("data_parallel").default(config, top)}})
    found = estimate(plan, [config], top, load)
    touched = float(CostModel([config], top, load).tables.touched[0])
    bags, rows_sent = 4 * (1280 * (1 + weighted) + 128) + 4 * 128 * 8, 4 * touched * (1 + weighted) + 4 * touched * 8
    assert as_rows == (touched * (8 + 1) < 128 * (8 + 1) + 1280)
    sent = found.traffic_by_phase["input_dist/ids"][0, 1] + found.traffic_by_phase["output_dist_backward/rows"][0, 1]
    assert sent == pytest.approx(rows_sent if as_rows else bags)
    buffers = found.memory_bytes[0, found.memory_categories.index("input_buffers")]
    ids, lengths = (touched, 0) if as_rows else (1280, 128)
    assert buffers == pytest.approx(4 * 2 * (ids * (1 + weighted) + lengths))


def test_ranks_share_cores_or_have_one_each() -> None:
    for cores, slowdown in ((1, 4.0), (2, 2.0), (3, 4 / 3), (4, 1.0), (8, 1.0)):
        assert bare(4, cores_per_host=cores).slowdown == pytest.approx(slowdown)
        assert bare(4, "cuda", cores_per_host=cores).slowdown == 1.0


@pytest.mark.parametrize(("first", "rows", "whole"), [(0, 10, True), (90, 10, False)])
def test_no_more_ids_are_distinct_than_there_are(first: int, rows: int, whole: bool) -> None:
    """Rows that are looked up almost never: each of their ids is another row, at most."""
    curve = RowShares.of_curve([0.0, 10.0, 100.0], [0.999, 0.001])
    config = table(8, 100)
    top, load = bare(2), Workload(100, 1.0)
    wish = {"movies": ParameterConstraints(row_shares=curve)}
    model = CostModel([config], top, load, wish)
    at, one = np.array([0]), np.ones(1)
    found = row_hits(model.tables, model.row_shares, at, rows * one, first * one, 2)
    ids = float(found.share[0]) * 200
    assert found.share[0] == pytest.approx(0.999 if whole else 0.001 * 10 / 90)
    assert 0 < found.unique[0] <= 1
    assert (found.unique[0] == 1) != whole
    assert (ids < 1) != whole


# ---- the network ----


def test_a_rank_of_one_node_sends_or_receives_longer() -> None:
    routes = RouteCosts(bare(4, intra_host_bw=1.0))
    for per_peer, expected in (
        ([3.0, 1.0, 0.0, 0.0], [9.0, 3.0, 4.0, 4.0]),  # rank 0 and 1 by what they send, 2 and 3 by what arrives
        ([1.0, 1.0, 1.0, 1.0], [3.0] * 4),
        ([0.0, 0.0, 0.0, 2.0], [2.0, 2.0, 2.0, 6.0]),
        ([2.0, 2.0, 2.0, 0.0], [6.0, 6.0, 6.0, 6.0]),
    ):
        sent = np.array(per_peer)
        assert routes.wire(sent, sent.sum(keepdims=True)).tolist() == pytest.approx(expected), per_peer


def test_of_two_nodes_the_slower_link_counts() -> None:
    """Ranks 0 and 1 send 3 and 1 to each peer, ranks 2 and 3 send 0 and 1."""
    sent = np.array([3.0, 1.0, 0.0, 1.0])
    for inside, across, expected in (
        (1.0, 1e9, [3.0, 3.0, 1.0, 1.0]),  # to the other rank of the node, or from it
        (1e9, 1.0, [6.0, 2.0, 4.0, 4.0]),  # two ranks of the other node each; what its ranks send each of these
        (2.0, 1.0, [6.0, 2.0, 4.0, 4.0]),
        (0.25, 1.0, [12.0, 12.0, 4.0, 4.0]),
    ):
        routes = RouteCosts(bare(4, local_world_size=2, intra_host_bw=inside, inter_host_bw=across))
        assert routes.wire(sent, sent.sum(keepdims=True)).tolist() == pytest.approx(expected), (inside, across)
        assert routes.wire_ms == max((2 - 1) / inside, (4 - 2) / across)  # so do the linear terms


def hops(top: Topology, ranks: list[int], batch: int = 100) -> np.ndarray:
    """``[W]`` ms of bringing the rows of a two-hop table, row-wise on some ranks, home."""
    config = table(8)
    sharding = ParameterSharding("row_wise", ranks=ranks, route="two_hop")
    plan = ShardingPlan({"": {"movies": sharding.resolved(config, 4, 2)}})  # type: ignore[dict-item]
    found = estimate(plan, [config], top, Workload(batch))
    return found.ms[:, found.phases.index("output_dist")]


def test_two_hops_take_what_a_rank_sends_or_receives() -> None:
    one = 4 * 100 * 8  # bytes of the rows of one home
    for ranks, inside in (
        ([0, 1], [2.0, 2.0, 0.0, 0.0]),  # node 1 only receives
        ([0, 2], [2.0, 2.0, 2.0, 2.0]),  # ranks 1 and 3 only receive inside
    ):
        near = hops(bare(4, local_world_size=2, intra_host_bw=one), ranks)
        far = hops(bare(4, local_world_size=2, inter_host_bw=one), ranks)
        assert near.tolist() == pytest.approx(inside)
        assert far.tolist() == pytest.approx([1.0, 1.0, 1.0, 1.0])


@pytest.mark.parametrize("codecs", ["fp32", "fp16/fp32", "fp32/fp16", "fp16/int8", "int8/fp16", "int8"])
def test_buffers_are_as_large_as_the_wider_of_both_coded_copies(codecs: str) -> None:
    config, top = table(16), bare(2)
    plan = ShardingPlan({"": {"movies": scheme_named("table_wise").default(config, top, [0])}})
    load = Workload(100)
    plain, coded = (estimate(plan, [config], top, replace(load, codecs=c)).memory_bytes[0, 4] for c in ("fp32", codecs))
    ratio = {"fp32": 0.0, "fp16": 2.0, "int8": 1.0}
    element = max(ratio[name] for name in codecs.split("/"))
    row = 8 if element == 1.0 else 0
    copies = 100 * (16 * element + row)  # of one home, beside fp32: held for 2 homes, received from 1 holder
    assert coded - plain == pytest.approx(2 * copies + copies if element else 0)


# ---- norms ----


def test_norms_travel_between_pieces_that_share_rows_and_no_others() -> None:
    """Left: rows [0, 60) on rank 0, [60, 100) on rank 1. Right: [0, 20) on rank 2, [20, 100) on rank 3."""
    config, top = table(8, 100), bare(4)
    load = Workload(25, 4.0, unique_fraction=1.0, optimizer="exact_row_wise_adagrad")
    shards = [
        Shard(0, (0, 60), (0, 4)), Shard(1, (60, 100), (0, 4)), Shard(2, (0, 20), (4, 8)), Shard(3, (20, 100), (4, 8)),
    ]  # fmt: skip
    pairs = [(config, ParameterSharding("custom", shards=shards))]
    found = norm_traffic(CostModel([config], top, load), pairs)
    # 400 distinct rows of all ranks, evenly over 100: 4 norms of 4 bytes a row
    rows = [[60, 0, 20, 40], [0, 40, 0, 40], [20, 0, 20, 0], [40, 40, 0, 80]]
    np.testing.assert_allclose(found, 4 * 4 * np.array(rows, dtype=float))


# ---- the workload ----


PROFILE = AccessProfile(uses=(1.0, 6.0), rows=(4.0, 1.0))  # 10 ids, 5 rows


def test_distinct_rows_are_counted_extrapolated_and_bounded() -> None:
    for ids, rows, expected in (
        (10, 100, 5.0),  # the sample itself
        (5, 100, 4 * 0.5 + 1 - 0.5**6),  # less than the sample: what a half of it keeps
        (20, 100, 5 * 2 ** (4 / 5)),  # more: extrapolated
        (20, 7, 7.0),  # but no more than the table has
        (0.5, 100, 4 * 0.05 + 1 - 0.95**6),  # and no more than there are ids
    ):
        assert PROFILE.distinct(ids, rows) == pytest.approx(min(expected, ids, rows)), (ids, rows)


def test_the_hottest_rows_are_taken_from_the_most_used_on() -> None:
    for rows, share in ((0, 0.0), (0.5, 0.3), (1, 0.6), (3, 0.8), (5, 1.0), (9, 1.0)):
        assert PROFILE.hottest(rows) == pytest.approx(share), rows


# ---- the step ----


def test_a_phase_takes_as_long_as_its_slowest_rank_and_the_busiest_rank_is_another_number() -> None:
    """Rank 0 has the larger table, rank 1 the one with more lookups: neither is slowest in every phase."""
    tables = [
        EmbeddingBagConfig(name=n, num_embeddings=1000, embedding_dim=d, feature_names=[n])
        for n, d in (("wide", 256), ("busy", 4))
    ]
    top = bare(4, ddr_mem_bw=M, intra_host_bw=M)
    entries = {t.name: scheme_named("table_wise").default(t, top, [n]) for n, t in enumerate(tables)}
    load = Workload(10, {"wide": 2.0, "busy": 50.0}, unique_fraction=1.0)
    found = estimate(ShardingPlan({"": EmbeddingModuleShardingPlan(entries)}), tables, top, load)
    slowest = found.ms.argmax(axis=0)
    assert {0, 1} <= set(slowest[found.ms.max(axis=0) > 0].tolist())
    assert found.step_ms == pytest.approx(found.ms.max(axis=0).sum())
    assert found.max_rank_ms == pytest.approx(found.ms.sum(axis=1).max())
    assert found.critical_rank == found.ms.sum(axis=1).argmax()
    assert found.step_ms > found.max_rank_ms * 1.01


def test_a_gap_is_how_much_longer_than_the_bound_and_never_negative() -> None:
    top, config = bare(1), table()
    plan = ShardingPlan({"": {"movies": scheme_named("table_wise").default(config, top)}})
    made = replace(estimate(plan, [config], top), ms=np.array([[1.0, 2.0]]), phases=("a", "b"))
    for bound, gap in ((None, None), (0.0, float("inf")), (2.0, 0.5), (3.0, 0.0), (4.0, 0.0)):
        assert replace(made, lower_bound=bound).gap == gap


NEEDS = [  # device, what costs, and what a step is then bound by
    ("cuda", {"intra_host_bw": M}, "network"),
    ("cuda", {"route_ns_per_id": 1e3}, "device"),
    ("cuda", {"host_ms": 1.0}, "host"),
    ("cuda", {"ddr_mem_bw": M}, "copy"),
    ("cuda", {"cache_bw": M}, "chain"),
    ("cpu", {"intra_host_bw": M}, "network"),
    ("cpu", {"cache_bw": M}, "chain"),  # a rank's core computes all that its batch waits for
]


@pytest.mark.parametrize(("device", "figures", "bound"), NEEDS)
def test_under_a_pipeline_the_longest_need_is_the_step(device: str, figures: dict[str, float], bound: str) -> None:
    config, top = table(4), bare(4, device, **figures)
    plan = ShardingPlan({"": {"movies": scheme_named("row_wise").default(config, top)}})
    found = estimate(plan, [config], top, Workload(1000, 50.0, pipeline="prefetch")).overlap
    assert found.bound_by == bound
    assert found.lower_bound_ms == max(found.needs_ms.values()) == found.needs_ms[bound] > 0
    assert found.step_ms == pytest.approx(found.lower_bound_ms)
    others = {name: ms for name, ms in found.needs_ms.items() if name != bound}
    assert max(others.values()) <= found.step_ms * (1 + 1e-9)
    assert min(others.values()) < 0.9 * found.step_ms
    assert found.hidden_ms == pytest.approx(found.plain_ms - found.step_ms)
