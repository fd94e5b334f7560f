"""Proposals: which options a proposer combines, and in which order."""

from typing import Any

from torchrec.distributed.planner.proposers import (
    MAX_PROPOSALS,
    DynamicProgrammingProposer,
    GreedyProposer,
    GridSearchProposer,
    UniformProposer,
)
from torchrec.distributed.planner.types import Proposer, Topology

from tests.compat.parity.case import case, raised
from tests.compat.parity.planner_models import option

P = "torchrec.distributed.planner.proposers."


def space() -> Any:
    """Two tables with three options each."""
    return [
        option("a", [50], [1.0], "table_wise"),
        option("a", [30, 30], [1.5, 0.25], "column_wise"),
        option("a", [9], [4.0], "table_wise", kernel="fused_uvm"),
        option("b", [80], [2.0], "table_wise"),
        option("b", [45, 45], [0.9, 0.9], "column_wise"),
        option("b", [8], [9.0], "table_wise", kernel="fused_uvm"),
        option("b", [80, 80], [3.0, 3.0], "data_parallel", "uniform", "dense"),
    ]


def proposals(proposer: Any, ratings: Any = (), options: Any = None, topology: Any = None, fits: bool = True) -> Any:
    proposer.load(space() if options is None else options)
    found, ratings = [], iter(ratings)
    proposal = proposer.propose()
    while proposal is not None and len(found) < 60:
        found.append([f"{o.name} {o.sharding_type} {o.compute_kernel}" for o in proposal])
        proposer.feedback(
            partitionable=fits, plan=proposal, perf_rating=next(ratings, 1.0), storage_constraint=topology
        )
        proposal = proposer.propose()
    return found


@case(P + "GreedyProposer")
def greedy_moves_the_largest_table() -> Any:
    return (
        proposals(GreedyProposer()),
        proposals(GreedyProposer(use_depth=False)),
        proposals(GreedyProposer(), fits=False),
    )


@case(P + "UniformProposer")
def uniform_has_one_scheme_for_all() -> Any:
    return (
        proposals(UniformProposer()),
        proposals(UniformProposer(use_depth=False)),
        proposals(UniformProposer(), fits=False),
    )


@case(P + "GridSearchProposer", P + "MAX_PROPOSALS")
def grid_search_has_all_combinations() -> Any:
    return (
        proposals(GridSearchProposer()),
        proposals(GridSearchProposer(max_proposals=11)),
        len(proposals(GridSearchProposer(12))),
        MAX_PROPOSALS,
    )


@case(P + "DynamicProgrammingProposer")
def dynamic_programming_goes_through_memory() -> Any:
    return [
        proposals(DynamicProgrammingProposer(bins), topology=Topology(2, "cuda", hbm_cap=cap))
        for bins, cap in ((100, 100), (50, 100), (100, 60), (100, 40))
    ]


@case("torchrec.distributed.planner.types.Proposer")
def a_proposer_is_abstract() -> Any:
    return raised(Proposer)
