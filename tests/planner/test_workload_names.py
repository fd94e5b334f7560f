"""A workload that names a table or a feature that no table has is refused wherever it meets tables."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch import nn

import recshard_lab as rs
from recshard_lab import lab
from recshard_lab.distributed import EmbeddingCollectionSharder
from recshard_lab.planner import AccessProfile, compare_servers, sweep, tier_shares
from tests.refusals import not_refused

TABLES = [
    rs.EmbeddingBagConfig(2_000, 64, name="movies", feature_names=["seen", "liked"]),
    rs.EmbeddingBagConfig(1_000, 64, name="users", feature_names=["user"]),
]
RANKS = rs.Topology(2)
PROFILE = AccessProfile(uses=(1.0, 6.0), rows=(4.0, 1.0))
TYPO = rs.Workload(64, pooling_factors={"sen": 100.0})
NO_RANKS: Any = None  # refused before they are used


class Model(nn.Module):
    """Pooled tables, and a sequence table."""

    def __init__(self) -> None:
        super().__init__()
        self.pooled = rs.EmbeddingBagCollection(TABLES, device="meta")
        basket = rs.EmbeddingConfig(500, 16, name="basket", feature_names=["bought"])
        self.sequences = rs.EmbeddingCollection([basket], device="meta")


def planner(load: rs.Workload) -> rs.EmbeddingShardingPlanner:
    return rs.EmbeddingShardingPlanner(RANKS, workload=load)


def made() -> rs.ShardingPlan:
    return rs.plan(TABLES, RANKS)


def recorded(load: rs.Workload) -> object:
    plan = made()
    plan.planned = planner(load).record(plan, TABLES)
    return plan.estimate


ENTRIES: dict[str, Callable[[rs.Workload], object]] = {
    "rs.plan": lambda load: rs.plan(TABLES, RANKS, workload=load),
    "rs.plan of a module": lambda load: rs.plan(Model(), RANKS, workload=load),
    "plan": lambda load: planner(load).plan(Model()),
    "plan with sharders": lambda load: planner(load).plan(Model(), [EmbeddingCollectionSharder()]),
    "collective_plan": lambda load: planner(load).collective_plan(Model()),
    "plan_tables": lambda load: planner(load).plan_tables(TABLES),
    "record": recorded,
    "latency": lambda load: rs.plan(TABLES, RANKS, workload=load, cost_model="latency"),
    "torchrec": lambda load: rs.plan(TABLES, RANKS, workload=load, cost_model="torchrec"),
    "estimate": lambda load: rs.estimate(made(), TABLES, RANKS, load),
    "tier_shares": lambda load: tier_shares(made(), TABLES, RANKS, load),
    "compare_servers": lambda load: compare_servers(TABLES, load, workers=[2]),
    "sweep": lambda load: sweep(TABLES, topology="h100", world_size=[8], workload=load),
    "compare_plans": lambda load: lab.compare_plans(TABLES, RANKS, {"one": "planner", "two": made()}, load),
    "measure_plan": lambda load: lab.measure_plan(NO_RANKS, made(), TABLES, load),
    "random_batch": lambda load: lab.random_batch(TABLES, load),
    "PlanCompare": lambda load: lab.PlanCompare(TABLES, RANKS, load),
    "SkewScale": lambda load: lab.SkewScale(TABLES, RANKS, load),
    "DrawingBoard": lambda load: lab.DrawingBoard(TABLES[0], RANKS, load),
}


def test_every_entry_refuses_a_name_that_no_table_has() -> None:
    said = r"^pooling_factors names 'sen', which is not a feature \(did you mean 'seen"
    assert not_refused({name: (partial(entry, TYPO), said) for name, entry in ENTRIES.items()}, rs.PlanError) == []


def test_the_error_names_the_argument_and_the_nearest_name() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"pooling_factors": {"seem": 2.0}}, "not a feature (did you mean 'seen'?). Fix: use one of seen, liked,"),
        (
            {"pooling_factors": {"movies": 2.0}},
            "pooling_factors names 'movies', which is a table, but its keys are features. Fix: use its features 'seen' "
            "and 'liked'",
        ),
        ({"unique_fraction": {"movie": 0.5}}, "unique_fraction names 'movie', which is not a table (did you mean 'mov"),
        ({"zipf_alpha": {"user": 1.0}}, "zipf_alpha names 'user', which is a feature, but its keys are tables. Fix: "),
        ({"access": {"xyz": PROFILE}}, "access names 'xyz', which is not a table. Fix: use one of movies, users"),
        ({"frequency_ordered": ["user"], "zipf_alpha": 1.0}, "Fix: use its table 'users'"),
    ]
    planned = partial(rs.plan, TABLES, RANKS)
    refusals = [(partial(planned, workload=rs.Workload(64, **own)), re.escape(words)) for own, words in cases]
    assert not_refused(refusals, rs.PlanError) == []


def test_entries_of_all_tables_count_in_every_answer() -> None:
    load = rs.Workload(
        64,
        pooling_factors={"seen": 100.0, "user": 2.0},
        unique_fraction={"users": 0.5},
        zipf_alpha={"movies": 1.1, "users": 1.0},
        access={"users": PROFILE},
        frequency_ordered=["movies", "users"],
    )
    plan = rs.plan(TABLES, RANKS, workload=load)
    assert plan.estimate.step_ms > 1.2 * rs.plan(TABLES, RANKS, workload=rs.Workload(64)).estimate.step_ms
    for table in ("movies", "users"):
        assert plan.explain(table).step_ms == pytest.approx(plan.estimate.step_ms)
        assert plan.why_not({table: "row_wise"}).after is not None


def test_a_workload_may_describe_collections_that_other_sharders_plan() -> None:
    load = rs.Workload(64, pooling_factors={"seen": 100.0, "bought": 30.0}, zipf_alpha={"basket": 1.1})
    part = planner(load).plan(Model(), [EmbeddingCollectionSharder()])
    alone = rs.Workload(64, pooling_factors={"bought": 30.0}, zipf_alpha={"basket": 1.1})
    assert list(part.tables()) == ["basket"]
    assert part.estimate.step_ms == planner(alone).plan(Model().sequences).estimate.step_ms


def test_for_tables_keeps_the_entries_of_a_part() -> None:
    common: dict[str, Any] = {"unique_fraction": {"users": 0.5}, "zipf_alpha": 1.0, "optimizer": "adam"}
    load = rs.Workload(
        pooling_factors={"seen": 3.0, "user": 2.0}, access={"movies": PROFILE}, frequency_ordered=["movies", "users"],
        **common,
    )  # fmt: skip
    part = load.for_tables(TABLES[1:])
    assert part == rs.Workload(pooling_factors={"user": 2.0}, access={}, frequency_ordered=["users"], **common)
    assert rs.plan(TABLES[1:], RANKS, workload=part).estimate.fits


def test_a_workload_of_more_tables_is_refused_with_the_call_that_keeps_a_part() -> None:
    load = rs.Workload(pooling_factors={"seen": 3.0, "liked": 3.0, "user": 2.0})
    with pytest.raises(rs.PlanError, match=r"'seen', which is not a feature of these.*Fix: .*for_tables\(tables\)"):
        rs.plan(TABLES[1:], RANKS, workload=load)
