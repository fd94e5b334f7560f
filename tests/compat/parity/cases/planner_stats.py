"""The planner's loop over parts of the user, reservations, checks and reports."""

from typing import Any

from torchrec.distributed.planner import EmbeddingShardingPlanner as FromPackage
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.planners import (
    EmbeddingShardingPlanner,
)
from torchrec.distributed.planner.proposers import GreedyProposer
from torchrec.distributed.planner.stats import (
    NoopEmbeddingStats,
)
from torchrec.distributed.planner.storage_reservations import (
    FixedAbsoluteStorageReservation,
    FixedPercentageStorageReservation,
    HeuristicalStorageReservation,
    InferenceStorageReservation,
    StorageReservationType,
)
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    Partitioner,
    Proposer,
    StorageReservation,
    Topology,
)

from tests.compat.parity.case import case
from tests.compat.parity.planner_models import Model, free, kind, limits, sharders

L = "torchrec.distributed.planner.planners."
R = "torchrec.distributed.planner.storage_reservations."
S = "torchrec.distributed.planner.stats."
T = "torchrec.distributed.planner.types."
GIB = 1 << 30


def shown(plan: Any) -> Any:
    return {
        path: {
            name: [
                str(getattr(one.sharding_type, "value", one.sharding_type)),
                str(getattr(one.compute_kernel, "value", one.compute_kernel)),
                one.ranks,
                None
                if one.sharding_spec is None
                else [
                    [s.shard_offsets, s.shard_sizes, str(s.placement)]
                    for s in one.sharding_spec.shards
                    if 0 not in s.shard_sizes
                ],
            ]
            for name, one in tables.items()
        }
        for path, tables in sorted(plan.plan.items())
    }


def planner(**parts: Any) -> Any:
    parts.setdefault("topology", Topology(2, "cuda", hbm_cap=GIB))
    return EmbeddingShardingPlanner(debug=False, **parts)


class RowsFirst(Proposer):
    """Proposes one plan: row-wise with kernel fused."""

    def load(self, search_space: Any, enumerator: Any = None) -> None:
        self.plan = [o for o in search_space if (o.sharding_type, o.compute_kernel) == ("row_wise", "fused")]
        self.heard: list[Any] = []

    def propose(self) -> Any:
        return None if self.heard else self.plan

    def feedback(
        self, partitionable: bool, plan: Any = None, perf_rating: Any = None, storage_constraint: Any = None
    ) -> None:
        self.heard.append([partitionable, len(plan or []), None if perf_rating is None else perf_rating > 0])


@case(L + "EmbeddingShardingPlanner", T + "Proposer")
def a_proposer_of_the_user_makes_the_plan() -> Any:
    proposer = RowsFirst()
    return shown(planner(proposer=proposer).plan(Model(), sharders())), proposer.heard


class LastRank(Partitioner):
    """Places every shard on the last rank."""

    def partition(self, proposal: Any, storage_constraint: Any) -> Any:
        for option in proposal:
            for shard in option.shards:
                shard.rank = storage_constraint.world_size - 1
        return proposal


@case(L + "EmbeddingShardingPlanner", T + "Partitioner")
def a_partitioner_of_the_user_places_shards() -> Any:
    constraints = limits("table_wise", "fused")
    return shown(planner(partitioner=LastRank(), constraints=constraints).plan(Model(), sharders()))


class Few(EmbeddingEnumerator):
    def enumerate(self, module: Any, sharders: Any) -> Any:
        return [o for o in super().enumerate(module, sharders) if o.sharding_type == "table_row_wise"]


@case(L + "EmbeddingShardingPlanner", "torchrec.distributed.planner.enumerators.EmbeddingEnumerator")
def an_enumerator_of_the_user_lists_options() -> Any:
    topology = Topology(4, "cuda", local_world_size=2)
    constraints = {name: ParameterConstraints(compute_kernels=["fused"]) for name in ("t0", "t1")}
    made = EmbeddingShardingPlanner(topology=topology, enumerator=Few(topology, 64, constraints), debug=False)
    return shown(made.plan(Model(), sharders()))


@case(L + "EmbeddingShardingPlanner", "torchrec.distributed.planner.EmbeddingShardingPlanner")
def parts_by_position() -> Any:
    topology, proposer = Topology(2, "cuda", hbm_cap=GIB), RowsFirst()
    made = FromPackage(
        topology,
        32,
        None,
        FixedPercentageStorageReservation(0.1),
        proposer,
        GreedyPerfPartitioner(),
        None,
        NoopEmbeddingStats(),
        None,
        False,
    )
    return shown(made.plan(Model(), sharders())), FromPackage is EmbeddingShardingPlanner


@case(L + "EmbeddingShardingPlanner", T + "PlannerErrorType")
def plans_that_do_not_fit_are_refused() -> Any:
    constraints, small = limits("table_wise", "fused"), Topology(2, "cuda", hbm_cap=300_000, ddr_cap=10)
    return [
        kind(lambda: planner(topology=small, constraints=constraints).plan(Model(), sharders())),
        kind(
            lambda: planner(topology=small, constraints=constraints, proposer=GreedyProposer()).plan(
                Model(), sharders()
            )
        ),
    ]


class Half(StorageReservation):
    _last: Any = None

    def reserve(self, topology: Any, batch_size: int, module: Any, sharders: Any, constraints: Any = None) -> Any:
        from copy import deepcopy

        self._last = deepcopy(topology)
        self._last.devices[0].storage.hbm = 0
        return self._last

    @property
    def last_reserved_topology(self) -> Any:
        return self._last


@case(L + "EmbeddingShardingPlanner", T + "StorageReservation")
def a_reservation_of_the_user_leaves_memory_free() -> Any:
    parts = {"storage_reservation": Half(), "constraints": limits("table_wise", "fused")}
    return shown(planner(**parts).plan(Model(), sharders()))


def reserved(reservation: Any, device: str = "cuda", constraints: Any = None, cap: int = 1_000_000) -> Any:
    topology = Topology(2, device, hbm_cap=cap, ddr_cap=2_000_000)
    before = reservation.last_reserved_topology
    made = reservation.reserve(
        topology=topology, batch_size=64, module=Model(), sharders=sharders(), constraints=constraints
    )
    last = reservation.last_reserved_topology
    return before is None, free(made), free(topology), free(last) == free(made)


@case(R + "FixedPercentageStorageReservation", R + "FixedAbsoluteStorageReservation", R + "StorageReservationType")
def fixed_reservations() -> Any:
    return [
        [reserved(FixedPercentageStorageReservation(percentage=0.25), device) for device in ("cuda", "cpu")],
        [
            reserved(FixedAbsoluteStorageReservation(hbm_reserved_bytes=1234)),
            reserved(FixedAbsoluteStorageReservation(10**9)),
        ],
        reserved(FixedAbsoluteStorageReservation.from_gb(0.0005)),
        {kind.name: kind.value for kind in StorageReservationType},
    ]


@case(R + "HeuristicalStorageReservation", R + "InferenceStorageReservation")
def heuristical_reservations() -> Any:
    limit = {"t0": ParameterConstraints(pooling_factors=[2.0, 3.0], num_poolings=[1.0, 2.0], batch_sizes=[3, 4])}
    made = [
        HeuristicalStorageReservation(0.1),
        HeuristicalStorageReservation(percentage=0.1, parameter_multiplier=2.0),
        HeuristicalStorageReservation(0.0, dense_tensor_estimate=5000),
        InferenceStorageReservation(0.1),
        InferenceStorageReservation(0.0, 100),
    ]
    return [reserved(one, device, limit) for one in made for device in ("cuda", "cpu")]
