"""Relations between plans of related problems on 8 to 512 ranks: a constraint, for example, never shortens a step."""

import pytest

from benchmarks import plan
from recshard_lab.planner import EmbeddingShardingPlanner
from recshard_lab.sharding import ParameterConstraints

TOLERANCE = 1.01


def step_ms(count: int, ranks: int, **constraint: list[str]) -> float:
    """The predicted step of a plan for model 0 of a size, with one constraint on every table."""
    tables, topology, workload = plan.fitting(count, ranks, seed=0)
    constraints = {table.name: ParameterConstraints(**constraint) for table in tables} if constraint else None
    planner = EmbeddingShardingPlanner(topology, constraints=constraints, workload=workload)
    return planner.plan_tables(tables, explain=False).estimate.step_ms


@pytest.mark.parametrize(("count", "ranks"), [(100, 64), (125, 256)])
def test_forbidding_row_wise_never_shortens_the_step(count: int, ranks: int) -> None:
    assert step_ms(count, ranks) <= step_ms(count, ranks, forbidden_sharding_types=["row_wise"]) * TOLERANCE
