"""Every model trains sharded as its plain twin does on one process, and is never whole where it was built on meta."""

from __future__ import annotations

from typing import Any

import pytest

from recshard_lab.sharding import ShardingPlan
from tests.distributed import cases, model_jobs
from tests.distributed.model_jobs import MODELS, TABLES


def plan_of(schemes: list[str], tables: list[dict[str, Any]] = TABLES) -> str:
    plan = cases.plan_of(tables, schemes, 2)
    return ShardingPlan({"embedding_bag_collection": plan.plan[cases.PATH]}).to_json()


def test_two_towers_compete_with_the_candidates_of_all_ranks(two: Any) -> None:
    """In-batch negatives, corrected for frequency: the loss of two ranks is that of one process with both batches."""
    losses, weights = model_jobs.train_towers(None)
    for schemes in (["row_wise"], ["table_wise", "column_wise", "data_parallel"]):
        plan = ShardingPlan({"two_tower.embedding_bag_collection": cases.plan_of(TABLES, schemes, 2).plan[cases.PATH]})
        for ours, found in two.run(model_jobs.train_towers, plan.to_json()):
            assert ours == pytest.approx(losses, rel=1e-5)
            assert set(found) == set(weights)
            for key, weight in weights.items():
                assert (found[key] - weight).abs().max() < 1e-5, key


@pytest.mark.parametrize("name", MODELS)
def test_a_model_on_meta_becomes_shards_and_is_never_whole(two: Any, name: str) -> None:
    """A rank's peak memory grows by what it holds: half of 256 MB."""
    rows = 2_000_000
    large, small = large_tables(rows), large_tables(8)
    plans = [plan_of(["row_wise"], tables) for tables in (large, small)]
    whole = len(large) * rows * 8 * 4
    for grown, held, real in two.run(model_jobs.built_on_meta, name, rows, *plans):
        assert real
        assert held == whole // 2
        assert held * 0.9 < grown < whole * 0.75


def large_tables(rows: int) -> list[dict[str, Any]]:
    return [
        {"name": f"t{n}", "num_embeddings": rows, "embedding_dim": 8, "feature_names": [feature]}
        for n, feature in enumerate(model_jobs.FEATURES)
    ]
