"""Answers about plans: each figure equals that of the cost model, the planner or the resharding transfers."""

import copy
import json
import pickle
import sys
from functools import partial
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest

from recshard_lab.distributed.state.moves import transfers
from recshard_lab.embedding.configs import DataType, EmbeddingBagConfig
from recshard_lab.planner import PHASES, EmbeddingShardingPlanner, Workload, estimate
from recshard_lab.planner.model.estimate import COST_MODELS
from recshard_lab.planner.workload import OPTIMIZER_STATE_BYTES
from recshard_lab.sharding import (
    ParameterConstraints,
    ParameterSharding,
    PlanError,
    Shard,
    ShardingPlan,
    Topology,
    scheme_names,
)
from tests.grid import examples, grid
from tests.planner.problems import best_plan, random_problem, random_tables, table
from tests.refusals import not_refused

GPUS = Topology(8, "cuda", hbm_cap=8 * 10**9, local_world_size=4)  # not all tables may be replicated

SCHEMES = [name for name in scheme_names() if name != "data_parallel"]


def problem(count: int = 12, topology: Topology = GPUS, **more: Any) -> tuple[Any, Any, Any, ShardingPlan]:
    """Tables, workload, planner, plan."""
    tables, workload = random_tables(count, 1)
    planner = EmbeddingShardingPlanner(topology, workload=workload, **more)
    return tables, workload, planner, planner.plan_tables(tables)


def replaced(plan: ShardingPlan, name: str, sharding: ParameterSharding) -> ShardingPlan:
    return ShardingPlan({path: {**own, **({name: sharding} if name in own else {})} for path, own in plan.plan.items()})  # type: ignore[misc]


@pytest.mark.parametrize(*grid(seed=range(examples(2, 4)), cost_model=list(COST_MODELS), gate={"seed": [1]}))
def test_each_alternative_costs_what_the_plan_with_it_is_predicted_to_cost(seed: int, cost_model: str) -> None:
    tables, topology, workload = random_problem(seed)
    plan = best_plan(tables, topology, workload=workload, cost_model=cost_model)
    now = estimate(plan, tables, topology, workload, cost_model=cost_model)
    for name in ("t0", "t5"):
        found = plan.explain(name)
        assert found.sharding == plan.tables()[name]
        assert found.step_ms == pytest.approx(now.step_ms)
        assert found.memory_bytes == pytest.approx(now.memory_bytes.sum(axis=1).max())
        assert len(found.alternatives) >= 4
        for way in found.alternatives:
            other = replaced(plan, name, way.sharding)
            other.validate(tables, topology.world_size)
            cost = estimate(other, tables, topology, workload, cost_model=cost_model)
            assert way.step_ms == pytest.approx(cost.step_ms)
            assert way.more_ms == pytest.approx(cost.step_ms - now.step_ms, abs=1e-9)
            assert way.memory_bytes == pytest.approx(cost.memory_bytes.sum(axis=1).max())
            assert way.fits == cost.fits
            assert set(way.sharding.shards) != set(found.sharding.shards) or way.sharding.route != found.sharding.route


def test_an_answer_counts_the_rows_of_all_tables_in_a_shared_cache() -> None:
    cached = Topology(4, ddr_mem_bw=6e6, cache_bw=60e6, cache_bytes=16e6)
    tables, workload = random_tables(8, 1)
    plan = best_plan(tables, cached, workload=workload)
    found = plan.explain("t0")
    assert found.step_ms == pytest.approx(plan.estimate.step_ms, rel=1e-9)
    for way in found.alternatives:
        cost = estimate(replaced(plan, "t0", way.sharding), tables, cached, workload)
        assert way.step_ms == pytest.approx(cost.step_ms, rel=1e-9)


def test_every_scheme_is_among_the_alternatives_once_a_route_and_they_are_sorted() -> None:
    _, _, _, plan = problem()
    ways = plan.explain("t3").alternatives
    keys = [(way.sharding.sharding_type, way.sharding.route) for way in ways]
    assert len(set(keys)) == len(keys)
    found = {scheme for scheme, _ in keys} | {plan.tables()["t3"].sharding_type}
    assert found == {*scheme_names()} - {"flex_shard"}  # proposed where skew is known
    assert [way.step_ms for way in ways if way.fits] == sorted(way.step_ms for way in ways if way.fits)


@pytest.mark.parametrize("scheme", ["table_wise", "column_wise"])
def test_an_alternative_is_the_best_of_all_placements_of_its_cut(scheme: str) -> None:
    small = Topology(4, "cuda", hbm_cap=80 * 10**9, local_world_size=4)
    tables, workload, _, plan = problem(6, small)
    for name in ("t0", "t1", "t4"):
        for way in plan.explain(name).alternatives:
            if way.sharding.sharding_type != scheme:
                continue
            shards, now = way.sharding.shards, plan.tables()[name]
            taken = sorted((shard.rank, shard.num_rows, shard.num_cols) for shard in now.shards)
            every = []
            for ranks in permutations(range(4), len(shards)):
                moved = [Shard(rank, s.rows, s.cols) for rank, s in zip(ranks, shards, strict=True)]
                if sorted((s.rank, s.num_rows, s.num_cols) for s in moved) != taken:
                    other = replaced(plan, name, ParameterSharding(scheme, shards=moved))
                    every.append(estimate(other, tables, small, workload).step_ms)
            assert way.step_ms <= min(every) * (1 + 1e-9)


def test_alternatives_that_fit_nowhere_are_marked() -> None:
    tables = [table("movies", 10_000_000, 128), table("users", 1000, 16)]  # 5.1 GB
    tight = Topology(4, "cuda", hbm_cap=3 * 10**9, reserve_fraction=0)
    plan = best_plan(tables, tight)
    ways = {way.sharding.sharding_type: way for way in plan.explain("movies").alternatives}
    assert not ways["table_wise"].fits
    assert not ways["data_parallel"].fits
    assert "does not fit" in str(plan.explain("movies"))
    refused = plan.why_not({"movies": "table_wise"})
    assert not refused.fits
    assert refused.more_ms is None
    with pytest.raises(PlanError) as error:
        best_plan(tables, tight, constraints={"movies": ParameterConstraints(sharding_types=["table_wise"])})
    assert refused.refusal == str(error.value)


def test_shares_of_all_tables_and_what_is_fixed_add_up_to_each_phase() -> None:
    tables, workload, _, plan = problem()
    found = {config.name: plan.explain(config.name) for config in tables}
    now = estimate(plan, tables, GPUS, workload)
    for p, phase in enumerate(PHASES):
        of = [each.phases[p] for each in found.values()]
        assert {(share.phase, share.rank) for share in of} == {(phase, int(now.ms[:, p].argmax()))}
        assert all(share.ms == pytest.approx(now.ms[:, p].max()) for share in of)
        assert all(share.table_ms >= 0 for share in of)
        caused = sum(share.table_ms for share in of)
        assert caused <= of[0].ms * (1 + 1e-9)
        if phase == "dense":
            assert caused == 0
    assert sum(each.share for each in found.values()) <= 1
    rank = next(share.rank for share in found["t0"].phases if share.phase == "lookup")
    for name, each in found.items():  # a table on other ranks causes no lookups of this rank
        share = next(share for share in each.phases if share.phase == "lookup")
        assert (share.table_ms > 0) == (rank in {shard.rank for shard in plan.tables()[name].shards})


def test_without_fixed_costs_the_tables_cause_all_of_the_lookups() -> None:
    free = Topology(4, "cuda", hbm_cap=80 * 10**9, launch_ms=0.0, kernel_ms=0.0, straggler_sigma=0.0)
    tables, workload, _, plan = problem(6, free)
    shares = [plan.explain(config.name).phases[PHASES.index("lookup")] for config in tables]
    assert sum(share.share for share in shares) == pytest.approx(1.0)
    alone = [name for name, s in plan.tables().items() if shares[0].rank in {shard.rank for shard in s.shards}]
    for config, share in zip(tables, shares, strict=True):
        if config.name in alone:
            only = ShardingPlan({"": {config.name: plan.tables()[config.name]}})  # type: ignore[dict-item]
            ms = estimate(only, [config], free, workload.for_tables([config])).ms[share.rank, PHASES.index("lookup")]
            assert share.table_ms == pytest.approx(ms)


def test_by_torchrecs_formulas_the_tables_cause_all_that_the_busiest_rank_does() -> None:
    tables, workload, _, plan = problem(cost_model="torchrec")
    now = estimate(plan, tables, GPUS, workload, cost_model="torchrec")
    found = [plan.explain(config.name) for config in tables]
    assert {share.rank for each in found for share in each.phases} == {now.critical_rank}
    assert sum(each.share for each in found) == pytest.approx(1.0)
    assert [share.ms for share in found[0].phases] == pytest.approx(now.ms[now.critical_rank].tolist())
    assert found[0].critical.ms == now.ms[now.critical_rank].max()
    assert str(plan.why_not({"t3": "row_wise"}))


def test_the_critical_phase_is_the_longest_that_a_plan_can_change() -> None:
    tables, workload, _, _ = problem()
    slow = Workload(workload.batch_size, workload.pooling_factors, dense_parameters=10**8)
    plan = best_plan(tables, GPUS, workload=slow)
    found = plan.explain("t3")
    longest = max(found.phases, key=lambda share: share.ms)
    assert longest.phase == "dense"
    assert found.critical == max((s for s in found.phases if s.phase != "dense"), key=lambda share: share.ms)


def test_alternatives_that_constraints_forbid_are_told_from_those_allowed() -> None:
    wish = {"t3": ParameterConstraints(sharding_types=["row_wise"], ranks=[1, 2, 5])}
    _, _, _, plan = problem(constraints=wish)
    found = plan.explain("t3")
    assert found.sharding.sharding_type == "row_wise"
    for way in found.alternatives:
        assert way.allowed == (way.sharding.sharding_type == "row_wise")
        assert {shard.rank for shard in way.sharding.shards} <= {1, 2, 5}
    rows, cols = plan.tables()["t3"].shards[-1].rows[1], plan.tables()["t3"].shards[-1].cols[1]
    pinned = {"t3": ParameterConstraints(shards=[Shard(2, (0, rows), (0, cols))])}
    _, _, _, fixed = problem(constraints=pinned)
    assert not any(way.allowed for way in fixed.explain("t3").alternatives)
    assert "Its constraints allow no alternative." in fixed.explain("t3").why


@pytest.mark.parametrize("optimizer", ["exact_sgd", "exact_row_wise_adagrad", "adam", "partial_row_wise_adam"])
def test_bytes_that_move_are_the_overlaps_that_resharding_sends(optimizer: str) -> None:
    tables, _ = random_tables(6, 1)
    tables[2].data_type = DataType.FP16
    before = best_plan(tables, Topology(4, "cuda", hbm_cap=80 * 10**9), workload=Workload(optimizer=optimizer))
    after = ShardingPlan({"": {config.name: ParameterSharding("row_wise") for config in tables}})  # type: ignore[dict-item]
    full = after.resolved(tables, 4).tables()
    per_row, per_element = OPTIMIZER_STATE_BYTES[optimizer]
    changes = before.diff(after).tables
    assert [change.table for change in changes] == [config.name for config in tables]
    for config, change in zip(tables, changes, strict=True):
        old, new = before.tables()[config.name].shards, full[config.name].shards
        held = [[Shard(s.rank, s.rows, (0, 1)) for s in shards] for shards in (old, new)]
        sent = 0.0
        for sources, targets, size in ((old, new, config.data_type.bytes_per_element + per_element), (*held, per_row)):
            for way in transfers(sources, targets):
                (r0, r1), (c0, c1) = way.rect
                sent += size * (r1 - r0) * (c1 - c0) * (way.source_rank != way.target_rank)
        assert change.moved_bytes == sent
    assert before.diff(after).moved_bytes > 0
    assert before.diff(before).changed == ()
    assert before.diff(before).moved_bytes == 0


def test_what_a_move_costs_is_the_estimate_of_the_plan_with_that_table_alone_moved() -> None:
    tables, workload, _, plan = problem()
    wishes = {table.name: ParameterConstraints(sharding_types=["row_wise"]) for table in tables}
    other = best_plan(tables, GPUS, workload=workload, constraints=wishes)
    found = plan.diff(other)
    assert len(found.changed) > 1
    for change in found.changed:
        moved = replaced(plan, change.table, other.tables()[change.table])
        more = estimate(moved, tables, GPUS, workload).step_ms - found.before.step_ms
        assert change.more_ms == pytest.approx(more, abs=1e-9)
    assert any(abs(change.more_ms or 0) > 1e-3 for change in found.changed)
    fewer = best_plan(tables, Topology(1, compute_device="cuda"), workload=workload)
    assert {change.more_ms for change in plan.diff(fewer).changed} == {None}  # not a move among the same ranks


def test_a_diff_says_what_changed_and_what_both_plans_cost() -> None:
    tables, workload, planner, plan = problem()
    other = best_plan(
        tables, GPUS, workload=workload, constraints={"t3": ParameterConstraints(sharding_types=["data_parallel"])}
    )
    found = plan.diff(other)
    for change in found.tables:
        same = plan.tables()[change.table] == other.tables()[change.table]
        assert bool(change.changed) != same
        assert ("scheme" in change.changed) == (change.before.sharding_type != change.after.sharding_type)  # type: ignore[union-attr]
    assert found.before.step_ms == pytest.approx(plan.estimate.step_ms)
    assert found.after.step_ms == pytest.approx(estimate(other, tables, GPUS, workload).step_ms)
    routed = plan.diff(plan.with_route("two_hop"))
    assert routed.moved_bytes == 0
    assert {name for change in routed.changed for name in change.changed} == {"route"}
    written = ShardingPlan.from_json(other.to_json())  # one side that a planner made is enough
    assert written.diff(plan).after.step_ms == pytest.approx(found.before.step_ms)
    assert plan.diff(written).after.step_ms == pytest.approx(found.after.step_ms)
    bigger = [EmbeddingBagConfig(**{**vars(c), "num_embeddings": c.num_embeddings + 1}) for c in tables]
    with pytest.raises(PlanError, match=r"'t0' is .* in one plan and .* in the other"):
        plan.diff(planner.plan_tables(bigger))


@pytest.mark.parametrize(*grid(scheme=SCHEMES, gate={"scheme": SCHEMES[1::2]}))
def test_why_not_is_the_better_of_planning_again_and_moving_that_table_alone(scheme: str) -> None:
    tables, workload, _, plan = problem()
    wish = ParameterConstraints(sharding_types=[scheme])
    fresh_plan = best_plan(tables, GPUS, workload=workload, constraints={"t3": wish})
    found = plan.why_not({"t3": scheme})
    assert found.after is not None
    assert found.plan.tables()["t3"].sharding_type == scheme
    alone = [
        way.step_ms for way in plan.explain("t3").alternatives if way.fits and way.sharding.sharding_type == scheme
    ]
    if plan.tables()["t3"].sharding_type == scheme:
        assert found.after.step_ms == found.before.step_ms
    else:
        assert found.after.step_ms == pytest.approx(min([fresh_plan.estimate.step_ms, *alone]))
    assert found.after.step_ms == pytest.approx(estimate(found.plan, tables, GPUS, workload).step_ms)
    assert found.more_ms == found.after.step_ms - found.before.step_ms


def test_a_plan_that_meets_the_request_stays_and_several_requests_are_met() -> None:
    _, _, _, plan = problem()
    now = plan.tables()["t3"].sharding_type
    assert str(plan.why_not({"t3": now})).startswith(f"The plan already has t3 {now}.")
    found = plan.why_not({"t3": ParameterConstraints(sharding_types=["table_wise"], ranks=[6]), "t1": ["row_wise"]})
    assert {shard.rank for shard in found.plan.tables()["t3"].shards} == {6}
    assert found.plan.tables()["t1"].sharding_type == "row_wise"
    assert "t3 (sharding_types=['table_wise'], ranks=[6]), t1 row_wise" in str(found)


def test_text_fits_100_columns_and_html_and_dicts_agree() -> None:
    tables = [table("a_table_with_quite_a_long_name_for_a_plan", 10_000_000, 128), *random_tables(6, 1)[0]]
    plan = best_plan(tables, GPUS)
    answers: list[Any] = [
        plan.explain(tables[0].name),
        plan.diff(plan.with_route("two_hop")),
        plan.why_not({tables[0].name: "row_wise"}),
    ]
    for answer in answers:
        assert max(len(line) for line in str(answer).splitlines()) <= 100
        page = answer._repr_html_()
        assert tables[0].name in page
        assert page.count("<table>") == page.count("</table>") >= 1
        assert answer.records()
    explained = answers[0].records()
    assert [line["chosen"] for line in explained] == [True, *[False] * len(answers[0].alternatives)]
    assert [line["step_ms"] for line in explained[1:]] == [way.step_ms for way in answers[0].alternatives]
    assert json.dumps(explained)


def test_text_of_many_tables_and_ranks_stays_short() -> None:
    many = Topology(64, "cuda", hbm_cap=80 * 10**9, local_world_size=8)
    tables = [table(f"t{i}", 10_000, 64) for i in range(50)]
    shards = [Shard(2 * i, (1000 * i, 1000 * (i + 1)), (0, 64)) for i in range(10)]
    spread = {config.name: ParameterSharding("custom", shards=shards) for config in tables}
    plan = best_plan(tables, many, local_search_passes=0)
    found = plan.diff(ShardingPlan({"": spread}))  # type: ignore[dict-item]
    assert len(found.records()) == found._repr_html_().count("<tr>") - 1 == 50
    assert str(found).endswith("... and 10 more: records() has them all")
    assert "custom on 10 ranks" in str(found)
    assert max(len(line) for line in str(found).splitlines()) <= 100


def test_tables_go_to_pandas_where_it_is_installed_and_its_absence_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = problem(2)[3].explain("t0")
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=lambda records: ("frame", records)))  # type: ignore[arg-type]
    assert found.to_pandas() == ("frame", found.records())
    monkeypatch.setitem(sys.modules, "pandas", None)  # type: ignore[arg-type]
    with pytest.raises(ModuleNotFoundError, match=r"to_pandas needs the package pandas\. Fix: pip install pandas"):
        found.to_pandas()


def test_the_planner_of_a_plan_is_pickled_with_it_but_not_compared() -> None:
    tables, _ = random_tables(3, 1)
    tables[1].init_fn = lambda weight: weight.zero_()  # which pickle does not take
    plan = best_plan(tables, GPUS)
    text = str(plan.explain("t1"))
    for same in (pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan), plan.resolved(tables, 8)):
        assert same == plan
        assert str(same.explain("t1")) == text
    read = ShardingPlan.from_json(plan.to_json())
    assert read == plan
    assert read.planned is None
    assert "planned" not in repr(plan)
    assert tables[1].init_fn is not None


def test_a_plan_without_a_planner_takes_one_or_names_the_argument() -> None:
    tables, workload, _, plan = problem()
    read = ShardingPlan.from_json(plan.to_json())
    fresh = EmbeddingShardingPlanner(GPUS, workload=workload)
    unplanned = r"no planner made this plan.*pass planner=.*tables=\[\.\.\.\]"
    asks = [lambda: read.explain("t0"), lambda: read.diff(read), lambda: read.why_not({"t0": "row_wise"})]
    assert not_refused(((ask, unplanned) for ask in asks), PlanError) == []
    with pytest.raises(PlanError, match=r"no planner made this plan.*pass tables="):
        read.explain("t0", planner=fresh)
    text = str(plan.explain("t0"))
    assert str(plan.explain("t0", planner=fresh)) == text
    assert str(read.explain("t0", planner=fresh, tables=tables)) == text
    assert str(read.explain("t0", planner=fresh, tables={"": tables})) == text


def test_wrong_questions_are_refused_by_name() -> None:
    plan: Any = problem(3)[3]
    junk: list[Any] = [{}, None, 7, "t0", {"t0": 7}, {"t0": []}]
    assert not_refused((partial(plan.why_not, one), r"why_not takes") for one in junk) == []
    refusals: list[tuple[Any, str]] = [
        *((partial(plan.diff, one), "diff takes another ShardingPlan") for one in (None, 7, {}, "t0")),
        (lambda: plan.explain("t9"), "no table 't9'"),
        (lambda: plan.why_not({"t0": "row_wide"}), "did you mean 'row_wise'"),
        (lambda: plan.why_not({"x": "row_wise"}), "no table 'x'"),
        (lambda: plan.explain("t0", planner=7), "planner must be an EmbeddingShardingPlanner, got 7"),
    ]
    assert not_refused(refusals, PlanError) == []


def test_tables_of_one_name_in_two_modules_are_told_apart_by_their_paths() -> None:
    planner = EmbeddingShardingPlanner(GPUS)
    found = {"left": [table("t", 1000, 16)], "right": [table("t", 500_000, 64)]}
    plan = planner._plan(found)
    with pytest.raises(PlanError, match=r"several modules have a table 't'.*'left.t' or 'right.t'"):
        plan.explain("t")
    assert plan.explain("right.t").sharding == plan.plan["right"]["t"]
    assert [change.table for change in plan.diff(plan).tables] == ["left.t", "right.t"]
