"""Ranks of shards: where a partitioner places them."""

from typing import Any

from torchrec.distributed.planner.partitioners import (
    GreedyPerfPartitioner,
    MemoryBalancedPartitioner,
    SortBy,
)
from torchrec.distributed.planner.perf_models import NoopPerfModel
from torchrec.distributed.planner.types import Topology

from tests.compat.parity.case import case
from tests.compat.parity.planner_models import free, option, ranks

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
def full_ranks_are_passed_over() -> Any:
    tables = [option("a", [60], [1.0]), option("b", [50], [1.0]), option("c", [45], [0.1]), option("d", [40], [9.0])]
    return placed(tables, Topology(2, "cuda", hbm_cap=100))


@case(GREEDY)
def node_wise_options_stay_on_a_node() -> Any:
    tables = [
        option("a", [50], [3.0]),
        option("r", [10, 10], [1.0, 2.0], "table_row_wise", "host"),
        option("c", [8, 8, 8], [1.0, 1.0, 1.0], "table_column_wise", "host"),
        option("d", [9, 9], [1.0, 1.0], "table_row_wise", "host"),
    ]
    return placed(tables, Topology(4, "cuda", hbm_cap=100, local_world_size=2))


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
