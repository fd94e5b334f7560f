"""Parts of TorchRec's planner with this library's objects: plans that run, constraints, refusals."""

import pickle
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

import recshard_lab as rs
from recshard_lab.compat.planner.base import Proposer, StorageReservation
from recshard_lab.compat.planner.cache import CacheParams
from recshard_lab.compat.planner.constraints import ParameterConstraints
from recshard_lab.compat.planner.costs import PlannerError, PlannerErrorType
from recshard_lab.compat.planner.planners import EmbeddingShardingPlanner
from recshard_lab.compat.planner.proposers import GreedyProposer
from recshard_lab.compat.planner.reservations import (
    FixedAbsoluteStorageReservation,
    FixedPercentageStorageReservation,
)
from recshard_lab.compat.planner.stats import EmbeddingStats
from recshard_lab.compat.planner.topology import CustomTopologyData, Topology
from recshard_lab.distributed import DistributedModelParallel, EmbeddingBagCollectionSharder, get_default_sharders


@pytest.fixture
def bags() -> Any:
    return rs.EmbeddingBagCollection(
        [
            rs.EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=8, feature_names=[name, f"{name}2"])
            for name, rows in (("a", 100), ("b", 30))
        ]
    )


class ColumnsOnly(Proposer):
    """Proposes one plan, and keeps the ratings."""

    def load(self, search_space: Any, enumerator: Any = None) -> None:
        self.plans = [[o for o in search_space if o.sharding_type == "column_wise"]]
        self.ratings: list[float] = []

    def propose(self) -> Any:
        return self.plans.pop() if self.plans else None

    def feedback(
        self, partitionable: bool, plan: Any = None, perf_rating: Any = None, storage_constraint: Any = None
    ) -> None:
        self.ratings.append(perf_rating)


def test_a_plan_of_a_users_proposer_runs_and_is_estimated(bags: Any) -> None:
    proposer = ColumnsOnly()
    limits = {name: rs.ParameterConstraints(min_partition=4) for name in "ab"}
    planner = EmbeddingShardingPlanner(rs.Topology(1), 16, proposer=proposer, constraints=limits)
    plan = planner.plan(bags, get_default_sharders())
    assert [len(one.shards) for one in plan.plan[""].values()] == [2, 2]
    assert proposer.ratings[0] > 0
    assert plan.estimate.fits
    ids = rs.KeyedJaggedTensor(["a", "a2", "b", "b2"], torch.arange(8), lengths=torch.ones(8, dtype=torch.long))
    sharded = DistributedModelParallel(nn.ModuleDict({"bags": bags}), plan=rs.ShardingPlan({"bags": plan.plan[""]}))
    assert torch.equal(sharded.module["bags"](ids).values(), bags(ids).values())


def test_a_subclass_of_a_collection_is_planned_as_its_base_class() -> None:
    class Mine(rs.EmbeddingBagCollection):
        pass

    table = rs.EmbeddingBagConfig(name="a", num_embeddings=100, embedding_dim=8, feature_names=["a"])
    planner = EmbeddingShardingPlanner(rs.Topology(2), 16, proposer=GreedyProposer(), stats=EmbeddingStats())
    plan = planner.plan(nn.ModuleDict({"bags": Mine([table])}), [EmbeddingBagCollectionSharder()])
    assert list(plan.plan) == ["bags"]


def test_a_planner_with_parts_has_no_options_of_the_search() -> None:
    with pytest.raises(ValueError, match="solver are arguments of this library's search"):
        EmbeddingShardingPlanner(rs.Topology(1), proposer=GreedyProposer(), solver="exact")
    with pytest.raises(PlannerError, match="need a module"):
        EmbeddingShardingPlanner(rs.Topology(1), proposer=GreedyProposer()).plan_tables([])


def test_one_pooling_factor_counts_for_all_features(bags: Any) -> None:
    table = bags.embedding_bag_configs()[0]
    assert ParameterConstraints(pooling_factors=[3.0]).ours(table).pooling_factors == [3.0, 3.0]
    assert ParameterConstraints(cache_params=CacheParams()).ours(table).cache_params is None
    plan = EmbeddingShardingPlanner(rs.Topology(2), 16, constraints={"a": ParameterConstraints(["row_wise"])}).plan(
        bags
    )
    assert plan.plan[""]["a"].sharding_type == "row_wise"


@pytest.mark.parametrize("parts", [{}, {"proposer": ColumnsOnly()}])
def test_fields_that_a_plan_cannot_store_are_refused_by_name(bags: Any, parts: Any) -> None:
    limits = {"a": ParameterConstraints(stochastic_rounding=True)}
    planner = EmbeddingShardingPlanner(Topology(1, "cpu"), 16, constraints=limits, **parts)
    with pytest.raises(PlannerError, match=r"stochastic_rounding=True.* Fix: omit it") as refused:
        planner.plan(bags, [EmbeddingBagCollectionSharder()])
    assert refused.value.error_type is PlannerErrorType.STRICT_CONSTRAINTS


def test_a_constraint_of_another_table_is_a_warning(bags: Any) -> None:
    planner = EmbeddingShardingPlanner(rs.Topology(1), 16, constraints={"z": ParameterConstraints()})
    with pytest.warns(UserWarning, match="a table 'z' that the module does not have"):
        planner.plan(bags)


def test_errors_have_a_type_and_travel(bags: Any) -> None:
    planner = EmbeddingShardingPlanner(Topology(1, "cpu", ddr_cap=1000), 16)
    with pytest.raises(PlannerError, match="not fit") as refused:
        planner.plan(bags)
    assert refused.value.error_type is PlannerErrorType.INSUFFICIENT_STORAGE
    sent = pickle.loads(pickle.dumps(refused.value))
    assert (str(sent), sent.error_type) == (str(refused.value), refused.value.error_type)


def test_bandwidths_of_a_topology_reach_the_search_only_if_they_are_passed() -> None:
    assert Topology(2, "cpu").ours() == rs.Topology(2)
    passed = Topology(4, "cuda", hbm_cap=7, local_world_size=2, intra_host_bw=5.0).ours()
    assert (passed.hbm_cap, passed.local_world_size, passed.intra_host_bw) == (7, 2, 5.0)
    assert passed.inter_host_bw == rs.Topology(4, "cuda").inter_host_bw


def test_reservations_reach_the_search() -> None:
    half = EmbeddingShardingPlanner(
        Topology(2, "cpu", ddr_cap=1000), storage_reservation=FixedPercentageStorageReservation(0.5)
    )
    less = EmbeddingShardingPlanner(
        Topology(2, "cuda", hbm_cap=1000), storage_reservation=FixedAbsoluteStorageReservation(300)
    )
    assert [planner.topology.free_memory_bytes() for planner in (half, less)] == [500, 700]


class FirstRankFull(StorageReservation):
    """Leaves nothing on rank 0."""

    made: Any = None

    def reserve(self, topology: Any, batch_size: int, module: Any, sharders: Any, constraints: Any = None) -> Any:
        self.made = deepcopy(topology)
        self.made.devices[0].storage.ddr = 0
        return self.made

    @property
    def last_reserved_topology(self) -> Any:
        return self.made


def test_a_reservation_of_the_user_and_ranks_that_differ_decide_the_ranks(bags: Any) -> None:
    limits = {name: ParameterConstraints(["table_wise"]) for name in "ab"}
    reserved = EmbeddingShardingPlanner(Topology(2, "cpu"), 4, constraints=limits, storage_reservation=FirstRankFull())
    unequal = Topology(2, "cpu", custom_topology_data=CustomTopologyData({"ddr_cap": [10**9, 2000]}, 2))
    differing = EmbeddingShardingPlanner(unequal, 4, constraints=limits)
    found = [[one.ranks for one in planner.plan(bags).plan[""].values()] for planner in (reserved, differing)]
    assert found == [[[1], [1]], [[0], [0]]]


def test_stats_report_a_plan_of_the_search(bags: Any) -> None:
    stats = EmbeddingStats()
    EmbeddingShardingPlanner(Topology(2, "cpu"), 16, stats=stats, debug=False).plan(bags)
    assert any(line.startswith("rank") for line in stats.lines)


@pytest.mark.parametrize("name", ["reserved_memory", "precision", "multipass_prefetch_config"])
def test_cache_settings_that_do_not_exist_are_refused_by_name(name: str) -> None:
    with pytest.raises(rs.sharding.PlanError, match=f"{name}=1 is not supported: .* Fix: omit it"):
        CacheParams(**{name: 1})
    with pytest.raises(rs.sharding.PlanError, match=f"{name}=1 is not supported"):
        setattr(CacheParams(), name, 1)


def test_an_assigned_field_is_checked_and_kept() -> None:
    params = CacheParams(load_factor=0.25)
    with pytest.raises(rs.sharding.PlanError, match="load_factor must be above 0 and at most 1, got 7"):
        params.load_factor = 7
    params.algorithm = "LFU"
    assert params == CacheParams("lfu", 0.25)
    sharding = rs.ParameterSharding("table_wise", "fused_uvm_caching", cache_params=params)
    params.load_factor = 0.5
    assert sharding.cache_params is not None
    assert sharding.cache_params.rows(10) == 5


@pytest.mark.parametrize(
    ("name", "missing", "kind"),
    [
        ("enumerator", "enumerate, populate_estimates", "Enumerator"),
        ("proposer", "feedback, load, propose", "Proposer"),
        ("partitioner", "partition", "Partitioner"),
        ("performance_model", "rate", "PerfModel"),
        ("plan_loader", "load, plan_context_hash", "PlanLoader"),
        ("stats", "log", "Stats"),
    ],
)
def test_a_part_without_its_methods_is_refused_by_name(name: str, missing: str, kind: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} got .*no method {missing}\. Fix: pass an object of class {kind} in"):
        EmbeddingShardingPlanner(Topology(2, "cpu"), 16, **{name: "greedy"})


@pytest.mark.parametrize("name", ["world_size", "local_world_size", "pod_size"])
@pytest.mark.parametrize("value", ["2", 0, 1.5, True])
def test_a_number_of_ranks_that_is_none_is_refused_by_name(name: str, value: Any) -> None:
    numbers = {"world_size": 2, "compute_device": "cpu", name: value}
    with pytest.raises(ValueError, match=rf"{name} must be a positive int, got {value!r}\. Fix: {name}=2"):
        Topology(**numbers)
