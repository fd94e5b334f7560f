"""The Pareto frontier: points that no other point beats in all objectives."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from recshard_lab.planner.workload import Array
from recshard_lab.sharding.plan.types import nearest

# objective -> 1 if less is better, -1 if more is better
OBJECTIVES: dict[str, int] = {
    "world_size": 1,
    "step_ms": 1,
    "samples_per_s": -1,
    "samples_per_s_per_rank": -1,
    "hbm_cap": 1,
    "memory_bytes": 1,
    "batch_size": -1,
    "global_batch_size": -1,
}


def check_objectives(names: Sequence[str]) -> tuple[str, ...]:
    """The names as a tuple.

    Raises:
        ValueError: an unknown name, or no name.
    """
    for name in names:
        if not isinstance(name, str) or name not in OBJECTIVES:
            raise ValueError(
                f"no objective is named {name!r:.60}{nearest(str(name), OBJECTIVES)}. Fix: use one of "
                f"{', '.join(OBJECTIVES)}"
            )
    if not names:
        raise ValueError(f"pareto needs at least one objective. Fix: use one of {', '.join(OBJECTIVES)}")
    return tuple(names)


def undominated(values: Array) -> NDArray[np.bool_]:
    """``[n]`` True for each point that no other point dominates: as good in all columns and better in one.

    Args:
        values: ``[n, d]``, less is better. A point with a NaN is dominated by definition.

    >>> undominated(np.array([[1.0, 5.0], [2.0, 2.0], [3.0, 3.0], [1.0, 5.0]])).tolist()
    [True, True, False, True]
    """
    known = np.asarray(~np.isnan(values).any(axis=1))
    kept = known.copy()
    for i in np.flatnonzero(known):
        no_worse = (values[known] <= values[i]).all(axis=1)
        better = (values[known] < values[i]).any(axis=1)
        kept[i] = not (no_worse & better).any()
    return kept
