"""Proposals: which options a proposer combines, and in which order."""

from typing import Any

import torch
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.proposers import (
    MAX_PROPOSALS,
    DynamicProgrammingProposer,
    EmbeddingOffloadScaleupProposer,
    GreedyProposer,
    GridSearchProposer,
    UniformProposer,
    proposers_to_proposals_list,
)
from torchrec.distributed.planner.shard_estimators import EmbeddingOffloadStats
from torchrec.distributed.planner.types import ParameterConstraints, Proposer, Topology
from torchrec.distributed.types import CacheParams

from tests.compat.parity.case import case, raised
from tests.compat.parity.planner_models import bags, limits, option, sharders

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


@case(P + "GreedyProposer")
def greedy_stops_at_its_threshold() -> Any:
    return [proposals(GreedyProposer(threshold=limit), [3.0, 4.0, 2.0, 5.0, 6.0, 7.0]) for limit in (0, 1, 2, None)]


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


@case(P + "DynamicProgrammingProposer")
def dynamic_programming_needs_devices() -> Any:
    return raised(lambda: proposals(DynamicProgrammingProposer(), topology=None))


@case(P + "proposers_to_proposals_list")
def proposals_of_several_proposers() -> Any:
    found = proposers_to_proposals_list([GreedyProposer(), UniformProposer(), GridSearchProposer(3)], space())
    return [[f"{o.name} {o.sharding_type} {o.compute_kernel}" for o in proposal] for proposal in found]


@case(P + "GreedyProposer", P + "UniformProposer", P + "GridSearchProposer")
def a_proposer_may_be_loaded_again() -> Any:
    found = []
    for proposer in (GreedyProposer(), UniformProposer(), GridSearchProposer()):
        first = proposals(proposer)
        found.append(first == proposals(proposer))
    return found


@case("torchrec.distributed.planner.types.Proposer")
def a_proposer_is_abstract() -> Any:
    return raised(Proposer)


OFFLOAD = EmbeddingOffloadScaleupProposer


def cached(stats: bool = True) -> Any:
    """Enumerator and options of two cached tables."""
    made = {}
    for name, share, cost, lookups, rows in (("t0", 0.1, 0.3, 1000, 10_000), ("t1", 0.2, 0.5, 500, 20_000)):
        curve = EmbeddingOffloadStats(cost, lookups, torch.tensor([5.0, 3.0, 2.0, 0.0]), rows) if stats else None
        made[name] = ParameterConstraints(
            sharding_types=["table_wise"],
            compute_kernels=["fused_uvm_caching"],
            cache_params=CacheParams(load_factor=share, stats=curve),
        )
    enumerator = EmbeddingEnumerator(Topology(2, "cuda", hbm_cap=10_000_000), 64, made)
    return enumerator, enumerator.enumerate(bags((10_000, 128), (20_000, 128)), sharders())


def sized(proposal: Any) -> Any:
    return [
        [o.name, o.compute_kernel, None if o.cache_load_factor is None else round(o.cache_load_factor, 5)]
        for o in proposal
    ]


@case(P + "EmbeddingOffloadScaleupProposer")
def offload_measures_memory() -> Any:
    enumerator, options = cached()
    model, full = OFFLOAD.build_affine_storage_model(options, enumerator)
    return {
        "model": [[round(float(x)) for x in row] for row in model],
        "full": [int(x) for x in full],
        "bytes": [float(x) for x in OFFLOAD.clf_to_bytes(model, 0.5)],
        "ceiling": OFFLOAD.get_hbm_ceiling(options, enumerator),
        "budget": OFFLOAD.get_budget(options, Topology(2, "cuda", hbm_cap=10_000_000)),
        "stats": [OFFLOAD.get_cacheability(options[0]), OFFLOAD.get_expected_lookups(options[1])],
        "scalable": [o.name for o in OFFLOAD.get_scalable_sharding_options(options)],
    }


@case(P + "EmbeddingOffloadScaleupProposer")
def offload_shares_memory_by_priority() -> Any:
    model, full = torch.tensor([[5280000.0, 106560.0], [10560000.0, 146560.0]]), torch.tensor([5186560, 10306560])
    shares, priority = torch.tensor([0.1, 0.2]), torch.tensor([300.0, 250.0])
    return [
        [round(float(x), 4) for x in OFFLOAD.allocate_budget(model, full, shares, budget, priority)]
        for budget in (0, 100_000, 1_000_000, 5_000_000, 9_000_000, 50_000_000)
    ]


@case(P + "EmbeddingOffloadScaleupProposer")
def offload_plans_with_a_budget() -> Any:
    enumerator, options = cached()
    found = [OFFLOAD.next_plan(options, budget, enumerator) for budget in (None, 0, 1_000_000, 5_000_000, 50_000_000)]
    return [None if plan is None else sized(plan) for plan in found]


@case(P + "EmbeddingOffloadScaleupProposer")
def offload_searches_the_budget() -> Any:
    enumerator, options = cached()
    topology, proposer, found = Topology(2, "cuda", hbm_cap=4_000_000), OFFLOAD(), []
    proposer.load(options, enumerator)
    proposal = proposer.propose()
    while proposal is not None and len(found) < 40:
        found.append(
            [[name, kernel, None if share is None else round(share, 3)] for name, kernel, share in sized(proposal)]
        )
        proposer.feedback(True, proposal, sum(o.total_perf for o in proposal), topology)
        proposal = proposer.propose()
    return found


@case(P + "EmbeddingOffloadScaleupProposer")
def offload_without_statistics_has_one_proposal() -> Any:
    enumerator, options = cached(stats=False)
    proposer = OFFLOAD()
    proposer.load(options, enumerator)
    first = proposer.propose()
    proposer.feedback(True, first, 1.0, Topology(2, "cuda"))
    return len(first or []), proposer.propose()


@case(P + "EmbeddingOffloadScaleupProposer")
def offload_promotes_small_tables() -> Any:
    limit = limits(
        "table_wise",
        "fused_uvm_caching",
        cache_params=CacheParams(
            load_factor=0.99, stats=EmbeddingOffloadStats(0.3, 10, torch.tensor([5.0, 3.0]), 10_000)
        ),
    )
    enumerator = EmbeddingEnumerator(Topology(2, "cuda"), 64, limit)
    options = enumerator.enumerate(bags((10_000, 4)), sharders())
    OFFLOAD.promote_high_prefetch_overheaad_table_to_hbm(enumerator, options)
    return sized(options)
