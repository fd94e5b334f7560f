"""Tables and plans that the tests of the lab look at."""

from __future__ import annotations

from recshard_lab.embedding.configs import EmbeddingBagConfig
from recshard_lab.sharding import EmbeddingModuleShardingPlan, ShardingPlan, Topology, scheme_named

MOVIELENS = {"user": 943, "movie": 1682, "age": 7, "gender": 2, "occupation": 21, "genres": 19}
SCHEMES = ("table_wise", "row_wise", "column_wise", "data_parallel")


def table(name: str, rows: int, dim: int = 16) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[f"f_{name}"])


def movielens() -> list[EmbeddingBagConfig]:
    return [table(name, rows) for name, rows in MOVIELENS.items()]


def many(count: int) -> list[EmbeddingBagConfig]:
    """Tables from a thousand to twenty million rows, log-uniform and the same every time."""
    return [
        table(f"t{i:03d}", int(1000 * 20_000 ** (i * 37 % count / count)), (32, 64, 128)[i % 3]) for i in range(count)
    ]


def plan_of(tables: list[EmbeddingBagConfig], world_size: int, schemes: tuple[str, ...] = SCHEMES) -> ShardingPlan:
    """Scheme after scheme, table-wise tables going round the ranks."""
    topology, plan = Topology(world_size), EmbeddingModuleShardingPlan()
    for i, config in enumerate(tables):
        name = schemes[i % len(schemes)]
        ranks = [i % world_size] if name == "table_wise" else None
        plan[config.name] = scheme_named(name).default(config, topology, ranks)
    return ShardingPlan({"": plan})
