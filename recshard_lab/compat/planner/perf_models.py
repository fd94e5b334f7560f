"""Rates plans by their busiest rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from recshard_lab.compat.planner.base import PerfModel
from recshard_lab.compat.planner.options import Shard, ShardingOption
from recshard_lab.compat.planner.topology import Topology


def _largest(plan: list[ShardingOption], cost: Callable[[Shard], float]) -> float:
    """The largest sum of shards' costs on a rank; 0 without shards."""
    totals: dict[int | None, float] = defaultdict(float)
    for option in plan:
        for shard in option.shards:
            totals[shard.rank] += cost(shard)
    return max(totals.values(), default=0.0)


class NoopPerfModel(PerfModel):
    """Rates a plan by the time of its busiest rank, in ms.

    Args:
        topology: the devices.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology

    def rate(self, plan: list[ShardingOption]) -> float:
        """The largest sum of shards' times on a rank; 0 without shards."""
        return _largest(plan, lambda shard: 0.0 if shard.perf is None else shard.perf.total)


class NoopStorageModel(NoopPerfModel):
    """Rates a plan by the device memory of its fullest rank, in bytes.

    Args:
        topology: the devices.
    """

    def rate(self, plan: list[ShardingOption]) -> float:
        """The largest sum of shards' bytes in device memory on a rank; 0 without shards."""
        return _largest(plan, lambda shard: 0.0 if shard.storage is None else shard.storage.hbm)
