"""Tables that share their ranks, and named groups of ranks: kept by both solvers, refused where they cannot be."""

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest

import recshard_lab as rs
from recshard_lab.planner import CostModel, Workload, estimate
from recshard_lab.planner.search.colocated import Bundle, bundled, groups_of
from recshard_lab.planner.search.options import Placement, options_of
from recshard_lab.sharding import ParameterConstraints, PlanError, Shard, Topology, scheme_names
from tests.grid import examples, grid
from tests.planner.problems import best_plan, random_problem, random_tables, table
from tests.refusals import not_refused

TOP = Topology(8, "cuda", hbm_cap=80 * 10**9, local_world_size=4, device_groups={"fast": [0, 1], "slow": range(2, 8)})


def ranks_of(plan: Any, name: str) -> list[int]:
    return [shard.rank for shard in plan.tables()[name].shards]


@pytest.mark.parametrize(*grid(seed=range(examples(2, 4)), solver=["greedy", "exact"], gate={"seed": [1]}))
def test_tables_that_are_to_share_their_ranks_do_under_both_solvers(solver: str, seed: int) -> None:
    tables, topology, workload = random_problem(seed)
    names = [config.name for config in tables]
    wishes = {names[0]: ParameterConstraints(colocate_with=[names[3]])}
    wishes[names[3]] = ParameterConstraints(colocate_with=[names[5]])
    plan = best_plan(tables, topology, workload=workload, constraints=wishes, solver=solver, time_limit_s=0.5)
    plan.validate(tables, topology.world_size)
    assert ranks_of(plan, names[0]) == ranks_of(plan, names[3]) == ranks_of(plan, names[5])
    told, again = plan.estimate, estimate(plan, tables, topology, workload)
    assert again.fits
    assert told.step_ms == pytest.approx(again.step_ms)
    assert told.lower_bound <= told.step_ms * (1 + 1e-9)


@pytest.mark.parametrize("scheme", [name for name in scheme_names() if name != "flex_shard"])  # needs row_shares
def test_every_scheme_can_be_shared(scheme: str) -> None:
    tables, workload = random_tables(6, 1)
    wishes = {name: ParameterConstraints(sharding_types=[scheme]) for name in ("t1", "t4")}
    wishes["t4"].colocate_with = ["t1"]
    plan = best_plan(tables, TOP, workload=workload, constraints=wishes)
    assert {plan.tables()[name].sharding_type for name in ("t1", "t4")} == {scheme}
    assert ranks_of(plan, "t1") == ranks_of(plan, "t4")


def test_a_bundle_costs_what_its_tables_do() -> None:
    tables, workload = random_tables(3, 2)
    model = CostModel(tables, TOP, workload)
    (bundles,) = bundled(tables, options_of(model, tables, {}), [[0, 1, 2]])
    assert {option.route for option in bundles} == {"direct", "reduce_scatter", "two_hop"}
    for option in bundles[:: max(1, len(bundles) // 40)]:
        assert isinstance(option, Bundle)
        chosen = (option.proposal.assignments or [range(len(option.of))])[0]
        together = Placement(option, tuple(chosen)).loads(TOP)
        apart = [Placement(part, tuple(chosen)).loads(TOP) for part in option.parts]
        np.testing.assert_allclose(together, sum(apart), rtol=1e-12)
        np.testing.assert_allclose(
            option.kinds[:, option.of].sum(axis=1), sum(p.kinds[:, p.of].sum(axis=1) for p in option.parts)
        )


def test_the_exact_plan_of_two_that_share_is_the_best_of_all_that_do() -> None:
    tables, top = [table("a", 40_000, 64), table("b", 9_000, 16), table("c", 300_000, 32)], Topology(2, "cuda")
    workload = Workload(1024, {"a_id": 20.0, "b_id": 9.0, "c_id": 25.0})
    wishes = {"a": ParameterConstraints(colocate_with=["b"])}
    plan = best_plan(tables, top, workload=workload, constraints=wishes, solver="exact")
    model = CostModel(tables, top, workload)
    best = np.inf
    every = [
        [
            (option, ranks)
            for option in choices
            for ranks in option.proposal.assignments or itertools.product(range(2), repeat=len(option.of))
        ]
        for choices in options_of(model, tables, {})
    ]
    for one, other, third in itertools.product(*every):
        if one[1] == other[1]:
            loads = sum(Placement(option, tuple(ranks)).loads(top) for option, ranks in (one, other, third))
            best = min(best, float(model.step_of(model.phases(loads))))
    assert plan.estimate.step_ms == pytest.approx(best, rel=1e-5)


def test_who_shares_with_whom_is_closed_over_all_wishes() -> None:
    tables = [table(name, 10, 4) for name in "abcde"]
    wishes = {"b": ParameterConstraints(colocate_with=["e"]), "d": ParameterConstraints(colocate_with=["b", "e"])}
    assert groups_of(tables, wishes) == [[0], [1, 3, 4], [2]]


def test_wishes_to_share_that_cannot_be_are_refused() -> None:
    tables = [table("a", 1_000, 16), table("b", 1_000, 16)]

    with_b = partial(ParameterConstraints, colocate_with=["b"])
    cases: list[tuple[dict[str, Any], str]] = [
        ({"a": ParameterConstraints(colocate_with=["bb"])}, "names 'bb', which does not exist .did you mean 'b'"),
        ({"a": ParameterConstraints(colocate_with=["a"])}, "colocate_with names 'a', which is that table itself"),
        (
            {"a": with_b(device_group="fast"), "b": ParameterConstraints(device_group="slow")},
            r"'a' and 'b' are to share their ranks but cannot: .* on ranks \[0, 1\]; .* on ranks \[2, 3, .* in common",
        ),
        (
            {"a": with_b(sharding_types=["table_wise"]), "b": ParameterConstraints(sharding_types=["data_parallel"])},
            "cannot: 'a' in 1 pieces on ranks .*; 'b' in 8 pieces .*allow table_wise for all of them",
        ),
    ]
    made = partial(best_plan, tables, TOP)
    assert not_refused(((partial(made, constraints=own), said) for own, said in cases), PlanError) == []
    with pytest.raises(ValueError, match="colocate_with must be a list of names of tables, got 'b'"):
        ParameterConstraints(colocate_with="b")


def test_tables_too_large_to_share_a_rank_are_refused_with_what_fits() -> None:
    movies = [table("a", 5_000_000, 128), table("b", 5_000_000, 128)]  # 2.6 GB each
    top = Topology(2, "cuda", hbm_cap=4 * 10**9, reserve_fraction=0)
    wish = {name: ParameterConstraints(sharding_types=["table_wise"]) for name in "ab"}
    best_plan(movies, top, constraints=wish)
    wish["a"].colocate_with = ["b"]
    said = "with '[ab]' on the same ranks .5.1 GB together., does not .*remove colocate_with= .*, or .*hbm_cap="
    with pytest.raises(PlanError, match=said):
        best_plan(movies, top, constraints=wish)


@pytest.mark.parametrize("solver", ["greedy", "exact"])
def test_tables_of_a_device_group_stay_in_it(solver: str) -> None:
    tables, workload = random_tables(12, 3)
    wishes = {"t0": ParameterConstraints(device_group="fast"), "t7": ParameterConstraints(device_group="slow")}
    wishes["t5"] = ParameterConstraints(device_group="slow", forbidden_ranks=[2, 3])
    plan = best_plan(tables, TOP, workload=workload, constraints=wishes, solver=solver, time_limit_s=0.5)
    assert set(ranks_of(plan, "t0")) <= {0, 1}
    assert set(ranks_of(plan, "t7")) <= set(range(2, 8))
    assert set(ranks_of(plan, "t5")) <= set(range(4, 8))


def test_device_groups_that_cannot_be_are_refused() -> None:
    tables = [table("movies", 10_000_000, 128)]  # 5.1 GB

    small = Topology(4, "cuda", hbm_cap=2 * 10**9, reserve_fraction=0, device_groups={"fast": [0, 1]})
    whole = [Shard(3, (0, 10_000_000), (0, 128))]
    unknown = "'movies': device_group 'fats' does not exist .did you mean 'fast'.*named groups: fast, slow"
    cases: list[tuple[Topology, dict[str, Any], str]] = [
        (TOP, {"device_group": "fats"}, unknown),
        (TOP, {"ranks": [4, 5]}, "ranks .4, 5. are outside device_group 'fast' .ranks .0, 1"),
        (TOP, {"forbidden_ranks": [0, 1]}, "all of the ranks .0, 1. .* are forbidden"),
        (TOP, {"shards": whole}, "shards are on ranks .3., outside device_group 'fast'"),
        (small, {}, "does not fit .*allow ranks outside device_group 'fast'"),
    ]
    for top, wish, said in cases:
        with pytest.raises(PlanError, match=said):
            rs.plan(tables, top, movies=ParameterConstraints(**{"device_group": "fast", **wish}))
    for groups in ({"cuda": [0]}, {"fast": []}, {"fast": [8]}, {"fast": "01"}, {1: [0]}, [0, 1]):
        with pytest.raises(ValueError, match="group"):
            Topology(8, "cuda", device_groups=groups)  # type: ignore[arg-type]
