"""Who answers questions about a plan: sharding knows no planner, so the planner leaves what it knows with its plans."""

from typing import TYPE_CHECKING, Any

from recshard_lab.sharding.shard import PlanError

if TYPE_CHECKING:
    from recshard_lab.planner.why import Planned
    from recshard_lab.sharding.plan import ShardingPlan, Tables


def known(plan: "ShardingPlan", planner: Any, tables: "Tables | None") -> "Planned":
    """What `planner` knows of a plan, or the one that made it.

    Raises:
        PlanError: no planner made it and none is given.
    """
    if planner is not None:
        if not callable(getattr(planner, "knows", None)):
            raise PlanError(f"planner must be an EmbeddingShardingPlanner, got {planner!r}")
        found: Planned = planner.knows(plan, tables)
        return found
    if plan.planned is None:
        raise PlanError(
            "no planner made this plan, so nothing is known of its tables, ranks and batches. Fix: pass "
            "planner=EmbeddingShardingPlanner(...), tables=[...]"
        )
    return plan.planned
