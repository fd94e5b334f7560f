"""The planner's loop over parts of the user, reservations, checks and reports."""

from typing import Any

from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner as FromPackage
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner, MemoryBalancedPartitioner
from torchrec.distributed.planner.planners import (
    EmbeddingPlannerBase,
    EmbeddingShardingPlanner,
    extract_plan,
    to_sharding_plan,
    validate_compute_kernels,
    validate_modules_inclusion_in_sharding_plan,
    validate_rank_assignment,
)
from torchrec.distributed.planner.proposers import GreedyProposer, UniformProposer
from torchrec.distributed.planner.stats import (
    IMBALANCE_STAT_MEASURE,
    MIN_WIDTH,
    EmbeddingStats,
    NoopEmbeddingStats,
    round_to_one_sigfig,
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
    PerfModel,
    PlanLoader,
    Proposer,
    Stats,
    StorageReservation,
    Topology,
    hash_planner_context_inputs,
    hash_planner_context_inputs_str,
)
from torchrec.distributed.types import ShardingPlan

from tests.compat.parity.case import case, on_ranks, raised
from tests.compat.parity.planner_models import Model, bags, enumerated, free, kind, limits, listed, sharders

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


class Widest(PerfModel):
    """Prefers plans with the most shards."""

    def rate(self, plan: Any) -> float:
        return float(-sum(option.num_shards for option in plan))


@case(L + "EmbeddingShardingPlanner", T + "PerfModel")
def a_performance_model_of_the_user_chooses() -> Any:
    constraints = {name: ParameterConstraints(compute_kernels=["fused"]) for name in ("t0", "t1")}
    plan = planner(performance_model=Widest(), constraints=constraints).plan(Model(), sharders())
    return {name: len(one.ranks) for name, one in plan.plan["bags"].items()}


class Few(EmbeddingEnumerator):
    def enumerate(self, module: Any, sharders: Any) -> Any:
        return [o for o in super().enumerate(module, sharders) if o.sharding_type == "table_row_wise"]


@case(L + "EmbeddingShardingPlanner", "torchrec.distributed.planner.enumerators.EmbeddingEnumerator")
def an_enumerator_of_the_user_lists_options() -> Any:
    topology = Topology(4, "cuda", local_world_size=2)
    constraints = {name: ParameterConstraints(compute_kernels=["fused"]) for name in ("t0", "t1")}
    made = EmbeddingShardingPlanner(topology=topology, enumerator=Few(topology, 64, constraints), debug=False)
    return shown(made.plan(Model(), sharders()))


@case(L + "EmbeddingShardingPlanner")
def callbacks_change_the_plan() -> Any:
    def swapped(options: Any) -> Any:
        for option in options:
            for shard in option.shards:
                shard.rank = 1 - shard.rank
        return options

    parts = {"constraints": limits("column_wise", "fused"), "proposer": GreedyProposer()}
    plain, changed = (
        planner(callbacks=callbacks, **parts).plan(Model(), sharders()) for callbacks in (None, [swapped])
    )
    return [[one.ranks for one in plan.plan["bags"].values()] for plan in (plain, changed)]


class Kept(Stats):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def log(self, **facts: Any) -> None:
        best = facts["best_plan"]
        self.seen.append(
            {
                "names": sorted(facts),
                "batch": facts["batch_size"],
                "counts": [facts["num_proposals"] > 0, facts["num_plans"] > 0, facts["run_time"] > 0],
                "plan": sorted([o.name, o.sharding_type, sorted(s.rank for s in o.shards)] for o in best),
                "costs": all(shard.perf.total > 0 and shard.storage.hbm > 0 for o in best for shard in o.shards),
            }
        )


@case(L + "EmbeddingShardingPlanner", T + "Stats")
def stats_of_the_user_receive_the_plan() -> Any:
    first, second = Kept(), Kept()
    parts = {"constraints": limits("row_wise", "fused"), "batch_size": 32}
    planner(stats=first, **parts).plan(Model(), sharders())
    planner(stats=[first, second], proposer=UniformProposer(), **parts).plan(Model(), sharders())
    return first.seen, len(second.seen), raised(Stats)


@case(S + "NoopEmbeddingStats", S + "EmbeddingStats", S + "MIN_WIDTH")
def reports_are_written() -> Any:
    for stats in (NoopEmbeddingStats(), EmbeddingStats()):
        planner(stats=stats, proposer=GreedyProposer(), constraints=limits("row_wise", "fused")).plan(
            Model(), sharders()
        )
    return MIN_WIDTH


@case(S + "IMBALANCE_STAT_MEASURE", S + "round_to_one_sigfig")
def measures_of_imbalance() -> Any:
    shares = ([1.0, 2.0, 3.0], [0.2, 0.3, 0.5], [0.0, 0.0, 1.0], [0.5, 0.5], [1.0])
    measured = {name: [measure(p, **more) for p in shares] for name, (measure, more) in IMBALANCE_STAT_MEASURE.items()}
    return measured, [round_to_one_sigfig(x) for x in (0.0, 1.0, 1234.0, 0.0567, 9.99, 15.0, -3.3, 1e-9)]


@case(L + "EmbeddingShardingPlanner")
def constraints_alone_decide_the_plan() -> Any:
    return shown(planner(constraints=limits("row_wise", "fused")).plan(Model(), sharders()))


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


@case(L + "EmbeddingShardingPlanner")
def several_proposers_and_the_memory_balanced_partitioner() -> Any:
    constraints = limits("column_wise", "fused")
    parts = {"proposer": [GreedyProposer(), UniformProposer()], "partitioner": MemoryBalancedPartitioner()}
    return shown(planner(constraints=constraints, **parts).plan(bags((100, 256)), sharders()))


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


@case(L + "EmbeddingShardingPlanner")
def timeouts_must_be_positive() -> Any:
    quick = planner(timeout_seconds=60, proposer=GreedyProposer(), constraints=limits("row_wise", "fused"))
    return (
        raised(lambda: planner(timeout_seconds=0)),
        raised(lambda: planner(timeout_seconds=-1)),
        len(quick.plan(Model(), sharders()).plan),
    )


@case(L + "EmbeddingShardingPlanner", T + "CustomTopologyData")
def ranks_may_have_different_memory() -> Any:
    from torchrec.distributed.planner.types import CustomTopologyData

    data = CustomTopologyData({"hbm_cap": [10_000, 10_000_000]}, 2)
    topology = Topology(2, "cuda", custom_topology_data=data)
    parts = {
        "storage_reservation": FixedPercentageStorageReservation(0.0),
        "constraints": limits("table_wise", "fused"),
    }
    return shown(EmbeddingShardingPlanner(topology=topology, debug=False, **parts).plan(Model(), sharders()))


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


class Loader(PlanLoader):
    def get_plan_id(self) -> str:
        return "p"

    def __init__(self, options: Any, context: Any = None) -> None:
        self.options, self.context = options, context

    def load(self) -> Any:
        return self.options

    def plan_context_hash(self) -> Any:
        return self.context


@case(L + "EmbeddingShardingPlanner", L + "extract_plan", T + "PlanLoader")
def a_loaded_plan_is_used() -> Any:
    constraints, topology = limits("table_wise", "fused"), Topology(2, "cuda", hbm_cap=GIB)
    options = enumerated(Model(), constraints, topology)
    for option in options:
        option.shards[0].rank = 1
    stored = {option.storage_hash(): option for option in options}
    made = [
        planner(constraints=constraints, plan_loader=Loader(entry)).plan(Model(), sharders())
        for entry in (stored, None)
    ]
    wrong = planner(constraints=constraints, plan_loader=Loader(stored, "x"))
    return [
        shown(made[0]),
        sorted(made[1].plan["bags"]),
        kind(lambda: wrong.plan(Model(), sharders())),
        [[s.rank for s in o.shards] for o in extract_plan(enumerated(Model(), constraints, topology), stored)],
    ]


@case(L + "to_sharding_plan", L + "validate_rank_assignment")
def options_become_a_plan() -> Any:
    topology, found = Topology(2, "cuda", hbm_cap=GIB), []
    for scheme, kernel in (("row_wise", "fused"), ("column_wise", "fused_uvm"), ("data_parallel", "dense")):
        options = enumerated(Model((3, 64), (10, 256)), limits(scheme, kernel), topology)
        plan = to_sharding_plan(GreedyPerfPartitioner().partition(options, topology), topology)
        validate_rank_assignment(plan, topology)
        found.append(shown(plan))
    return found


@case(L + "validate_rank_assignment")
def ranks_outside_the_topology_are_refused() -> Any:
    topology = Topology(2, "cuda", hbm_cap=GIB)
    options = enumerated(Model(), limits("table_wise", "fused"), topology)
    for option in options:
        option.shards[0].rank = 5
    return kind(lambda: validate_rank_assignment(to_sharding_plan(options, topology), topology)) != "nothing"


@case(L + "validate_compute_kernels")
def unknown_kernels_are_refused() -> Any:
    options = enumerated(Model(), limits("table_wise", "fused"))
    fine = kind(lambda: validate_compute_kernels(options))
    options[0].compute_kernel = "bogus"
    return fine, kind(lambda: validate_compute_kernels(options))


@case(L + "validate_modules_inclusion_in_sharding_plan")
def missing_modules_are_refused() -> Any:
    plan = planner(constraints=limits("row_wise", "fused")).plan(Model(), sharders())
    check = validate_modules_inclusion_in_sharding_plan
    return [
        kind(lambda: check(plan, Model(), sharders())),
        kind(lambda: check(ShardingPlan({}), Model(), sharders())),
        kind(lambda: check(ShardingPlan({}), Model(), sharders()[1:])),
        kind(
            lambda: check(
                ShardingPlan({}), Model(), sharders(), limits("row_wise", "fused", device_group="cpu"), "cuda"
            )
        ),
    ]


@case(T + "hash_planner_context_inputs", T + "hash_planner_context_inputs_str", L + "EmbeddingShardingPlanner")
def hashes_follow_the_inputs() -> Any:
    def hashed(**parts: Any) -> str:
        made = planner(proposer=GreedyProposer(), **{"constraints": limits("row_wise", "fused"), **parts})
        made.plan(Model(), sharders())
        assert isinstance(made.hash_planner_context_inputs(), int)
        return made.hash_planner_context_inputs_str()

    first = hashed()
    topology = Topology(2, "cuda", hbm_cap=GIB)
    enumerator, reservation = EmbeddingEnumerator(topology, 8), FixedPercentageStorageReservation(0.1)
    return [
        first == hashed(),
        first == hashed(batch_size=3),
        first == hashed(constraints=limits("table_wise", "fused")),
        raised(lambda: hash_planner_context_inputs(topology, 8, enumerator, reservation, None)),
        raised(lambda: hash_planner_context_inputs_str(topology, 8, enumerator, reservation, None)),
        raised(lambda: planner().hash_planner_context_inputs()),
    ]


class OneRank(EmbeddingPlannerBase):
    def collective_plan(self, module: Any, sharders: Any = None, pg: Any = None) -> Any:
        return self.plan(module, sharders)

    def plan(self, module: Any, sharders: Any = None) -> Any:
        topology = Topology(2, "cuda", hbm_cap=GIB)
        options = enumerated(module, limits("table_wise", "fused"), topology)
        return to_sharding_plan(LastRank().partition(options, topology), topology)


@case(L + "EmbeddingPlannerBase", "torchrec.distributed.planner.EmbeddingPlannerBase")
def a_planner_of_the_user() -> Any:
    made = OneRank(topology=Topology(2, "cuda", hbm_cap=GIB), batch_size=8)
    return shown(made.plan(Model(), sharders())), raised(lambda: EmbeddingPlannerBase(topology=Topology(1, "cpu")))


def agreed(rank: int) -> Any:
    made = EmbeddingShardingPlanner(
        topology=Topology(2, "cuda", hbm_cap=GIB), proposer=RowsFirst() if rank == 0 else UniformProposer(), debug=False
    )
    import torch.distributed as dist

    return shown(made.collective_plan(Model(), sharders(), dist.group.WORLD))


@case(L + "EmbeddingShardingPlanner")
def ranks_get_the_plan_of_the_first() -> Any:
    return on_ranks(2, agreed)


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


@case(R + "HeuristicalStorageReservation", R + "InferenceStorageReservation", R + "FixedPercentageStorageReservation")
def reservations_refuse() -> Any:
    return [
        raised(lambda: FixedPercentageStorageReservation(1.5)),
        raised(lambda: FixedAbsoluteStorageReservation(-1)),
        raised(lambda: HeuristicalStorageReservation(2.0)),
        kind(lambda: reserved(HeuristicalStorageReservation(0.1), cap=10)),
        kind(lambda: reserved(InferenceStorageReservation(0.1), cap=10)),
        raised(StorageReservation),
    ]


@case(L + "EmbeddingShardingPlanner")
def a_model_without_tables() -> Any:
    return shown(planner(proposer=GreedyProposer()).plan(nn.Linear(2, 2), sharders()))


@case(L + "EmbeddingShardingPlanner", T + "ShardingOption")
def options_of_the_best_plan_have_costs() -> Any:
    seen: list[Any] = []
    keep = [lambda options: seen.append(listed(options)) or options]
    planner(callbacks=keep, proposer=GreedyProposer(), constraints=limits("column_wise", "fused")).plan(
        Model(), sharders()
    )
    return seen
