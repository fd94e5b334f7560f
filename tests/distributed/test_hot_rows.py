"""Hot rows on every rank, the others cut: the unsharded model, replicas alike to the bit, fewer bytes, even loads."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import recshard_lab
from recshard_lab import EmbeddingBagConfig, PoolingType, Shard, ShardingPlan, Topology, flex_shard, row_wise
from recshard_lab.sharding import EmbeddingModuleShardingPlan, tiling
from tests.distributed import cases, hot_jobs, state_jobs
from tests.distributed.jobs import Case
from tests.distributed.test_parity import OPTIMIZERS, check
from tests.grid import worlds

ROWS = 101
TABLES: list[dict[str, Any]] = [
    {"name": "movies", "num_embeddings": 37, "embedding_dim": 8, "feature_names": ["liked", "seen"]},
    {"name": "users", "num_embeddings": ROWS, "embedding_dim": 16, "feature_names": ["user"]},
    {
        "name": "genres",
        "num_embeddings": 50,
        "embedding_dim": 8,
        "feature_names": ["genre"],
        "pooling": PoolingType.MEAN,
    },
]


@pytest.fixture(scope="module", params=worlds(2, 3, 4))
def ranks(request: pytest.FixtureRequest) -> Iterator[Any]:
    """One rank has no replicas."""
    with recshard_lab.launch(request.param) as launched:
        yield launched


def zipf_steps(tables: list[dict[str, Any]], world: int, steps: int, samples: int, longest: int = 6) -> list[Any]:
    """Step -> rank -> bags of ids with ``p(k) ~ 1 / (k + 1) ** 1.2``; one bag in four is empty."""
    draw = random.Random(3)

    def bags(table: dict[str, Any]) -> list[list[int]]:
        chances = [(k + 1) ** -1.2 for k in range(table["num_embeddings"])]
        sizes = [draw.choice([0, 1, longest // 2, longest]) for _ in range(samples)]
        return [draw.choices(range(len(chances)), chances, k=size) for size in sizes]

    return [
        [{name: bags(table) for table in tables for name in table["feature_names"]} for _ in range(world)]
        for _ in range(steps)
    ]


def hot_plan(tables: list[dict[str, Any]], world: int, kernel: str = "fused") -> str:
    """Hot rows before stripes, before columns, and in the middle of a table that one rank has."""
    topology = Topology(world)
    configs = [EmbeddingBagConfig(**table) for table in tables]
    everywhere = [(rank, (10, 20), None) for rank in range(world)]
    columns = [Shard(rank, (0, 6), (0, 16)) for rank in range(world)]
    columns += [Shard(world - 1, (6, ROWS), (0, 4)), Shard(0, (6, ROWS), (4, 16))]
    made = [
        flex_shard(hot_rows=9, compute_kernel=kernel)(configs[0], topology),
        tiling(columns, kernel)(configs[1], topology),
        tiling([(0, (0, 10), None), *everywhere, (world - 1, (20, 50), None)], kernel)(configs[2], topology),
    ]
    entries = EmbeddingModuleShardingPlan({c.name: own for c, own in zip(configs, made, strict=True)})
    return ShardingPlan({cases.PATH: entries}).to_json()


def named(generator: Any, tables: list[dict[str, Any]], world: int) -> str:
    topology = Topology(world)
    entries = {table["name"]: generator(EmbeddingBagConfig(**table), topology) for table in tables}
    return ShardingPlan({cases.PATH: EmbeddingModuleShardingPlan(entries)}).to_json()


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, "exact_adagrad"])
@pytest.mark.parametrize("weighted", [False, True])
def test_hot_rows_everywhere_equal_the_unsharded_model(ranks: Any, optimizer: str, weighted: bool) -> None:
    world = ranks.world_size
    steps = zipf_steps(TABLES, world, steps=8, samples=7)
    check(Case(TABLES, hot_plan(TABLES, world), steps, optimizer, weighted=weighted), ranks)


@pytest.mark.parametrize("route", ["reduce_scatter", "two_hop", "distinct_rows"])
def test_what_is_no_replica_may_come_home_by_any_route(ranks: Any, route: str) -> None:
    world = ranks.world_size
    plan = ShardingPlan.from_json(hot_plan(TABLES, world)).with_route(route)
    check(Case(TABLES, plan.to_json(), zipf_steps(TABLES, world, 4, 7), "exact_row_wise_adagrad"), ranks)


def test_sequences_have_hot_rows_too(ranks: Any) -> None:
    world = ranks.world_size
    tables = [{k: v for k, v in table.items() if k != "pooling"} for table in TABLES]
    steps = zipf_steps(tables, world, 6, 5)
    check(Case(tables, hot_plan(tables, world), steps, "exact_row_wise_adagrad", sequence=True), ranks)


@pytest.mark.parametrize(("optimizer", "kernel"), [("adam", "fused"), ("exact_sgd", "dense")])
def test_replicas_stay_alike_through_checkpoints_under_other_plans(
    ranks: Any, tmp_path: Path, optimizer: str, kernel: str
) -> None:
    world = ranks.world_size
    case = Case(TABLES, hot_plan(TABLES, world, kernel), zipf_steps(TABLES, world, 6, 6), optimizer, eps=1e-3)
    stripes = named(row_wise(compute_kernel=kernel), TABLES, world)
    told = ranks.run(hot_jobs.train_save_load, case, str(tmp_path), [stripes, case.plan])
    for held, loaded, never_saved in told:
        assert held
        for name, value in held.items():
            assert torch.equal(value, told[0][0][name]), name
        for name, value in loaded.items():
            torch.testing.assert_close(value, never_saved[name], atol=1e-5, rtol=1e-5, msg=name)


def test_loading_a_state_dict_tells_the_replicas_that_it_does_not_hold(ranks: Any) -> None:
    world = ranks.world_size
    case = Case(TABLES, hot_plan(TABLES, world), zipf_steps(TABLES, world, 2, 6))
    told = ranks.run(hot_jobs.load_own_state, case)
    for wrong, held in told:
        assert wrong == []
        assert len(held) == 3
        for name, value in held.items():
            assert torch.equal(value, told[0][1][name]), name


def test_a_live_model_moves_into_hot_rows_and_out_again(ranks: Any) -> None:
    world = ranks.world_size
    case = Case(TABLES, named(row_wise(), TABLES, world), zipf_steps(TABLES, world, 6, 6), "exact_row_wise_adagrad")
    case.eps = 1e-3
    plans = [hot_plan(TABLES, world), named(flex_shard(hot_rows=20), TABLES, world), case.plan]
    for wrong, moved, still, state, truth in ranks.run(state_jobs.train_moving, case, plans, 3):
        assert not wrong
        assert moved == pytest.approx(still, abs=1e-5)
        for name, value in truth.items():
            torch.testing.assert_close(state[name], value, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("generator", [flex_shard(hot_rows=9), recshard_lab.data_parallel()], ids=["hot", "whole"])
def test_replicas_are_alike_where_every_rank_draws_its_own_weights(ranks: Any, generator: Any) -> None:
    made = generator(EmbeddingBagConfig(**TABLES[0]), Topology(ranks.world_size))
    plan = ShardingPlan({"": EmbeddingModuleShardingPlan({"movies": made})}).to_json()
    told = ranks.run(hot_jobs.random_weights, plan, TABLES[0])
    (name,) = told[0]
    assert told[0][name].unique().numel() > 9
    assert all(torch.equal(held[name], told[0][name]) for held in told)


def test_with_skewed_ids_fewer_bytes_travel_and_ranks_look_up_as_much(ranks: Any) -> None:
    """Sequences: a hot id's row stays home both ways. Pooled: its id does, and rank 0 no longer serves them all."""
    world = ranks.world_size
    table = {"name": "things", "num_embeddings": 4000, "embedding_dim": 16, "feature_names": ["seen"]}
    steps = zipf_steps([table], world, 2, 300, longest=20)
    found: dict[tuple[bool, str], tuple[int, int, float]] = {}
    for sequence in (True, False):
        for name, generator in (("rows", row_wise()), ("hot", flex_shard(hot_rows=100))):
            case = Case([table], named(generator, [table], world), steps, sequence=sequence)
            told = ranks.run(hot_jobs.traced_step, case)
            load = [own.looked_up for own in told]
            ids = sum(own.bytes_sent["input_dist/ids"] for own in told)
            total = sum(sum(own.bytes_sent.values()) for own in told)
            found[sequence, name] = ids, total, max(load) / (sum(load) / world)
    assert found[True, "hot"][1] < 0.5 * found[True, "rows"][1]
    assert found[False, "hot"][0] < 0.7 * found[False, "rows"][0]
    for sequence in (True, False):
        assert found[sequence, "rows"][2] > 0.9 * world  # rank 0 serves nearly all
        assert found[sequence, "hot"][2] < 1.5
