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


def test_distinct_ids_of_a_part_are_those_drawn() -> None:
    for parts in (2, 4):
        ids = np.random.default_rng(parts).integers(0, 300, 1000)
        own = np.mean([len(np.unique(part)) for part in np.split(ids, parts)])
        share, every = np.array([len(np.unique(ids)) / 1000]), np.full(2, float(parts))
        assert distinct_in_part(share, np.array([1000.0]), every[:1])[0] == pytest.approx(own, rel=0.05)
        edges = distinct_in_part(np.array([1.0, 1e-9]), np.full(2, 100.0), every)
        assert edges == pytest.approx([100 / parts, 1e-7], rel=1e-3)


@pytest.mark.parametrize("scheme", scheme_names())
def test_more_work_costs_more_and_one_rank_sends_nothing(scheme: str) -> None:
    base = predicted(scheme)
    for changed in ({"batch_size": 256}, {"pooling_factors": 20.0}, {"weighted": True}, {"dense_parameters": 10**6}):
        assert predicted(scheme, load=replace(LOAD, **changed)).step_ms > base.step_ms, changed  # type: ignore[arg-type]
    assert predicted(scheme, table=replace(MOVIES, embedding_dim=128)).step_ms > base.step_ms
    assert predicted(scheme, world_size=1).traffic_bytes.sum() == 0


def test_the_cpu_defaults_reproduce_what_they_were_fitted_to() -> None:
    """4 tables x 100k x 64, batch 2048, pooling 10 on one rank: measured in ms, uniform and Zipf(1.2)."""
    tables = [EmbeddingBagConfig(100_000, 64, name=f"t{i}", feature_names=[f"f{i}"]) for i in range(4)]
    topology = Topology(1, ddr_cap=10**10)
    plan = ShardingPlan({"": {t.name: scheme_named("table_wise").default(t, topology) for t in tables}})
    for alpha, forward, sgd, adagrad in ((0.0, 3.1, 8.1, 4.5), (1.2, 1.0, 2.5, 1.7)):
        load = Workload(2048, 10.0, zipf_alpha=alpha)
        found = estimate(plan, tables, topology, load)
        assert phase(found, "lookup")[0] == pytest.approx(forward, rel=0.15)
        assert phase(found, "lookup_backward")[0] == pytest.approx(sgd, rel=0.15)
        found = estimate(plan, tables, topology, replace(load, optimizer="exact_row_wise_adagrad"))
        assert phase(found, "lookup_backward")[0] == pytest.approx(adagrad, rel=0.15)


def test_small_models_cost_what_was_measured() -> None:
    """Six tables of dim 16, 1.5 ids a bag, on 2 cores: none of these was fitted to."""
    rows = {"user": 943, "movie": 1682, "age": 7, "gender": 2, "occupation": 21, "genres": 19}
    tables = [EmbeddingBagConfig(count, 16, name=name, feature_names=[name]) for name, count in rows.items()]
    for world_size, scheme, batch, measured in (
        (1, "table_wise", 512, 0.8), (2, "table_wise", 256, 2.1), (2, "row_wise", 1024, 3.8),
        (4, "table_wise", 256, 9.3),
    ):  # fmt: skip
        topology = Topology(world_size, ddr_cap=10**9, cores_per_host=2)
        ranks = itertools.cycle(range(world_size))
        on = {t.name: [next(ranks)] if scheme == "table_wise" else None for t in tables}
        plan = ShardingPlan({"": {t.name: scheme_named(scheme).default(t, topology, on[t.name]) for t in tables}})
        found = estimate(plan, tables, topology, Workload(batch, 1.5)).step_ms
        assert measured / 1.5 < found < measured * 1.5, (world_size, scheme)


def test_without_fixed_costs_the_step_grows_with_the_batch() -> None:
    none = dict.fromkeys(("peer_ms", "host_ms", "shard_feature_ms", "row_split_ms", "step_ms", "launch_ms"), 0.0)
    free = Topology(4, ddr_cap=10**9, cores_per_host=4, **none)
    plan = ShardingPlan({"": {"movies": scheme_named("row_wise").default(MOVIES, free)}})
    one, two = (estimate(plan, [MOVIES], free, Workload(batch, 1.0)).step_ms for batch in (1, 2))
    assert two == pytest.approx(2 * one, rel=1e-3)


def test_expected_unique_is_the_sum_over_all_rows() -> None:
    for alpha, rows, ids in itertools.product((0.0, 0.5, 1.0, 1.2, 2.0), (1, 7, 300, 50_000), (1.0, 100.0, 20_000.0)):
        p = np.arange(1, rows + 1.0) ** -alpha
        exact = -np.expm1(-ids * p / p.sum()).sum()
        found = expected_unique(np.array([float(rows)]), np.array([ids]), np.array([alpha]))[0]
        assert found == pytest.approx(exact, rel=0.06), (alpha, rows, ids)


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
