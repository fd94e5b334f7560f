"""How long the planner takes for 1,000 tables on 64 and 2,048 ranks."""

from __future__ import annotations

from benchmarks import Figure, plan

SIZES = ((1_000, 64), (1_000, 2_048))
TARGETS = {plan.name_of(1_000, 64): 2_000.0, plan.name_of(1_000, 2_048): 30_000.0}


def figures() -> list[Figure]:
    """As `benchmarks.plan.times` has them."""
    return plan.times(SIZES)
