"""Errors of the planner if no plan fits or a constraint cannot be met, and how fast they come."""

import pickle
import re
from dataclasses import replace
from typing import Any

import pytest

import recshard_lab as rs
from recshard_lab.embedding.configs import EmbeddingBagConfig
from recshard_lab.planner import EmbeddingShardingPlanner
from recshard_lab.planner.answers.refusals import PlanDoesNotFit
from recshard_lab.sharding import ParameterConstraints, PlanError, Topology
from tests.grid import grid
from tests.planner.problems import best_plan, random_tables, searches, table
from tests.refusals import not_refused


def test_an_error_names_the_table_and_changes_with_which_it_fits() -> None:
    movies = [table("movies", 40_000_000, 128)]
    topology = Topology(2, "cuda", hbm_cap=16 * 10**9, reserve_fraction=0)
    only = {"movies": ParameterConstraints(sharding_types=["table_wise"])}
    with pytest.raises(PlanError) as caught:
        best_plan(movies, topology, constraints=only)
    text = str(caught.value)
    assert (
        "table 'movies' (40,000,000 x 128, 20.5 GB) does not fit on any rank with table_wise: a rank has 16.0 GB free"
        in text
    )
    assert "allow row_wise on 2 ranks" in text
    assert "fp16 weights" in text
    more = {"movies": ParameterConstraints(sharding_types=["table_wise", "row_wise"])}
    best_plan(movies, topology, constraints=more)
    named = re.search(r"hbm_cap=([\d_]+)", text)
    larger = Topology(2, "cuda", hbm_cap=int(named[1]), reserve_fraction=0)
    best_plan(movies, larger, constraints=only)


def test_an_error_without_explanation_names_no_change_and_searches_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tables, workload = random_tables(26, 1)
    searched = searches(monkeypatch)
    with pytest.raises(PlanError, match=r"does not fit on any rank with any scheme .* after the reserve\.$"):
        best_plan(tables, Topology(8, "cuda", hbm_cap=10**9), workload=workload, explain=False)
    assert len(searched) == 1


def test_too_little_memory_and_impossible_constraints_are_refused() -> None:
    movies, four = [table("movies", 100, 8)], [table(f"t{i}", 1_000_000, 64) for i in range(4)]  # 1.02 GB
    missing = r"All tables need at least 1.0 GB \(.*\); 2 ranks have 400.0 MB: 6\d\d.\d MB too little"
    replicas = ParameterConstraints(sharding_types=["data_parallel"], ranks=[0])
    refusals: list[tuple[Any, str]] = [
        (lambda: best_plan(four, Topology(2, "cuda", hbm_cap=0)), r"does not fit .*Fix: .*hbm_cap="),
        (lambda: best_plan(four, Topology(2, ddr_cap=2 * 10**8, reserve_fraction=0)), missing),
        (lambda: rs.plan(movies, 2, movies=replicas), "cannot be split by data_parallel on ranks"),
        (lambda: rs.plan(movies, 2, movies=ParameterConstraints(ranks=[7])), "rank 7 does not exist"),
        (lambda: rs.plan(movies, 2, movies="row_wide"), "did you mean 'row_wise'"),
        (lambda: best_plan(movies, Topology(2), constraints={"movie": replicas}), "'movie' that does not exist"),
        (lambda: best_plan([], Topology(2)), "no tables"),
    ]
    assert not_refused(refusals, PlanError) == []
    refusals = [
        (lambda: ParameterConstraints(sharding_types=[]), "at least one entry"),
        (lambda: ParameterConstraints(compute_kernels=["fast"]), "'fast' does not exist"),
    ]
    assert not_refused(refusals) == []


# ---- the change that a refusal names, and 10% less of it ----

TIGHT = {
    "table-wise alone": (1, 2, "cuda", 0.6, {"t0": ParameterConstraints(sharding_types=["table_wise"])}, {}),
    "a few tables, CPU": (6, 2, "cpu", 0.9, {}, {}),
    "many tables": (26, 8, "cuda", 0.9, {}, {}),
    "almost enough": (26, 8, "cuda", 1.13, {}, {}),
    "two hosts": (12, 8, "cuda", 0.5, {}, {"local_world_size": 4}),
    "dense layers": (4, 2, "cuda", 0.7, {}, {"dense": 2_000_000}),
    "forbidden ranks": (8, 4, "cuda", 1.2, {f"t{i}": ParameterConstraints(forbidden_ranks=[0]) for i in range(8)}, {}),
    "one rank": (3, 1, "cuda", 0.8, {}, {}),
    "columns too wide": (
        1, 4, "cuda", 1.4, {"t0": ParameterConstraints(sharding_types=["column_wise"], min_partition=64)}, {},
    ),
}  # fmt: skip


def refused(name: str, **more: Any) -> tuple[PlanDoesNotFit, EmbeddingShardingPlanner, list[EmbeddingBagConfig]]:
    """A planner whose memory is too small, its tables and its refusal."""
    count, ranks, device, share, constraints, rest = TIGHT[name]
    tables, workload = random_tables(count, 3)
    tables[0] = replace(tables[0], num_embeddings=2_000_000, embedding_dim=128)
    rest = dict(rest)
    workload = replace(workload, dense_parameters=rest.pop("dense", 0))
    cap = int(share * sum(table.weight_bytes for table in tables) / ranks)
    top = Topology(ranks, device, **{"hbm_cap": cap, "ddr_cap": cap, "cores_per_host": 4, **rest, **more})
    planner = EmbeddingShardingPlanner(top, constraints=constraints, workload=workload)
    with pytest.raises(PlanDoesNotFit) as caught:
        planner.plan_tables(tables)
    return caught.value, planner, tables


def fits(planner: EmbeddingShardingPlanner, tables: list[EmbeddingBagConfig], **figures: Any) -> bool:
    try:
        best_plan(
            tables,
            replace(planner.topology, **figures),
            constraints=planner.constraints,
            workload=planner.workload,
            explain=False,
        )
    except PlanError:
        return False
    return True


@pytest.mark.parametrize(*grid(name=list(TIGHT), gate={"name": {*TIGHT} - {"a few tables, CPU", "two hosts"}}))
def test_the_change_that_a_refusal_names_fits_and_10_percent_less_does_not(name: str) -> None:
    error, planner, tables = refused(name)
    text, top = str(error), planner.topology
    argument = "hbm_cap" if top.compute_device == "cuda" else "ddr_cap"
    memory = int(re.findall(rf"Topology\({argument}=([\d_]+)\)", text)[0])
    assert len(str(memory).rstrip("0")) <= 2
    assert fits(planner, tables, **{argument: memory})
    assert not fits(planner, tables, **{argument: int(0.9 * memory)})
    (gb,) = re.findall(r"--memory-gb ([\d.]*\d)", error.worded("command_line"))
    assert fits(planner, tables, **{argument: int(float(gb) * 1e9)})
    assert not fits(planner, tables, **{argument: int(0.9 * float(gb) * 1e9)})
    widget, unit = re.findall(r"Memory per rank: ([\d.]+) ([KMG])B or more", error.worded("widget"))[0]
    assert round(float(widget) * {"K": 1e3, "M": 1e6, "G": 1e9}[unit]) == memory
    assert "hbm_cap" not in error.worded("widget") + error.worded("command_line")
    for share in re.findall(r"reserve_fraction=([\d.]+)\)", text):
        assert fits(planner, tables, reserve_fraction=float(share))
        assert not fits(planner, tables, reserve_fraction=float(share) + 0.001)
    for ranks in map(int, re.findall(r"world_size=(\d+)\)", text)):
        step = 1 if top.num_nodes == 1 else top.local_world_size
        assert fits(planner, tables, world_size=ranks, local_world_size=ranks if step == 1 else step)
        less = ranks - max(step, -(-ranks // 10 // step) * step)
        assert not fits(planner, tables, world_size=less, local_world_size=less if step == 1 else step)
        assert f"--ranks {ranks}" in error.worded("command_line")
        assert f"Ranks: {ranks} or more" in error.worded("widget")
    for columns in map(int, re.findall(r"min_partition=(\d+)", text)):
        for tried, good in ((columns, True), (columns + 1, False)):
            constraint = replace(planner.constraints["t0"], min_partition=tried)
            other = EmbeddingShardingPlanner(top, constraints={"t0": constraint}, workload=planner.workload)
            assert fits(other, tables) is good


@pytest.mark.nightly
def test_the_kinds_of_change_all_occur() -> None:
    text = " ".join(str(refused(name)[0]) for name in TIGHT)
    assert all(kind in text for kind in ("hbm_cap=", "ddr_cap=", "reserve_fraction=", "world_size=", "min_partition="))


def test_host_memory_that_is_too_small_names_the_smallest_that_fits() -> None:
    tables = [table(f"t{i}", 1_000_000, 64) for i in range(3)]  # 256 MB each
    constraint = {each.name: ParameterConstraints(compute_kernels=["fused_uvm"]) for each in tables}
    top = Topology(2, "cuda", hbm_cap=10**9, ddr_cap=2 * 10**8)
    planner = EmbeddingShardingPlanner(top, constraints=constraint)
    with pytest.raises(PlanDoesNotFit, match=r"would hold .* in host memory: it has 170.0 MB") as caught:
        planner.plan_tables(tables)
    (cap,) = re.findall(r"Topology\(ddr_cap=([\d_]+)\)", str(caught.value))
    assert fits(planner, tables, ddr_cap=int(cap))
    assert not fits(planner, tables, ddr_cap=int(0.9 * int(cap)))


def test_the_needed_memory_is_named_part_by_part() -> None:
    error, planner, _ = refused("dense layers")
    found = re.search(
        r"All tables need at least ([\d.]+) GB \(([\d.]+) GB of weights and optimizer state, ([\d.]+) MB of "
        r"buffers, ([\d.]+) MB of dense layers\)",
        str(error),
    )
    dense = planner.workload.dense_parameters * planner.workload.dense_bytes_per_parameter * 2 / 1e6
    assert float(found[4]) == pytest.approx(dense, rel=0.01)
    assert float(found[1]) * 1000 == pytest.approx(float(found[2]) * 1000 + float(found[3]) + float(found[4]), rel=0.05)


def test_a_refusal_with_its_reasons_searches_at_most_16_times(monkeypatch: pytest.MonkeyPatch) -> None:
    tables, workload = random_tables(26, 1)
    searched = searches(monkeypatch)
    with pytest.raises(PlanError, match="Fix: "):
        best_plan(tables, Topology(8, "cuda", hbm_cap=5 * 10**9), workload=workload)
    assert 1 < len(searched) <= 16


def test_a_refusal_survives_pickling_which_collective_plans_do() -> None:
    error = refused("a few tables, CPU")[0]
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
