"""TorchRec's EmbeddingShardingPlanner: its arguments in its order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recshard_lab.planner import EmbeddingShardingPlanner as _Planner
from recshard_lab.planner.parts import StorageReservation
from recshard_lab.sharding import ParameterConstraints, Topology

_NEAREST = {
    "enumerator": "constraints={table: ParameterConstraints(sharding_types=[...])}",
    "proposer": "proposers=[...] of recshard_lab.EmbeddingShardingPlanner",
    "partitioner": "ParameterConstraints(ranks=[...])",
    "performance_model": "rater=... of recshard_lab.EmbeddingShardingPlanner",
    "stats": "reporters=[...] of recshard_lab.EmbeddingShardingPlanner",
    "callbacks": "constraints={table: ParameterConstraints(...)}",
    "timeout_seconds": "time_limit_s=... of recshard_lab.EmbeddingShardingPlanner",
    "plan_loader": "ShardingPlan.from_json(...), or recshard_lab.compat.from_torchrec(plan)",
}


class EmbeddingShardingPlanner(_Planner):
    """`recshard_lab.EmbeddingShardingPlanner` with the arguments of TorchRec, in its order.

    Args:
        topology, batch_size, storage_reservation, constraints, debug: as there. `debug` prints the plan's costs.
        enumerator, proposer, partitioner, performance_model, stats, callbacks, timeout_seconds, plan_loader: None. The
            planner does not have these parts.
        options: further arguments of this library's planner.

    Raises:
        ValueError: one of these parts is not None.

    >>> planner = EmbeddingShardingPlanner(Topology(2, "cpu"), 64, None, None, None, None, None, None, {}, False)
    >>> planner.workload.batch_size
    64
    """

    def __init__(
        self,
        topology: Topology | None = None,
        batch_size: int | None = None,
        enumerator: Any = None,
        storage_reservation: StorageReservation | None = None,
        proposer: Any = None,
        partitioner: Any = None,
        performance_model: Any = None,
        stats: Any = None,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        debug: bool = False,
        callbacks: Any = None,
        timeout_seconds: int | None = None,
        plan_loader: Any = None,
        **options: Any,
    ) -> None:
        parts = locals()
        for name, nearest in _NEAREST.items():
            if parts[name] is not None:
                raise ValueError(
                    f"EmbeddingShardingPlanner got {name}={type(parts[name]).__name__}, which recshard_lab does not "
                    f"support. Fix: leave it out. Nearest here: {nearest}"
                )
        super().__init__(
            topology,
            batch_size,
            constraints=constraints,
            storage_reservation=storage_reservation,
            debug=debug,
            **options,
        )
