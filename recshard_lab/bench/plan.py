"""How long the planner takes: 26 tables on 8 ranks."""

from __future__ import annotations

import random

from recshard_lab.bench import Figure, median_ms
from recshard_lab.embedding import EmbeddingBagConfig
from recshard_lab.planner import EmbeddingShardingPlanner, estimate
from recshard_lab.sharding import Topology

TABLES, RANKS = 26, 8


def criteo_like(count: int = TABLES, seed: int = 0) -> list[EmbeddingBagConfig]:
    """Tables of dim 64 whose row counts are spread evenly over the magnitudes from 1e3 to 2e7, as in ads."""
    draw = random.Random(seed)
    return [
        EmbeddingBagConfig(
            name=f"t{i}", num_embeddings=int(10 ** draw.uniform(3, 7.3)), embedding_dim=64, feature_names=[f"f{i}"]
        )
        for i in range(count)
    ]


def figures() -> list[Figure]:
    """A planner is made anew for each plan: nothing is remembered from the one before."""
    tables, topology = criteo_like(), Topology(RANKS, compute_device="cuda", hbm_cap=16 * 1024**3)
    plan = EmbeddingShardingPlanner(topology).plan_tables(tables)
    return [
        Figure(
            f"greedy plan, {TABLES} tables x {RANKS} ranks",
            median_ms(lambda: EmbeddingShardingPlanner(topology).plan_tables(tables)),
            "ms",
            target=50.0,
        ),
        Figure(
            f"estimate of a given plan, {TABLES} tables x {RANKS} ranks",
            median_ms(lambda: estimate(plan, tables, topology)),
            "ms",
        ),
    ]
