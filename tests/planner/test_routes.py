"""Routes: costs equal to those of every message sent one by one, and each route taken where it should be."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recshard_lab.distributed import EmbeddingCollectionSharder
from recshard_lab.embedding import EmbeddingBagCollection, EmbeddingCollection
from recshard_lab.embedding.configs import EmbeddingBagConfig, EmbeddingConfig
from recshard_lab.planner import EmbeddingShardingPlanner, Workload, estimate
from recshard_lab.planner.model.loads import across_shares
from recshard_lab.sharding import (
    ROUTES,
    ParameterConstraints,
    ParameterSharding,
    PlanError,
    Shard,
    ShardingPlan,
    Topology,
    scheme_named,
    scheme_names,
)
from tests.grid import grid
from tests.planner.problems import best_plan

BATCH = 16
LOAD = Workload(BATCH, 3.0)
FREE = dict.fromkeys(
    ("peer_ms", "inter_host_peer_ms", "host_ms", "shard_feature_ms", "row_split_ms", "step_ms", "launch_ms"), 0.0
)


def table(name: str, rows: int, cols: int) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=cols, feature_names=[name])


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[EmbeddingBagConfig], ShardingPlan, Topology]:
    """Tables split into random row and column shards, on random ranks of up to three nodes, random output paths."""
    local = draw(st.integers(1, 3))
    top = Topology(
        local * draw(st.integers(1, 3)),
        local_world_size=local,
        ddr_cap=10**9,
        cores_per_host=local,
        intra_host_bw=1e5,
        inter_host_bw=draw(st.sampled_from([1e3, 1e5])),
        cache_bw=1e6,
        intra_host_latency_ms=1.0,
        inter_host_latency_ms=10.0,
        reduce_scatter_cost=3.0,
        **FREE,
    )
    tables, plan = [], {}
    for number in range(draw(st.integers(1, 3))):
        config = table(f"t{number}", draw(st.integers(2, 9)), draw(st.integers(2, 9)))
        shards = []
        row_cuts = sorted({0, config.num_embeddings, *draw(st.lists(st.integers(1, config.num_embeddings - 1)))})
        for r0, r1 in pairwise(row_cuts):
            col_cuts = sorted({0, config.embedding_dim, *draw(st.lists(st.integers(1, config.embedding_dim - 1)))})
            for c0, c1 in pairwise(col_cuts):
                shards.append(Shard(draw(st.integers(0, top.world_size - 1)), (r0, r1), (c0, c1)))
        tables.append(config)
        plan[config.name] = ParameterSharding("custom", shards=shards, route=draw(st.sampled_from(ROUTES)))
    return tables, ShardingPlan({"": plan}), top  # type: ignore[dict-item]


class Exchanges:
    """One message after the other: bytes ``[W, W]`` of each exchange of the forward pass, home's own included."""

    def __init__(self, tables: list[EmbeddingBagConfig], plan: ShardingPlan, top: Topology) -> None:
        ranks, nodes, local = range(top.world_size), range(top.num_nodes), top.local_world_size
        self.direct, self.inside, self.across = (np.zeros((top.world_size,) * 2) for _ in range(3))
        self.summed = 0.0  # bytes of one home that a reduce-scatter adds up
        for config in tables:
            sharding = plan.tables()[config.name]
            cut = any(shard.num_rows < config.num_embeddings for shard in sharding.shards)
            if sharding.route == "two_hop":
                for shard in sharding.shards:
                    for home in ranks:
                        helper = shard.rank // local * local + home % local
                        self.inside[shard.rank, helper] += 4 * BATCH * shard.num_cols
                for node in nodes:
                    mine = [s for s in sharding.shards if s.rank // local == node]
                    held = {c for shard in mine for c in range(*shard.cols)}
                    for home in ranks:
                        self.across[node * local + home % local, home] += 4 * BATCH * len(held)
            elif sharding.route == "reduce_scatter" and cut:
                self.summed += 4 * BATCH * config.embedding_dim
            else:
                for shard in sharding.shards:
                    for home in ranks:
                        self.direct[shard.rank, home] += 4 * BATCH * shard.num_cols

    def traffic(self) -> np.ndarray:
        """Forward and back: what a rank sends it later receives."""
        once = self.direct + self.inside + self.across + self.summed
        both = once + once.T
        np.fill_diagonal(both, 0)
        return both

    def buffers(self, top: Topology) -> np.ndarray:
        """Bytes per rank: sent by the rank that holds the shard, and received."""
        hops = sum(m.sum(axis=1) + m.sum(axis=0) for m in (self.inside, self.across))
        return self.direct.sum(axis=1) + self.direct.sum(axis=0) + hops + (top.world_size + 1) * self.summed

    def ms(self, top: Topology, backward: bool) -> np.ndarray:
        """Every exchange waits for its slower side, inside or across nodes."""
        same = np.equal.outer(np.arange(top.world_size), np.arange(top.world_size))
        near = np.equal.outer(*[np.arange(top.world_size) // top.local_world_size] * 2)
        flat = top.intra_host_latency_ms if top.num_nodes == 1 else top.inter_host_latency_ms
        found = np.zeros(top.world_size)
        for sent in (self.direct, self.inside, self.across):
            if not sent.any():
                continue
            links = ((near & ~same, top.intra_host_bw), (~near, top.inter_host_bw))
            found += np.max(
                [np.maximum((sent * m).sum(axis=0), (sent * m).sum(axis=1)) / bw for m, bw in links], axis=0
            )
            found += sent.sum(axis=0) / top.cache_bw
        if self.direct.any():
            found += flat if top.world_size > 1 else 0
        if self.inside.any():
            found += (top.intra_host_latency_ms if top.local_world_size > 1 else 0) + (
                top.inter_host_latency_ms if top.num_nodes > 1 else 0
            )
        if self.summed:
            link = top.intra_host_bw if top.num_nodes == 1 else top.inter_host_bw
            found += (top.world_size - 1) * self.summed * (1 if backward else 3) / link + self.summed / top.cache_bw
            found += flat if top.world_size > 1 else 0
        return found


@given(plans())
def test_costs_are_those_of_every_message_sent_one_by_one(drawn: Any) -> None:
    tables, plan, top = drawn
    found, truth = estimate(plan, tables, top, LOAD), Exchanges(tables, plan, top)
    for phase, backward in (("output_dist", False), ("output_dist_backward", True)):
        np.testing.assert_allclose(found.ms[:, found.phases.index(phase)], truth.ms(top, backward), rtol=1e-9)
    ids = estimate(plan.with_route("direct"), tables, top, LOAD).traffic_bytes
    ids = ids - Exchanges(tables, plan.with_route("direct"), top).traffic()  # input side: the same on any route
    np.testing.assert_allclose(found.traffic_bytes - ids, truth.traffic(), rtol=1e-9, atol=1e-6)
    joined = 4 * BATCH * sum(config.embedding_dim for config in tables)
    column = found.memory_bytes[:, found.memory_categories.index("output_buffers")]
    np.testing.assert_allclose(column - joined, truth.buffers(top), rtol=1e-9, atol=1e-6)


@given(st.lists(st.tuples(st.tuples(st.integers(0, 6), st.integers(1, 6)), st.integers(0, 2)), min_size=1))
def test_shares_add_up_to_the_columns_that_a_node_holds(drawn: list[tuple[tuple[int, int], int]]) -> None:
    cols, nodes = [(start, start + width) for (start, width), _ in drawn], [node for _, node in drawn]
    shares = across_shares(cols, nodes)
    for node in set(nodes):
        mine = [i for i in range(len(cols)) if nodes[i] == node]
        held = {c for i in mine for c in range(*cols[i])}
        assert sum(shares[i] * (cols[i][1] - cols[i][0]) for i in mine) == pytest.approx(len(held))


def nodes_of_four(**more: Any) -> Topology:
    return Topology(8, local_world_size=4, cores_per_host=4, ddr_cap=10**9, **more)


HUGE = [table(f"huge{i}", 3_000_000, 64) for i in range(2)]  # 768 MB each
HEAVY = Workload(1024, 10.0)
ROWS = {config.name: ParameterConstraints(sharding_types=["row_wise"]) for config in HUGE}

ROW = {"huge0": ROWS["huge0"]}


def routes(top: Topology, **more: Any) -> dict[str, str]:
    more.setdefault("workload", HEAVY)
    plan = best_plan(HUGE, top, **more)
    return {name: sharding.route for name, sharding in plan.tables().items()}


def test_two_hops_over_slow_links_between_nodes_and_direct_inside_one() -> None:
    slow = nodes_of_four(inter_host_bw=1e4)
    assert set(routes(slow, constraints=ROWS).values()) == {"two_hop"}
    one_node = Topology(8, cores_per_host=8, ddr_cap=10**9)  # Gloo
    assert set(routes(one_node, constraints=ROWS).values()) == {"direct"}
    # in free plans too, row shards share nodes, or rows are not split
    planner = EmbeddingShardingPlanner(slow, workload=HEAVY)
    for config, sharding in planner.plan_tables(HUGE).pairs(HUGE):
        cut = any(shard.num_rows < config.num_embeddings for shard in sharding.shards)
        assert (sharding.route == "two_hop") == cut


def test_a_network_that_adds_on_the_way_gets_a_reduce_scatter() -> None:
    adding = Topology(8, "cuda", hbm_cap=170_000_000)  # only a row shard on every rank fits
    for cost, route in ((1.0, "reduce_scatter"), (5.0, "direct")):
        (sharding,) = (
            best_plan(HUGE[:1], replace(adding, reduce_scatter_cost=cost), workload=HEAVY, constraints=ROW)
            .tables()
            .values()
        )
        assert (sharding.route, len(sharding.shards)) == (route, 8)


def test_no_route_is_cheaper_than_the_one_that_was_chosen() -> None:
    for top in (nodes_of_four(inter_host_bw=1e5), nodes_of_four(), Topology(8, "cuda", local_world_size=4)):
        top = replace(top, ddr_cap=10**9, hbm_cap=10**9)
        plan = best_plan(HUGE, top, workload=HEAVY, constraints=ROWS)
        for route in ROUTES:
            forced = estimate(plan.with_route(route), HUGE, top, HEAVY)
            assert plan.estimate.step_ms <= forced.step_ms * (1 + 1e-9), route


SKEWED = Workload(1024, 1.0, unique_fraction=0.1)
FITTED = Topology(8, cores_per_host=8, ddr_cap=10**9, sort_ns_per_id=40.0, sum_ns_per_number=0.3)


def test_distinct_rows_are_planned_where_the_estimate_is_less() -> None:
    plan = best_plan(HUGE, FITTED, workload=SKEWED, constraints=ROWS)
    assert {sharding.route for sharding in plan.tables().values()} == {"distinct_rows"}
    np.testing.assert_allclose(plan.estimate.ms, estimate(plan, HUGE, FITTED, SKEWED).ms, rtol=1e-9)
    for route in ROUTES:
        assert plan.estimate.step_ms < estimate(plan.with_route(route), HUGE, FITTED, SKEWED).step_ms
    many = replace(SKEWED, pooling_factors=40.0, unique_fraction=0.9)  # more distinct ids than bags
    assert set(routes(FITTED, workload=many, constraints=ROWS).values()) == {"direct"}


def test_distinct_rows_are_not_planned_where_they_do_not_apply_or_their_cost_is_unknown() -> None:
    words = [EmbeddingConfig(t.num_embeddings, t.embedding_dim, t.name, feature_names=[t.name]) for t in HUGE]
    variable = {name: replace(own, num_poolings=[0.5]) for name, own in ROWS.items()}
    one_rank = Topology(1, ddr_cap=10**10, sort_ns_per_id=40.0, sum_ns_per_number=0.3)
    for reason, tables, top, load, wish in (
        ("repeats unknown", HUGE, FITTED, replace(SKEWED, unique_fraction=None), ROWS),
        ("costs unknown", HUGE, replace(FITTED, sort_ns_per_id=0.0), SKEWED, ROWS),
        ("weighted", HUGE, FITTED, replace(SKEWED, weighted=True), ROWS),
        ("variable", HUGE, FITTED, SKEWED, variable),
        ("one rank", HUGE, one_rank, SKEWED, ROWS),
        ("sequence", words, FITTED, SKEWED, ROWS),
    ):
        plan = best_plan(tables, top, workload=load, constraints=wish)
        assert "distinct_rows" not in {sharding.route for sharding in plan.tables().values()}, reason


def test_the_planner_reads_weights_and_deduplication_from_the_model() -> None:
    tables = [replace(t, num_embeddings=3000) for t in HUGE]
    planner = EmbeddingShardingPlanner(FITTED, workload=SKEWED, constraints=ROWS)
    plan = planner.plan(EmbeddingBagCollection(tables, is_weighted=True, device=torch.device("meta")))
    assert {sharding.route for sharding in plan.tables().values()} == {"direct"}
    words = [EmbeddingConfig(3000, 64, t.name, feature_names=[t.name]) for t in HUGE]
    model, bytes_of = EmbeddingCollection(words, device=torch.device("meta")), {}
    for dedup in (False, True):
        plan = planner.plan(model, [EmbeddingCollectionSharder(use_index_dedup=dedup)])
        bytes_of[dedup] = plan.estimate.traffic_by_phase["output_dist/rows"].sum()
    assert bytes_of[True] < 0.6 * bytes_of[False]


@pytest.mark.parametrize("route", ROUTES)
def test_a_route_can_be_asked_for(route: str) -> None:
    top = nodes_of_four()
    assert set(routes(top, route=route, constraints=ROWS).values()) == {route}
    wish = {"huge1": ParameterConstraints(sharding_types=["row_wise"], route=route)}
    assert routes(top, constraints=wish)["huge1"] == route
    plan = best_plan([*HUGE, table("tiny", 3, 4)], top, route=route, workload=HEAVY)
    again = estimate(plan, [*HUGE, table("tiny", 3, 4)], top, HEAVY)
    np.testing.assert_allclose(plan.estimate.ms, again.ms, rtol=1e-9)
    for sharding in plan.tables().values():
        cut = len({shard.rows for shard in sharding.shards}) > 1
        applies = not sharding.replicated and (cut or route != "reduce_scatter")
        assert sharding.route == (route if applies else "direct")


@pytest.mark.parametrize(*grid(scheme=scheme_names(), route=ROUTES, gate={"route": [ROUTES[1]]}))
def test_a_plan_under_every_scheme_and_route_is_estimated_as_planned(scheme: str, route: str) -> None:
    top = replace(nodes_of_four(), ddr_cap=10**10)
    tables = [table("a", 1000, 16), table("b", 7, 8), table("c", 50, 32)]
    wish = {config.name: ParameterConstraints(sharding_types=[scheme], route=route) for config in tables}
    plan = best_plan(tables, top, constraints=wish, workload=HEAVY)
    assert {sharding.sharding_type for sharding in plan.tables().values()} == {scheme}
    found = estimate(plan, tables, top, HEAVY)
    np.testing.assert_allclose(plan.estimate.ms, found.ms, rtol=1e-9)
    np.testing.assert_allclose(plan.estimate.traffic_bytes, found.traffic_bytes, rtol=1e-9)
    np.testing.assert_allclose(plan.estimate.memory_bytes, found.memory_bytes, rtol=1e-9)


def test_two_hops_send_a_fraction_across_nodes() -> None:
    top = nodes_of_four()
    plan = ShardingPlan({"": {"huge0": scheme_named("row_wise").default(HUGE[0], top)}})
    away = ~np.equal.outer(np.arange(8) // 4, np.arange(8) // 4)

    def across(route: str) -> float:
        sharded = plan.with_route(route)
        loads = [replace(HEAVY, batch_size=n * HEAVY.batch_size) for n in (2, 1)]
        rows = np.subtract(*(estimate(sharded, HUGE[:1], top, load).traffic_bytes for load in loads))
        ids = 4 * (8 * 1024 * 10 / 8 + 8 * 1024) / 8  # of one rank pair
        return float(((rows - ids) * away).sum())

    assert across("two_hop") == pytest.approx(across("direct") / 4)


def test_rows_that_are_not_pooled_know_the_direct_route_alone_and_no_table_another_one() -> None:
    words = EmbeddingConfig(name="words", num_embeddings=1000, embedding_dim=16, feature_names=["words"])
    top = nodes_of_four()
    assert best_plan([words], top, route="two_hop").tables()["words"].route == "direct"
    wish = {"words": ParameterConstraints(route="two_hop")}
    with pytest.raises(PlanError, match=r"'words' is not pooled.*Fix: route='direct'"):
        best_plan([words], top, constraints=wish)
    plan = ShardingPlan({"": {"words": ParameterSharding("row_wise", route="reduce_scatter")}})
    with pytest.raises(PlanError, match="'words' is not pooled"):
        estimate(plan, [words], top)
    with pytest.raises(PlanError, match="did you mean 'two_hop'"):
        EmbeddingShardingPlanner(Topology(2), route="two_hops")
    with pytest.raises(PlanError, match="known: direct, reduce_scatter, two_hop, distinct_rows"):
        ParameterConstraints(route="ring")
