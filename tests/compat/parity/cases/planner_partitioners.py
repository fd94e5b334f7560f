"""Ranks of shards: where a partitioner places them."""

from copy import deepcopy
from typing import Any

from torchrec.distributed.planner.partitioners import (
    GreedyPerfPartitioner,
    MemoryBalancedPartitioner,
    OrderedDeviceHardware,
    ShardingOptionGroup,
    SortBy,
)
from torchrec.distributed.planner.perf_models import NoopPerfModel, NoopStorageModel
from torchrec.distributed.planner.types import DeviceHardware, Partitioner, Perf, PerfModel, Storage, Topology

from tests.compat.parity.case import case, raised
from tests.compat.parity.planner_models import bags, enumerated, free, kind, limits, option, ranks

P = "torchrec.distributed.planner.partitioners."
GREEDY = P + "GreedyPerfPartitioner"


def placed(options: Any, topology: Any, partitioner: Any = None) -> Any:
    partitioner = partitioner or GreedyPerfPartitioner()
    return ranks(partitioner.partition(proposal=options, storage_constraint=topology)), free(topology)


@case(GREEDY, P + "SortBy")
def largest_or_slowest_first() -> Any:
    tables = [("a", [10], [5.0]), ("b", [30], [1.0]), ("c", [20], [4.0]), ("d", [25], [2.0]), ("e", [5], [9.0])]
    return [
        placed([option(*table) for table in tables], Topology(2, "cuda", hbm_cap=100), GreedyPerfPartitioner(sort_by))
        for sort_by in (SortBy.STORAGE, SortBy.PERF)
    ]


@case(GREEDY)
def shards_of_a_table_go_to_the_least_busy_ranks() -> Any:
    tables = [option("a", [10, 10, 10], [1.0, 3.0, 2.0]), option("b", [8, 8], [1.0, 1.0])]
    return placed(tables, Topology(3, "cuda", hbm_cap=100))


@case(GREEDY)
def full_ranks_are_passed_over() -> Any:
    tables = [option("a", [60], [1.0]), option("b", [50], [1.0]), option("c", [45], [0.1]), option("d", [40], [9.0])]
    return placed(tables, Topology(2, "cuda", hbm_cap=100))


@case(GREEDY)
def what_fits_nowhere_is_refused() -> Any:
    topology = Topology(2, "cuda", hbm_cap=100)
    return [
        kind(lambda: placed([option("a", [101], [1.0])], deepcopy(topology))),
        kind(
            lambda: placed(
                [option("a", [60], [1.0]), option("b", [60], [1.0]), option("c", [60], [1.0])], deepcopy(topology)
            )
        ),
        kind(lambda: placed([option("a", [10, 101], [1.0, 1.0], "row_wise", "uniform")], deepcopy(topology))),
        kind(lambda: placed([option("a", [10], [1.0], "row_wise", "uniform")], deepcopy(topology))),
        kind(lambda: placed([option("a", [60, 60, 60], [1.0] * 3, "table_row_wise", "host")], deepcopy(topology))),
    ]


@case(GREEDY)
def uniform_options_come_first() -> Any:
    tables = [option("a", [50], [1.0]), option("r", [10, 10, 10], [2.0, 1.0, 0.0], "row_wise", "uniform")]
    return placed(tables, Topology(3, "cuda", hbm_cap=100))


@case(GREEDY)
def node_wise_options_stay_on_a_node() -> Any:
    tables = [
        option("a", [50], [3.0]),
        option("r", [10, 10], [1.0, 2.0], "table_row_wise", "host"),
        option("c", [8, 8, 8], [1.0, 1.0, 1.0], "table_column_wise", "host"),
        option("d", [9, 9], [1.0, 1.0], "table_row_wise", "host"),
    ]
    return placed(tables, Topology(4, "cuda", hbm_cap=100, local_world_size=2))


@case(GREEDY)
def a_full_node_is_passed_over() -> Any:
    tables = [
        option("a", [90], [0.0]),
        option("r", [30, 30], [1.0, 1.0], "table_row_wise", "host"),
        option("s", [30, 30], [9.0, 9.0], "table_row_wise", "host"),
        option("u", [40, 40], [0.1, 0.1], "table_row_wise", "host"),
    ]
    return placed(tables, Topology(4, "cuda", hbm_cap=100, local_world_size=2))


@case(GREEDY)
def grids_span_nodes() -> Any:
    topology = Topology(4, "cuda", local_world_size=2)
    module = bags((99, 256), (50, 128))
    options = enumerated(module, limits("grid_shard", "fused", min_partition=128), topology)
    return ranks(GreedyPerfPartitioner().partition(options, topology))


@case(GREEDY)
def dependent_tables_are_placed_together() -> Any:
    tables = [
        option("a", [10, 10], [1.0, 1.0], "table_row_wise", "host", dependency="x"),
        option("b", [30, 30], [3.0, 3.0], "table_row_wise", "host"),
        option("c", [10, 10], [1.0, 1.0], "table_row_wise", "host", dependency="x"),
    ]
    return placed(tables, Topology(4, "cuda", hbm_cap=100, local_world_size=2))


@case(GREEDY)
def modules_are_balanced_on_request() -> Any:
    tables = [("a", [40], [4.0], "m"), ("b", [30], [3.0], "m"), ("c", [20], [2.0], "m"), ("d", [10], [1.0], "n")]
    return [
        placed(
            [option(name, hbm, ms, path=path) for name, hbm, ms, path in tables],
            Topology(2, "cuda", hbm_cap=100),
            GreedyPerfPartitioner(balance_modules=balance),
        )
        for balance in (False, True)
    ]


@case(GREEDY)
def memory_per_device_may_be_given() -> Any:
    topology = Topology(2, "cuda", hbm_cap=100)
    tables = [option("a", [40], [1.0]), option("b", [30], [9.0]), option("c", [10], [1.0])]
    found = ranks(GreedyPerfPartitioner().partition(tables, topology, hbm_per_device=50))
    return found, kind(lambda: GreedyPerfPartitioner().partition(tables, Topology(2, "cuda"), hbm_per_device=39))


@case(GREEDY)
def enumerated_options_are_placed() -> Any:
    topology = Topology(4, "cuda", local_world_size=2)
    module, found = bags((1000, 128), (3000, 128), (500, 256), (100, 64)), []
    names = tuple(f"t{n}" for n in range(4))
    for scheme in ("table_wise", "column_wise", "table_row_wise", "table_column_wise", "row_wise"):
        options = enumerated(module, limits(scheme, "fused", names), topology)
        found.append(ranks(GreedyPerfPartitioner(SortBy.PERF).partition(options, deepcopy(topology))))
    return found


@case(P + "MemoryBalancedPartitioner")
def memory_is_balanced_within_a_tolerance() -> Any:
    tables = [("a", [40], [1.0]), ("b", [30], [1.0]), ("c", [20], [9.0]), ("d", [10], [8.9]), ("e", [10], [0.1])]
    found = []
    for options in ({}, {"tolerance": 0.5}, {"max_search_count": 1}):
        topology = Topology(2, "cuda", hbm_cap=1000)
        plan = MemoryBalancedPartitioner(**options).partition([option(*table) for table in tables], topology)
        loads = [0, 0]
        for one in plan:
            loads[one.shards[0].rank] += one.shards[0].storage.hbm
        found.append([sorted(loads), NoopPerfModel(topology).rate(plan) <= 10.1 * 1.5])
    return found


@case(P + "MemoryBalancedPartitioner")
def memory_balancing_refuses_what_does_not_fit() -> Any:
    return kind(
        lambda: MemoryBalancedPartitioner().partition([option("a", [9], [1.0])], Topology(1, "cuda", hbm_cap=8))
    )


@case(P + "OrderedDeviceHardware", P + "ShardingOptionGroup")
def devices_compare_by_time() -> Any:
    def device(rank: int, ms: float) -> Any:
        return OrderedDeviceHardware(DeviceHardware(rank, Storage(1, 1), Perf(ms, 0, 0, 0)), 2)

    order = sorted([device(3, 1.0), device(0, 2.0), device(2, 1.0), device(1, 1.0)])
    group = ShardingOptionGroup([], Storage(1, 2), 3.0, 4)
    return [one.device.rank for one in order], device(0, 1.0) < device(1, 0.5), [group.perf_sum, group.param_count]


@case(
    "torchrec.distributed.planner.perf_models.NoopPerfModel",
    "torchrec.distributed.planner.perf_models.NoopStorageModel",
)
def models_rate_the_busiest_rank() -> Any:
    topology = Topology(2, "cuda", hbm_cap=100)
    plan = GreedyPerfPartitioner().partition([option("a", [50, 20], [1.0, 4.0]), option("b", [10], [2.0])], topology)
    return (
        NoopPerfModel(topology).rate(plan),
        NoopStorageModel(topology).rate(plan),
        raised(PerfModel),
        raised(Partitioner),
    )
