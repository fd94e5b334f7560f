"""Hot rows on every rank, the others cut: the unsharded model, replicas alike to the bit, fewer bytes, even loads."""

import random
from typing import Any

import pytest

from recshard_lab import EmbeddingBagConfig, PoolingType, Shard, ShardingPlan, Topology, flex_shard, row_wise
from recshard_lab.sharding import EmbeddingModuleShardingPlan, tiling
from tests.distributed import cases, hot_jobs
from tests.distributed.jobs import Case
from tests.distributed.test_parity import OPTIMIZERS, check
from tests.grid import on_ranks

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


@on_ranks(2, 3, optimizer=[*OPTIMIZERS, "exact_adagrad"], kind=["pooled", "weighted", "sequence"])
def test_hot_rows_everywhere_equal_the_unsharded_model(ranks: Any, optimizer: str, kind: str) -> None:
    world, sequence = ranks.world_size, kind == "sequence"
    tables = [{k: v for k, v in table.items() if k != "pooling" or not sequence} for table in TABLES]
    steps = zipf_steps(tables, world, steps=8, samples=7)
    plan = hot_plan(tables, world)
    check(Case(tables, plan, steps, optimizer, weighted=kind == "weighted", sequence=sequence), ranks)


@pytest.mark.parametrize("route", ["reduce_scatter", "two_hop", "distinct_rows"])
def test_what_is_no_replica_may_come_home_by_any_route(ranks: Any, route: str) -> None:
    world = ranks.world_size
    plan = ShardingPlan.from_json(hot_plan(TABLES, world)).with_route(route)
    check(Case(TABLES, plan.to_json(), zipf_steps(TABLES, world, 4, 7), "exact_row_wise_adagrad"), ranks)


@on_ranks(2, 3)
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
            load = [looked_up for _, looked_up in told]
            ids = sum(sent["input_dist/ids"] for sent, _ in told)
            total = sum(sum(sent.values()) for sent, _ in told)
            found[sequence, name] = ids, total, max(load) / (sum(load) / world)
    assert found[True, "hot"][1] < 0.5 * found[True, "rows"][1]
    assert found[False, "hot"][0] < 0.7 * found[False, "rows"][0]
    for sequence in (True, False):
        assert found[sequence, "rows"][2] > 0.9 * world  # rank 0 serves nearly all
        assert found[sequence, "hot"][2] < 1.5
