"""A planner's parts are replaced by any object with the right method; a wrong part is named with its fix."""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from torch import nn

import recshard_lab as rs
from recshard_lab.distributed import EmbeddingBagCollectionSharder
from recshard_lab.planner import CostModel, EmbeddingShardingPlanner, PlanRequest, Workload
from recshard_lab.planner.model.loads import LOOKUP
from recshard_lab.planner.parts import FixedPercentageStorageReservation, HeuristicalStorageReservation
from recshard_lab.sharding import ParameterConstraints, ParameterSharding, PlanError, Proposal, ShardingPlan, Topology
from tests.planner.problems import best_plan, random_tables, table
from tests.refusals import not_refused

GPUS = Topology(4, "cuda", hbm_cap=20 * 10**9, local_world_size=4)


class LargestFirst:
    """A whole search: tables from the largest down, each whole on the rank with the least bytes."""

    def search(self, request: PlanRequest) -> list[ParameterSharding]:
        held = [0] * request.topology.world_size
        chosen: dict[int, ParameterSharding] = {}
        for at, config in sorted(enumerate(request.tables), key=lambda pair: -pair[1].weight_bytes):
            whole = next(p for p in request.proposals(config) if len(p.rects) == 1)
            rank = int(np.argmin(held))
            held[rank] += config.weight_bytes
            chosen[at] = whole.placed([rank])
        return [chosen[at] for at in range(len(request.tables))]


class SlowLookups(CostModel):
    """A cost estimator: every lookup takes a thousand times as long."""

    name = "slow lookups"

    def rect_loads(self, *args: Any, **kwargs: Any) -> np.ndarray:
        loads = super().rect_loads(*args, **kwargs)
        loads[LOOKUP] *= 1000
        return loads


def test_a_search_of_one_file_makes_plans_with_estimate_bound_and_explanations() -> None:
    tables, workload = random_tables(6, 0)
    plan = best_plan(tables, GPUS, workload=workload, search=LargestFirst())
    assert {sharding.sharding_type for sharding in plan.tables().values()} == {"table_wise"}
    best = best_plan(tables, GPUS, workload=workload)
    assert plan.estimate.step_ms == pytest.approx(rs.estimate(plan, tables, GPUS, workload).step_ms)
    assert 0 < plan.bound_ms <= best.estimate.step_ms <= plan.estimate.step_ms
    assert plan.gap == pytest.approx(plan.estimate.step_ms / plan.bound_ms - 1)
    assert plan.explain("t0").alternatives


def test_a_cost_model_of_ones_own_is_what_plans_are_scored_by_everywhere() -> None:
    tables, workload = random_tables(6, 0)
    settings: dict[str, Any] = {"workload": workload, "cost_model": SlowLookups}
    plan = best_plan(tables, GPUS, **settings)
    found = rs.estimate(plan, tables, GPUS, workload, cost_model=SlowLookups)
    lookup, plain = found.phases.index("lookup"), rs.estimate(plan, tables, GPUS, workload)
    launches = GPUS.launch_ms * GPUS.slowdown
    work = plain.ms[:, lookup] - launches * (plain.ms[:, lookup] > 0)
    assert (found.ms[:, lookup] > 100 * work).all()
    assert plan.estimate.ms == pytest.approx(found.ms)
    assert plan.explain("t0").step_ms == pytest.approx(found.step_ms)
    usual = best_plan(tables, GPUS, workload=workload)
    assert found.step_ms <= rs.estimate(usual, tables, GPUS, workload, cost_model=SlowLookups).step_ms * (1 + 1e-9)


def test_a_cost_model_whose_terms_are_not_its_phases_is_refused() -> None:
    class SlowSteps(CostModel):
        def phases(self, loads: np.ndarray) -> np.ndarray:
            return 1000 * super().phases(loads)

    tables, workload = random_tables(2, 0)
    with pytest.raises(TypeError, match=r"SlowSteps overrides phases without terms.*Fix: change the loads in"):
        best_plan(tables, GPUS, workload=workload, cost_model=SlowSteps)
    both = type("Both", (SlowSteps,), {"terms": property(lambda self: CostModel.terms.func(self).times(1000))})
    made = best_plan(tables, GPUS, workload=workload, cost_model=both)
    assert made.gap >= 0


def test_a_rater_picks_among_the_plans_that_the_search_found() -> None:
    tables, workload = random_tables(8, 1)

    class FewestShards:
        def __init__(self) -> None:
            self.rated: list[float] = []

        def rate(self, plan: ShardingPlan) -> float:
            assert plan.estimate.fits
            self.rated.append(float(sum(len(sharding.shards) for sharding in plan.tables().values())))
            return self.rated[-1]

    rater = FewestShards()
    plan = best_plan(tables, GPUS, workload=workload, rater=rater)
    assert len(rater.rated) > 5
    assert sum(len(sharding.shards) for sharding in plan.tables().values()) == min(rater.rated)
    assert plan.gap >= 0


def test_proposers_replace_the_schemes_in_the_plan_and_in_its_answers() -> None:
    class Thirds:
        def propose(self, config: Any, topology: Topology, constraints: Any = None) -> Any:
            edges = [0, config.num_embeddings // 3, 2 * config.num_embeddings // 3, config.num_embeddings]
            rows = pairwise(edges)
            yield Proposal("thirds", tuple((span, (0, config.embedding_dim)) for span in rows))
            yield Proposal("whole", (((0, config.num_embeddings), (0, config.embedding_dim)),))

    tables = [table("a", 1000, 16), table("b", 500, 16)]
    only = {"a": ParameterConstraints(sharding_types=["thirds"])}
    plan = best_plan(tables, GPUS, constraints=only, proposers=[Thirds()])
    assert plan.tables()["a"].sharding_type == "thirds"
    assert {way.sharding.sharding_type for way in plan.explain("a").alternatives} == {"whole"}
    assert {way.sharding.sharding_type for way in plan.explain("b").alternatives} <= {"thirds", "whole"}
    forbidden = {"a": ParameterConstraints(forbidden_sharding_types=["thirds", "whole"])}
    with pytest.raises(PlanError, match=r"table 'a' .* cannot be split by Thirds"):
        best_plan(tables, GPUS, constraints=forbidden, proposers=[Thirds()])


def test_reporters_receive_every_plan_once() -> None:
    seen: list[tuple[ShardingPlan, float]] = []

    class Log:
        def report(self, plan: ShardingPlan, seconds: float) -> None:
            seen.append((plan, seconds))

    plan = best_plan([table("a", 100, 8)], GPUS, reporters=[Log(), Log()])
    assert [made for made, _ in seen] == [plan, plan]
    assert all(0 < seconds < 60 for _, seconds in seen)
    plan.why_not({"a": "row_wise"})
    assert len(seen) == 2


def test_a_part_that_does_not_fit_is_named_with_its_fix() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"search": "greedy"}, r"search='greedy' has no method search\(\.\.\.\)\. Fix: pass an object that has it"),
        ({"search": LargestFirst}, r"search=LargestFirst is a class\. Fix: pass an instance, search=LargestFirst\(\)"),
        ({"search": LargestFirst(), "solver": "exact"}, r"search=LargestFirst replaces.*Fix: pass search= alone"),
        ({"proposers": [3]}, r"proposers=3 has no method propose"),
        ({"rater": object()}, r"rater=<object .* has no method rate"),
        ({"reporters": [print]}, r"reporters=<built-in function print> has no method report"),
        ({"storage_reservation": 0.1}, r"storage_reservation=0\.1 has no method workload"),
        ({"cost_model": "torchreck"}, r"'torchreck' does not exist \(did you mean 'torchrec'\?\).*Fix: use one of"),
    ]
    assert not_refused((partial(EmbeddingShardingPlanner, GPUS, **parts), words) for parts, words in cases) == []


class Returns:
    def __init__(self, shardings: Any) -> None:
        self.search = lambda request: shardings


def test_a_wrong_result_of_a_search_is_named() -> None:
    cases: list[tuple[Any, str]] = [
        (None, r"Returns\.search returned None, expected a list of ParameterSharding"),
        ([], r"Returns\.search returned 0 shardings for 1 tables"),
        ([ParameterSharding("custom", shards=[rs.Shard(0, (0, 5), (0, 8))])], r"no shard covers rows \[5, 100\)"),
        ([ParameterSharding("table_wise", shards=[rs.Shard(9, (0, 100), (0, 8))])], r"rank 9"),
    ]
    made = partial(best_plan, [table("a", 100, 8)], GPUS)
    assert not_refused(((partial(made, search=Returns(own)), words) for own, words in cases), PlanError) == []


def test_plans_of_a_search_that_exceed_memory_and_ratings_that_are_no_numbers_are_refused() -> None:
    big = [table("a", 10**6, 64), table("b", 10**6, 64)]

    class AllOnZero:
        def search(self, request: PlanRequest) -> Sequence[ParameterSharding]:
            return [next(p for p in request.proposals(t) if len(p.rects) == 1).placed([0]) for t in request.tables]

    small = Topology(4, "cuda", hbm_cap=500 * 10**6)
    with pytest.raises(PlanError, match=r"AllOnZero\.search returned a plan that does not fit: rank 0 holds .*Fix:"):
        best_plan(big, small, search=AllOnZero())

    class NaN:
        def rate(self, plan: ShardingPlan) -> float:
            return float("nan")

    with pytest.raises(ValueError, match=r"NaN\.rate returned nan\. Fix: return a number"):
        best_plan(big, GPUS, rater=NaN())
    assert (
        best_plan(big, GPUS, storage_reservation=FixedPercentageStorageReservation(0.5)).estimate.usable_bytes.tolist()
        == [1e10] * 4
    )


def test_a_plan_has_its_estimate_and_follows_changes_of_it() -> None:
    tables, workload = random_tables(4, 2)
    plan = best_plan(tables, GPUS, workload=workload)
    first = plan.estimate
    assert plan.estimate is first
    assert 0 < first.lower_bound <= plan.bound_ms <= first.step_ms
    plan.plan[""]["t0"] = ParameterSharding("row_wise").resolved(tables[0], 4, 4)
    assert plan.estimate.step_ms == pytest.approx(rs.estimate(plan, tables, GPUS, workload).step_ms)
    assert plan.estimate is not first


def test_a_plan_that_no_planner_made_says_how_to_estimate_it() -> None:
    tables, workload = random_tables(4, 2)
    planner = EmbeddingShardingPlanner(GPUS, workload=workload)
    plan = planner.plan_tables(tables)
    read = ShardingPlan.from_json(plan.to_json())
    for name in ("estimate", "gap", "bound_ms"):
        with pytest.raises(
            PlanError, match=rf"no (bound_ms|{name}): no planner made it.*Fix: call rs\.estimate\(plan, tables"
        ):
            getattr(read, name)
    read.planned = planner.record(read, tables)
    assert read.estimate.step_ms == pytest.approx(plan.estimate.step_ms)
    assert read.bound_ms == pytest.approx(plan.bound_ms, rel=0.01)
    assert read.gap == pytest.approx(plan.gap, abs=0.01)


def test_one_call_plans_configs_modules_and_files(tmp_path: Any) -> None:
    tables = [rs.EmbeddingBagConfig(1000, 16, name=name, feature_names=[name]) for name in ("movies", "user id")]
    plan = rs.plan(tables, 2, movies="row_wise", constraints={"user id": ["table_wise", "column_wise"]})
    assert plan.tables()["movies"].sharding_type == "row_wise"
    assert plan.tables()["user id"].sharding_type in ("table_wise", "column_wise")
    assert len(plan.estimate.ms) == 2
    assert len(rs.plan(tables, "h100x8").estimate.ms) == 8
    assert rs.plan(tables, Topology(2, ddr_cap=10**8), workload=Workload(64)).planned.planner.workload.batch_size == 64  # type: ignore[union-attr]
    with_module = rs.plan(rs.EmbeddingBagCollection(tables), 2, movies=ParameterConstraints(ranks=[1]))
    assert with_module.tables()["movies"].ranks == [1]
    file = tmp_path / "tables.csv"
    file.write_text("name,num_embeddings,embedding_dim,feature_names\nmovies,1000,16,seen\n")
    assert rs.plan(file, 2, movies="column_wise").tables()["movies"].sharding_type == "column_wise"


def test_wrong_arguments_of_the_one_call_are_named() -> None:
    tables, named = [rs.EmbeddingBagConfig(100, 8, name="movies", feature_names=["seen"])], {"movies": "row_wise"}
    refusals: list[tuple[Any, str]] = [
        (lambda: rs.plan(tables, 2, moveis="row_wise"), r"'moveis' does not exist \(did you mean 'movies'\?\).*Fix"),
        (lambda: rs.plan(tables, 2, movies="rowwise"), r"'rowwise' is registered \(did you mean 'row_wise'\?\)"),
        (lambda: rs.plan(tables, 2, constraints=named, movies="row_wise"), r"Fix: pass it once"),
        (lambda: rs.plan(tables, 2.5), r"topology must be .*got 2\.5\. Fix: pass topology=8"),  # type: ignore[arg-type]
        (lambda: rs.plan(tables, "h1000"), r"h1000"),
        (lambda: rs.plan(3, 2), r"got 3\. Fix: pass \[EmbeddingBagConfig"),
        (lambda: rs.plan("tables.toml", 2), r"neither a file of tables"),
    ]
    assert not_refused(refusals) == []


# ---- what a sharder allows ----

PAIR = [rs.EmbeddingBagConfig(64, 8, name=name, feature_names=[name]) for name in ("one", "two")]


class RowsOnly(EmbeddingBagCollectionSharder):
    def sharding_types(self, compute_device_type: str) -> list[str]:
        return ["row_wise"]


class DenseOnly(EmbeddingBagCollectionSharder):
    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return ["dense"]


def test_a_sharder_narrows_the_schemes_and_kernels_of_its_tables() -> None:
    module, planner = rs.EmbeddingBagCollection(PAIR, device="meta"), EmbeddingShardingPlanner(Topology(2))
    assert {s.sharding_type for s in planner.plan(module, [RowsOnly()]).tables().values()} == {"row_wise"}
    assert {s.compute_kernel for s in planner.plan(module, [DenseOnly()]).tables().values()} == {"dense"}
    assert planner.plan(module, [EmbeddingBagCollectionSharder()]) == planner.plan(module)  # which overrides nothing
    columns = {"two": ParameterConstraints(sharding_types=["column_wise"])}
    with pytest.raises(PlanError, match=r"'two' is constrained .*'column_wise'.* RowsOnly allows \['row_wise'\]"):
        EmbeddingShardingPlanner(Topology(2), constraints=columns).plan(module, [RowsOnly()])


# ---- memory that plans leave free ----

ONE = rs.EmbeddingBagConfig(1000, 64, name="t", feature_names=["f"])  # 256 kB


def test_a_share_of_memory_and_the_dense_part_of_the_model_stay_free() -> None:
    ebc = rs.EmbeddingBagCollection([ONE], device="meta")
    model = nn.ModuleDict({"ebc": ebc, "over": nn.Linear(64, 200, bias=False, device="meta")})  # 51 kB, six times

    def plan(module: Any, reservation: Any) -> None:
        top = Topology(1, ddr_cap=400_000)
        EmbeddingShardingPlanner(top, batch_size=1, storage_reservation=reservation).plan(module)

    plan(ebc, FixedPercentageStorageReservation(0.0))
    plan(ebc, HeuristicalStorageReservation(0.0))
    plan(model, HeuristicalStorageReservation(0.0, dense_tensor_estimate=0))
    full = [(ebc, FixedPercentageStorageReservation(0.5)), (model, HeuristicalStorageReservation(0.0))]
    for module, reservation in full:
        with pytest.raises(PlanError):
            plan(module, reservation)
    for share in (-0.1, 1.0, 15):
        with pytest.raises(ValueError, match="percentage"):
            FixedPercentageStorageReservation(share)


def test_a_plan_is_printed_with_its_estimate_where_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    plan = EmbeddingShardingPlanner(Topology(2), debug=True).plan(rs.EmbeddingBagCollection([ONE], device="meta"))
    printed = capsys.readouterr().out
    assert plan.show() in printed
    assert str(plan.estimate) in printed
