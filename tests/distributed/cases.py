"""Models, plans and batches to compare, fixed ones and ones that hypothesis draws."""

import random
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from recshard_lab import EmbeddingBagConfig, ParameterSharding, PoolingType, Shard, ShardingPlan, Topology
from recshard_lab.sharding import EmbeddingModuleShardingPlan
from recshard_lab.sharding.schemes import scheme_named
from tests.distributed.jobs import Bags, Case, Inverse

PATH = "collection"

TABLES: list[dict[str, Any]] = [
    {"name": "movies", "num_embeddings": 37, "embedding_dim": 8, "feature_names": ["liked", "seen"]},
    {"name": "users", "num_embeddings": 101, "embedding_dim": 16, "feature_names": ["user"]},
    {
        "name": "genres",
        "num_embeddings": 5,
        "embedding_dim": 8,
        "feature_names": ["genre"],
        "pooling": PoolingType.MEAN,
    },
    {"name": "wide", "num_embeddings": 3, "embedding_dim": 64, "feature_names": ["age"], "pooling": PoolingType.MEAN},
]


def sequence_tables() -> list[dict[str, Any]]:
    """The same tables without pooling."""
    return [{k: v for k, v in table.items() if k != "pooling"} for table in TABLES]


def plan_of(tables: list[dict[str, Any]], schemes: list[str], world_size: int, kernel: str = "fused") -> ShardingPlan:
    """Table i under ``schemes[i % len(schemes)]``, table-wise ones dealt to the ranks in turn; 4 ranks are 2 nodes."""
    topology = Topology(world_size, local_world_size=2 if world_size == 4 else world_size)
    entries = {}
    for number, table in enumerate(tables):
        config = EmbeddingBagConfig(**table)
        name = schemes[number % len(schemes)]
        ranks = [(number + k) % world_size for k in range(world_size)]
        if name == "table_wise":
            ranks = ranks[:1]
        if name == "column_wise":
            ranks = ranks[: max(1, config.embedding_dim // 4)]
        if name in ("table_row_wise", "table_column_wise"):
            node = number % topology.num_nodes
            ranks = [rank for rank in range(world_size) if topology.node_of(rank) == node]
        if name == "table_column_wise":
            ranks = ranks[: max(1, config.embedding_dim // 4)]
        chosen = None if name in ("data_parallel", "grid_shard") else ranks
        made = scheme_named(name).default(config, topology, chosen)
        entries[config.name] = ParameterSharding(name, kernel, shards=made.shards)
    return ShardingPlan({PATH: EmbeddingModuleShardingPlan(entries)})


def root_plan(tables: list[Any], scheme: str, world_size: int) -> ShardingPlan:
    """Every config of a collection that is the whole model, under one scheme or ("custom") under none's tiling."""
    entries = {}
    for table in tables:
        if scheme == "custom":
            size = {"num_embeddings": table.num_embeddings, "embedding_dim": table.embedding_dim}
            entries[table.name] = pinwheel(size, world_size)
        else:
            shards = scheme_named(scheme).default(table, Topology(world_size), None).shards
            entries[table.name] = ParameterSharding(scheme, shards=shards)
    return ShardingPlan({"": EmbeddingModuleShardingPlan(entries)})


def pinwheel(table: dict[str, Any], world_size: int) -> ParameterSharding:
    """Five rectangles that no sequence of straight cuts makes."""
    rows, cols = table["num_embeddings"], table["embedding_dim"]
    r, c = (rows // 3, 2 * rows // 3), (cols // 4 or 1, cols // 2 + 1)
    rects = [
        ((0, r[0]), (0, c[1])),
        ((0, r[1]), (c[1], cols)),
        ((r[1], rows), (c[0], cols)),
        ((r[0], rows), (0, c[0])),
        ((r[0], r[1]), (c[0], c[1])),
    ]
    return ParameterSharding("custom", shards=[Shard(n % world_size, *rect) for n, rect in enumerate(rects)])


def random_bags(generator: random.Random, tables: list[dict[str, Any]], samples: int) -> Bags:
    """Jagged bags with empty ones, duplicates and both ends of every table."""
    bags: Bags = {}
    for table in tables:
        last = table["num_embeddings"] - 1
        for feature in table["feature_names"]:
            sizes = [generator.choice([0, 0, 1, 2, 5]) for _ in range(samples)]
            bags[feature] = [
                [generator.choice([0, last, generator.randint(0, last)]) for _ in range(size)] for size in sizes
            ]
    return bags


def random_steps(seed: int, tables: list[dict[str, Any]], world_size: int, steps: int, samples: int) -> list[Any]:
    """Step -> rank -> batch; batch sizes differ between ranks and some are empty."""
    generator = random.Random(seed)
    made = []
    for step in range(steps):
        sizes = [samples + (step + rank) % 3 for rank in range(world_size)]
        if world_size > 1 and step % 5 == 4:
            sizes[step % world_size] = 0
        made.append([random_bags(generator, tables, size) for size in sizes])
    return made


def random_inverses(seed: int, steps: list[Any]) -> list[Any]:
    """Makes the batches variable, in place: each feature keeps bags of its own number, which samples share."""
    generator = random.Random(seed)
    made = []
    for ranks in steps:
        inverses: list[Inverse] = []
        for bags in ranks:
            samples = len(next(iter(bags.values())))
            inverse: Inverse = {}
            for feature in bags:
                bags[feature] = bags[feature][: generator.randint(1, max(1, samples))]
                inverse[feature] = [generator.randrange(len(bags[feature])) for _ in range(samples)]
            inverses.append(inverse)
        made.append(inverses)
    return made


def cut(draw: Any, size: int) -> list[tuple[int, int]]:
    """Cuts ``[0, size)`` at up to three places."""
    places = sorted(draw(st.sets(st.integers(1, size - 1), max_size=3))) if size > 1 else []
    edges = [0, *places, size]
    return list(pairwise(edges))


@st.composite
def tilings(draw: Any, table: dict[str, Any], world_size: int) -> ParameterSharding:
    """Any tiling: stripes first one way, then each stripe cut the other way by itself; every rank a replica of all
    rows, or of some stripes of them."""
    rows, cols = table["num_embeddings"], table["embedding_dim"]
    kind = draw(st.sampled_from(["rows_first", "cols_first", "replicas", "pinwheel", "hot", "hot"]))
    if kind == "replicas":
        return ParameterSharding("data_parallel", shards=[Shard(k, (0, rows), (0, cols)) for k in range(world_size)])
    if kind == "pinwheel" and rows >= 3 and cols >= 8:
        return pinwheel(table, world_size)
    if kind == "hot":
        return draw(hot_tilings(table, world_size))
    rects = []
    for stripe in cut(draw, rows if kind == "rows_first" else cols):
        for part in cut(draw, cols if kind == "rows_first" else rows):
            rects.append((stripe, part) if kind == "rows_first" else (part, stripe))
    owners = [draw(st.integers(0, world_size - 1)) for _ in rects]
    return ParameterSharding("custom", shards=[Shard(rank, *rect) for rank, rect in zip(owners, rects, strict=True)])


@st.composite
def hot_tilings(draw: Any, table: dict[str, Any], world_size: int) -> ParameterSharding:
    """Stripes of rows, some of them on every rank, the others cut by columns; shards in any order."""
    shards = []
    for stripe in cut(draw, table["num_embeddings"]):
        if draw(st.booleans()):
            shards += [Shard(rank, stripe, (0, table["embedding_dim"])) for rank in range(world_size)]
        else:
            owner = st.integers(0, world_size - 1)
            shards += [Shard(draw(owner), stripe, part) for part in cut(draw, table["embedding_dim"])]
    return ParameterSharding("custom", shards=draw(st.permutations(shards)))


@st.composite
def cases(draw: Any, world_size: int, sequence: bool = False) -> Case:
    """A small model under a plan nobody would draw, on batches nobody would send."""
    tables = []
    for number in range(draw(st.integers(1, 3))):
        tables.append(
            {
                "name": f"t{number}",
                "num_embeddings": draw(st.sampled_from([1, 2, 3, 7, 30])),
                "embedding_dim": draw(st.sampled_from([1, 4, 6, 8, 32])),
                "feature_names": [f"t{number}f{k}" for k in range(draw(st.integers(1, 2)))],
            }
            | ({} if sequence else {"pooling": draw(st.sampled_from([PoolingType.SUM, PoolingType.MEAN]))})
        )
    plan = ShardingPlan(
        {PATH: EmbeddingModuleShardingPlan({table["name"]: draw(tilings(table, world_size)) for table in tables})}
    )
    steps = []
    for _ in range(2):
        ranks: list[Bags] = []
        for _ in range(world_size):
            samples = draw(st.integers(0, 4))
            bags: Bags = {}
            for table in tables:
                for feature in table["feature_names"]:
                    ids = st.lists(st.integers(0, table["num_embeddings"] - 1), max_size=4)
                    bags[feature] = draw(st.lists(ids, min_size=samples, max_size=samples))
            ranks.append(bags)
        if all(not next(iter(bags.values())) for bags in ranks):  # somebody must have a sample to train on
            ranks[0] = {feature: [[0]] for table in tables for feature in table["feature_names"]}
        steps.append(ranks)
    return Case(
        tables=tables,
        plan=plan.to_json(),
        steps=steps,
        eps=0.01,  # drawn gradients often cancel; a tiny eps would blow their rounding up to whole steps
        optimizer=draw(st.sampled_from(["exact_sgd", "exact_row_wise_adagrad", "exact_adagrad"])),
        sequence=sequence,
        dedup=sequence and draw(st.booleans()),
        weighted=False if sequence else draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )
