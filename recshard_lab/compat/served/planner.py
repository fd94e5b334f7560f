"""``torchrec.distributed.planner``."""

SERVED: dict[str, dict[str, str]] = {
    "torchrec.distributed.planner": {
        "compat.planner": "EmbeddingShardingPlanner",
        "sharding": "ParameterConstraints Topology",
    },
    "torchrec.distributed.planner.planners": {"compat.planner": "EmbeddingShardingPlanner"},
    "torchrec.distributed.planner.storage_reservations": {
        "planner": "FixedPercentageStorageReservation HeuristicalStorageReservation",
    },
    "torchrec.distributed.planner.types": {"sharding": "ParameterConstraints Topology PlannerError=PlanError"},
}
