"""The cost and memory model: bytes counted by hand, and the directions that must hold."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from recshard_lab.embedding.configs import DataType, EmbeddingBagConfig, EmbeddingConfig
from recshard_lab.planner import Estimate, Workload, estimate
from recshard_lab.planner.workload import distinct_in_part, expected_unique
from recshard_lab.sharding import (
    ParameterConstraints,
    PlanError,
    Shard,
    ShardingPlan,
    Topology,
    scheme_named,
    scheme_names,
)

MOVIES = EmbeddingBagConfig(name="movies", num_embeddings=1000, embedding_dim=64, feature_names=["movie"])
LOAD = Workload(batch_size=128, pooling_factors=10.0, optimizer="exact_row_wise_adagrad")


def predicted(scheme: str, world_size: int = 4, table: EmbeddingBagConfig = MOVIES, load: Workload = LOAD) -> Estimate:
    topology = Topology(world_size, ddr_cap=10**9, cores_per_host=world_size)
    plan = ShardingPlan({"": {table.name: scheme_named(scheme).default(table, topology)}})
    return estimate(plan, [table], topology, load)


def category(found: Estimate, name: str) -> list[float]:
    return found.memory_bytes[:, found.memory_categories.index(name)].tolist()


def phase(found: Estimate, name: str) -> np.ndarray:
    return found.ms[:, found.phases.index(name)]


def test_memory_is_what_counting_by_hand_gives() -> None:
    found = predicted("row_wise")
    assert category(found, "weights") == [250 * 64 * 4] * 4
    assert category(found, "optimizer_state") == [250 * 4] * 4
    # a quarter of every rank's 1280 ids, and all its 128 lengths, int32
    assert category(found, "input_buffers") == [4 * 4 * (320 + 128)] * 4
    # partial rows of the global batch, the rows returned by four ranks, and the joined output
    assert category(found, "output_buffers") == [4 * 64 * (4 * 128 + 4 * 128 + 128)] * 4
    replicas = predicted("data_parallel")
    assert category(replicas, "weights") == [1000 * 64 * 4] * 4
    halves = replace(MOVIES, data_type=DataType.FP16)
    assert sum(category(predicted("table_wise", table=halves), "weights")) == 1000 * 64 * 2


def test_traffic_is_what_counting_by_hand_gives() -> None:
    topology = Topology(2, ddr_cap=10**9)
    plan = ShardingPlan({"": {"movies": scheme_named("table_wise").default(MOVIES, topology, [1])}})
    found = estimate(plan, [MOVIES], topology, LOAD)
    ids, rows = 4 * (1280 + 128), 4 * 128 * 64
    assert found.traffic_by_phase["input_dist/sizes"].tolist() == [[0, 48], [32, 0]]
    assert found.traffic_bytes.tolist() == [[0, 48 + ids + rows], [32 + rows, 0]]
    replicas = predicted("data_parallel", world_size=2)
    assert replicas.traffic_bytes.tolist() == [[0, 48 + ids + rows], [48 + ids + rows, 0]]


def test_replicas_are_sent_bags_or_touched_rows_whichever_is_smaller() -> None:
    # 128 bags of 10 ids in a table of 40 rows: nearly all rows are touched, fewer than there are bags
    small = replace(MOVIES, num_embeddings=40)
    sent = predicted("data_parallel", world_size=2, table=small).traffic_bytes
    ids, rows = 4 * (1280 + 128), 4 * 128 * 64
    assert sent[0, 1] == sent[1, 0] == pytest.approx(4 * 40 * (64 + 1), rel=0.01)
    assert sent[0, 1] < 0.4 * (ids + rows)
    alone = predicted("data_parallel", world_size=1, table=small)
    assert alone.traffic_bytes.tolist() == [[0]]


@pytest.mark.parametrize("parts", [2, 4])
def test_distinct_ids_of_a_part_are_those_drawn(parts: int) -> None:
    draw = np.random.default_rng(parts)
    ids = draw.integers(0, 300, 1000)
    own = np.mean([len(np.unique(part)) for part in np.split(ids, parts)])
    share = np.array([len(np.unique(ids)) / 1000])
    found = distinct_in_part(share, np.array([1000.0]), np.array([float(parts)]))
    assert found[0] == pytest.approx(own, rel=0.05)
    edges = distinct_in_part(np.array([1.0, 1e-9]), np.array([100.0, 100.0]), np.array([parts, parts], dtype=float))
    assert edges == pytest.approx([100 / parts, 1e-7], rel=1e-3)


def test_replicas_send_nothing_home_in_forward() -> None:
    assert (phase(predicted("data_parallel"), "output_dist") == 0).all()
    assert (phase(predicted("row_wise"), "output_dist") > 0).all()


def test_a_step_is_the_sum_over_phases_of_the_slowest_rank() -> None:
    found = predicted("table_wise")
    assert found.step_ms == pytest.approx(sum(max(found.ms[:, p]) for p in range(len(found.phases))))
    assert found.max_rank_ms <= found.step_ms
    assert found.critical_rank == found.ms.sum(axis=1).argmax()


@pytest.mark.parametrize("scheme", scheme_names())
def test_more_work_costs_more(scheme: str) -> None:
    base = predicted(scheme)
    for more in (replace(LOAD, batch_size=256), replace(LOAD, pooling_factors=20.0), replace(LOAD, weighted=True)):
        assert predicted(scheme, load=more).step_ms > base.step_ms
    assert predicted(scheme, table=replace(MOVIES, embedding_dim=128)).step_ms > base.step_ms
    dense = replace(LOAD, dense_parameters=10**6)
    assert predicted(scheme, load=dense).step_ms > base.step_ms


@pytest.mark.parametrize("scheme", scheme_names())
def test_one_rank_has_no_traffic_and_faster_links_help_many(scheme: str) -> None:
    assert predicted(scheme, world_size=1).traffic_bytes.sum() == 0
    plan = ShardingPlan({"": {"movies": scheme_named(scheme).default(MOVIES, Topology(4))}})
    slow, fast = (
        estimate(plan, [MOVIES], Topology(4, ddr_cap=10**9, intra_host_bw=bw, cores_per_host=4), LOAD).step_ms
        for bw in (1e5, 1e7)
    )
    assert fast < slow


def test_two_hosts_are_slower_than_one_when_the_link_between_them_is() -> None:
    plan = ShardingPlan({"": {"movies": scheme_named("row_wise").default(MOVIES, Topology(4))}})
    one = estimate(plan, [MOVIES], Topology(4, cores_per_host=4, inter_host_bw=1e4), LOAD)
    two = estimate(plan, [MOVIES], Topology(4, local_world_size=2, cores_per_host=4, inter_host_bw=1e4), LOAD)
    assert two.step_ms > one.step_ms


def test_ranks_beyond_the_cores_slow_each_other_down() -> None:
    plan = ShardingPlan({"": {"movies": scheme_named("row_wise").default(MOVIES, Topology(4))}})
    own, shared = (estimate(plan, [MOVIES], Topology(4, cores_per_host=c), LOAD).step_ms for c in (4, 2))
    assert shared == pytest.approx(2 * own)


def test_the_cpu_defaults_reproduce_what_they_were_fitted_to() -> None:
    """4 tables x 100k x 64, batch 2048, pooling 10 on one rank: measured in ms, uniform and Zipf(1.2)."""
    tables = [
        EmbeddingBagConfig(name=f"t{i}", num_embeddings=100_000, embedding_dim=64, feature_names=[f"f{i}"])
        for i in range(4)
    ]
    topology = Topology(1, ddr_cap=10**10)
    plan = ShardingPlan({"": {t.name: scheme_named("table_wise").default(t, topology) for t in tables}})
    for alpha, forward, sgd, adagrad in ((0.0, 3.1, 8.1, 4.5), (1.2, 1.0, 2.5, 1.7)):
        load = Workload(2048, 10.0, zipf_alpha=alpha)
        found = estimate(plan, tables, topology, load)
        assert phase(found, "lookup")[0] == pytest.approx(forward, rel=0.15)
        assert phase(found, "lookup_backward")[0] == pytest.approx(sgd, rel=0.15)
        found = estimate(plan, tables, topology, replace(load, optimizer="exact_row_wise_adagrad"))
        assert phase(found, "lookup_backward")[0] == pytest.approx(adagrad, rel=0.15)


@pytest.mark.parametrize(
    ("world_size", "scheme", "batch", "measured"),
    [(1, "table_wise", 512, 0.8), (2, "table_wise", 256, 2.1), (2, "row_wise", 1024, 3.8), (4, "table_wise", 256, 9.3)],
)
def test_small_models_cost_what_was_measured(world_size: int, scheme: str, batch: int, measured: float) -> None:
    """Six tables of dim 16, 1.5 ids a bag, on 2 cores: none of these was fitted to."""
    rows = {"user": 943, "movie": 1682, "age": 7, "gender": 2, "occupation": 21, "genres": 19}
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=count, embedding_dim=16, feature_names=[name])
        for name, count in rows.items()
    ]
    topology = Topology(world_size, ddr_cap=10**9, cores_per_host=2)
    ranks = itertools.cycle(range(world_size))
    plan = ShardingPlan(
        {
            "": {
                t.name: scheme_named(scheme).default(t, topology, [next(ranks)] if scheme == "table_wise" else None)
                for t in tables
            }
        }
    )
    found = estimate(plan, tables, topology, Workload(batch, 1.5)).step_ms
    assert measured / 1.5 < found < measured * 1.5


def test_fixed_costs_belong_to_the_host_and_can_be_switched_off() -> None:
    none = dict.fromkeys(("peer_ms", "host_ms", "shard_feature_ms", "row_split_ms", "step_ms", "launch_ms"), 0.0)
    free = Topology(4, ddr_cap=10**9, cores_per_host=4, **none)
    plan = ShardingPlan({"": {"movies": scheme_named("row_wise").default(MOVIES, free)}})
    one, two = (estimate(plan, [MOVIES], free, Workload(batch, 1.0)).step_ms for batch in (1, 2))
    assert two == pytest.approx(2 * one, rel=1e-3)
    for name in none:
        assert (
            estimate(plan, [MOVIES], replace(free, **{name: 1.0}), LOAD).step_ms
            > estimate(plan, [MOVIES], free, LOAD).step_ms
        ), name


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 1.2, 2.0])
@pytest.mark.parametrize("rows", [1, 7, 300, 50_000])
def test_expected_unique_is_the_sum_over_all_rows(alpha: float, rows: int) -> None:
    for ids in (1.0, 100.0, 20_000.0):
        p = np.arange(1, rows + 1.0) ** -alpha
        exact = -np.expm1(-ids * p / p.sum()).sum()
        found = expected_unique(np.array([float(rows)]), np.array([ids]), np.array([alpha]))[0]
        assert found == pytest.approx(exact, rel=0.06)


def test_sequence_tables_send_a_row_for_every_id() -> None:
    bag = replace(MOVIES, name="bag")
    sequence = EmbeddingConfig(name="bag", num_embeddings=1000, embedding_dim=64, feature_names=["movie"])
    topology = Topology(2)
    plan = ShardingPlan({"": {"bag": scheme_named("table_wise").default(bag, topology, [0])}})
    pooled, rows = (
        estimate(plan, [t], topology, LOAD).traffic_by_phase["output_dist/rows"][0, 1] for t in (bag, sequence)
    )
    assert rows == 10 * pooled


def test_constraints_carry_their_own_pooling_factors() -> None:
    topology = Topology(2)
    plan = ShardingPlan({"": {"movies": scheme_named("row_wise").default(MOVIES, topology)}})
    wish = {"movies": ParameterConstraints(pooling_factors=[10.0])}
    assert estimate(plan, [MOVIES], topology, LOAD).step_ms == pytest.approx(
        estimate(plan, [MOVIES], topology, replace(LOAD, pooling_factors=1.0), wish).step_ms
    )
    with pytest.raises(PlanError, match="1 features, but its constraint pooling_factors has 2"):
        estimate(plan, [MOVIES], topology, LOAD, {"movies": ParameterConstraints(pooling_factors=[1.0, 2.0])})


def test_a_shard_on_a_rank_that_does_not_exist_is_refused() -> None:
    plan = ShardingPlan({"": {"movies": scheme_named("table_wise").default(MOVIES, Topology(4), [3])}})
    with pytest.raises(PlanError, match="world_size is 2"):
        estimate(plan, [MOVIES], Topology(2), LOAD)
    with pytest.raises(ValueError, match="exact_lamb"):
        Workload(optimizer="exact_lamb")


def test_a_hand_drawn_tiling_is_costed() -> None:
    from recshard_lab.sharding import ParameterSharding

    shards = [Shard(0, (0, 100), (0, 64)), Shard(1, (100, 1000), (0, 32)), Shard(0, (100, 1000), (32, 64))]
    plan = ShardingPlan({"": {"movies": ParameterSharding("custom", shards=shards)}})
    found = estimate(plan, [MOVIES], Topology(2), LOAD)
    assert sum(category(found, "weights")) == 1000 * 64 * 4
    assert max(len(line) for line in str(found).splitlines()) <= 100
