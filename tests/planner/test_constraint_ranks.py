"""Ranks of a constraint that the topology does not have: the error names the table, the argument and the rank."""

import pytest

from recshard_lab import EmbeddingBagConfig, EmbeddingShardingPlanner, ParameterConstraints, PlanError, Topology

TABLE = EmbeddingBagConfig(100, 8, name="movies", feature_names=["seen"])


@pytest.mark.parametrize("name", ["ranks", "forbidden_ranks"])
def test_a_rank_that_does_not_exist_is_named(name: str) -> None:
    planner = EmbeddingShardingPlanner(Topology(2), constraints={"movies": ParameterConstraints(**{name: [0, 9]})})
    said = rf"table 'movies': {name}=\[0, 9\]: rank 9 does not exist with world_size 2. Fix: use ranks below 2"
    with pytest.raises(PlanError, match=said):
        planner.plan_tables([TABLE])
