"""Constraints of one table: each is met, and an impossible one raises an error with a fix."""

from functools import partial
from typing import Any

import pytest

from recshard_lab.planner import Workload, estimate
from recshard_lab.sharding import (
    ParameterConstraints,
    ParameterSharding,
    PlanError,
    Shard,
    ShardingPlan,
    Topology,
    scheme_names,
)
from tests.planner.problems import best_plan, random_tables, table
from tests.refusals import not_refused

GPUS = Topology(8, "cuda", hbm_cap=80 * 10**9, local_world_size=4)


def planned(topology: Topology = GPUS, count: int = 6, **constraint: Any) -> tuple[Any, Any]:
    """The shards of one constrained table among others, and of all tables."""
    tables, workload = random_tables(count, 1)
    plan = best_plan(tables, topology, workload=workload, constraints={"t3": ParameterConstraints(**constraint)})
    assert estimate(plan, tables, topology, workload).fits
    return plan.tables()["t3"], plan.tables()


@pytest.mark.parametrize("solver", ["greedy", "exact"])
def test_given_shards_stay_where_they_are(solver: str) -> None:
    tables, workload = random_tables(6, 1)
    rows, cols = tables[3].num_embeddings, tables[3].embedding_dim
    shards = [Shard(5, (0, 10), (0, cols)), Shard(2, (10, rows), (0, 8)), Shard(5, (10, rows), (8, cols))]
    constraint = {"t3": ParameterConstraints(shards=shards)}
    plan = best_plan(tables, GPUS, workload=workload, constraints=constraint, solver=solver, time_limit_s=1)
    assert list(plan.tables()["t3"].shards) == shards
    plan.validate(tables, 8)


def test_forbidden_ranks_hold_nothing_and_forbidden_schemes_are_not_taken() -> None:
    everywhere = {"data_parallel", "flex_shard"}
    for scheme in (None, *(name for name in scheme_names() if name not in everywhere)):
        constraint = {} if scheme is None else {"sharding_types": [scheme]}
        mine, _ = planned(forbidden_ranks=[0, 1, 2, 6], **constraint)
        assert not {shard.rank for shard in mine.shards} & {0, 1, 2, 6}, scheme
    taken = set()
    for _ in {*scheme_names()} - everywhere:
        mine, _ = planned(forbidden_sharding_types=sorted(taken))
        assert mine.sharding_type not in taken
        taken.add(mine.sharding_type)


def test_the_device_group_of_a_topology_is_allowed() -> None:
    planned(device_group="cuda")


def test_constraints_that_exclude_each_other_are_refused() -> None:
    shards, rows = [Shard(0, (0, 1), (0, 4))], ["row_wise"]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"sharding_types": rows, "forbidden_sharding_types": rows}, r"'t3': every scheme .* .row_wise. is forbidden"),
        ({"ranks": [1], "forbidden_ranks": [1]}, r"all of the ranks \[1\].* are forbidden"),
        ({"ranks": [0, 8]}, r"'t3': ranks=\[0, 8\]: rank 8 does not exist with world_size 8. Fix: use ranks below 8"),
        ({"forbidden_ranks": [0, 8]}, r"'t3': forbidden_ranks=\[0, 8\]: rank 8 does not exist with world_size 8"),
        ({"forbidden_sharding_types": ["row_wide"]}, "did you mean 'row_wise'"),
        ({"shards": shards}, "no shard covers rows"),
        ({"device_group": "cpu"}, "device_group 'cpu' does not exist: all ranks are 'cuda'"),
    ]
    assert not_refused(((partial(planned, **wish), said) for wish, said in cases), PlanError) == []
    with pytest.raises(ValueError, match="shards and ranks are mutually exclusive"):
        ParameterConstraints(shards=shards, ranks=[0])


def test_a_constraint_without_which_the_table_fits_is_named() -> None:
    movies = [table("movies", 10_000_000, 128)]  # 5.1 GB
    small = Topology(4, "cuda", hbm_cap=3 * 10**9, reserve_fraction=0)
    whole = (0, 10_000_000), (0, 128)
    others = [name for name in scheme_names() if name != "table_wise"]
    for constraint, said in [
        ({"shards": [Shard(0, *whole)]}, "does not fit on the ranks of its constraint: .*Fix: remove its shards="),
        ({"ranks": [2]}, r"allow more ranks than \[2\]"),
        ({"forbidden_ranks": [0, 1, 2]}, r"allow a rank of forbidden_ranks=\[0, 1, 2\]"),
        ({"forbidden_sharding_types": others}, "with table_wise: .*allow a scheme of forbidden_sharding_types="),
    ]:
        with pytest.raises(PlanError, match=said):
            best_plan(movies, small, constraints={"movies": ParameterConstraints(**constraint)})  # type: ignore[arg-type]


def test_numbers_that_no_plan_can_use_are_refused_by_name() -> None:
    wrong: dict[str, list[Any]] = {
        "min_partition": [float("nan"), 1.5, True], "ranks": [[0.5], [True]], "forbidden_ranks": [[1.5]],
        "pooling_factors": [[float("inf")], ["many"]], "batch_sizes": [[1.5]], "num_poolings": [[float("nan")]],
    }  # fmt: skip
    for field, value in ((field, value) for field, values in wrong.items() for value in values):
        with pytest.raises(ValueError, match=rf"{field} must be .*whole|{field} must be finite"):
            ParameterConstraints(**{field: value})


def test_numbers_and_names_that_no_plan_has_are_refused() -> None:
    movies = table("movies", 100, 8)
    text = best_plan([movies], Topology(1)).to_json().replace('"fused"', '"__class__"')
    kernel = r"compute_kernel '__class__' does not exist"
    refusals: list[tuple[Any, str]] = [
        (lambda: Workload(batch_size=0), r"batch_size must be a whole number from 1 up, got 0\. Fix: "),
        (lambda: Topology(10**6), r"world_size must be at most 4,096, got 1000000\. Fix: world_size=4096"),
        (lambda: best_plan([movies, movies], Topology(2)), r"two tables are named 'movies'.*Fix: rename one"),
        (lambda: ParameterSharding("table_wise", "__class__"), kernel + ".*Fix: use one of dense, fused"),
        (lambda: ShardingPlan.from_json(text), r"\['movies'\]: " + kernel),
    ]
    assert not_refused(refusals) == []
