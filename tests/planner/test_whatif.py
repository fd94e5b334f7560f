"""Sweeps: every point has its plan, no point is dropped, and all output is labelled as simulated."""

import csv
import random
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recshard_lab.comm import ReplicaGrid
from recshard_lab.lab import export, views
from recshard_lab.planner import Sweep, SweepPoint, Workload, estimate, sweep
from recshard_lab.planner.model.cost import dense_step
from recshard_lab.planner.sweep.points import OBJECTIVES, undominated
from recshard_lab.planner.sweep.replicas import Replicated
from recshard_lab.sharding import Topology
from tests.grid import examples
from tests.planner.problems import best_plan, random_tables, table
from tests.refusals import not_refused

TABLES, LOAD = random_tables(8, 2)


def test_every_point_is_the_planners_estimate_of_that_combination() -> None:
    axes: dict[str, Any] = {
        "world_size": [8, 16],
        "batch_size": [128, 1024],
        "codecs": ["fp32", "fp16/bf16"],
        "pipeline": ["none", "prefetch"],
    }
    found = sweep(TABLES, LOAD, topology="h100", hbm_cap=[40 * 10**9], optimizer="exact_row_wise_adagrad", **axes)
    combinations = list(product(*axes.values()))
    assert [(p.world_size, p.batch_size, p.codecs, p.pipeline) for p in found.points] == combinations
    for point, (ranks, batch, codecs, pipeline) in zip(found.points, combinations, strict=True):
        top = Topology.preset(f"h100x{ranks}", hbm_cap=40 * 10**9)
        load = replace(LOAD, batch_size=batch, codecs=codecs, pipeline=pipeline, optimizer="exact_row_wise_adagrad")
        plan = best_plan(TABLES, top, workload=load)
        truth = estimate(plan, TABLES, top, load)
        assert point.step_ms == pytest.approx(truth.step_ms)
        assert point.memory_bytes == pytest.approx(truth.memory_bytes.sum(axis=1).max())
        assert point.samples_per_s == pytest.approx(ranks * batch / truth.step_ms * 1000)
        assert point.sync_ms == 0
        assert sum(point.phases_ms.values()) == pytest.approx(truth.plain_step_ms)


def test_ranks_of_a_topology_are_swept_by_its_figures_per_rank() -> None:
    tables, two = TABLES[:2], Topology(2)
    load = LOAD.for_tables(tables)
    (point,) = sweep(tables, load, topology=Topology(4), world_size=[2]).points
    truth = estimate(best_plan(tables, two, workload=load), tables, two, load)
    assert point.step_ms == pytest.approx(truth.step_ms)


def test_weak_scaling_grows_the_batch_and_strong_scaling_shares_it() -> None:
    weak = sweep(TABLES, LOAD, world_size=[8, 32], batch_size=256)
    strong = sweep(TABLES, LOAD, world_size=[8, 32], global_batch_size=8192)
    assert [p.global_batch_size for p in weak.points] == [2048, 8192]
    assert [p.batch_size for p in strong.points] == [1024, 256]
    assert strong.points[1].step_ms == pytest.approx(weak.points[1].step_ms)
    assert "batch 8,192 of all ranks" in " ".join(str(strong).split())


def test_points_without_a_plan_stay_with_their_reason() -> None:
    huge = [table("huge", 400_000_000, 128), table("small", 1000, 16)]
    found = sweep(huge, topology="h100", world_size=[2, 8, 12], global_batch_size=4096, hbm_cap=[80 * 10**9])
    assert [(p.fits, p.problem) for p in found.points] == [(False, "does not fit"), (True, ""), (False, "impossible")]
    assert "'huge' (400,000,000 x 128, 204.8 GB) does not fit" in found.points[0].reason
    assert "12 ranks do not fill hosts of 8" in found.points[2].reason
    (uneven,) = sweep(huge, topology="h100", world_size=24, global_batch_size=4096).points
    assert uneven.problem == "impossible"
    assert uneven.reason == "4,096 samples do not divide among 24 ranks. Fix: use a multiple of 24"
    assert len(found.records()) == 3
    text = " ".join(str(found).split())
    assert "3 points of 2 tables, 1 with a plan" in text
    assert "12 ranks do not fill hosts of 8" in text
    (seen,) = sweep(huge, world_size=2, hbm_cap=80 * 10**9, explain=True).points
    assert "Fix: " in seen.reason


def test_all_output_is_labelled_as_simulated(tmp_path: Path) -> None:
    found = sweep(TABLES, LOAD, topology=["h100", "a100"], world_size=[8, 16, 9], batch_size=64)
    assert str(found).startswith("Simulated, not measured")
    assert "simulated step" in str(found)
    assert "Simulated, not measured" in found._repr_html_()
    assert all(record["simulated"] is True for record in found.records())
    lines = list(csv.DictReader(found.to_csv(tmp_path / "points.csv").read_text().splitlines()))
    assert len(lines) == 6
    assert {line["simulated"] for line in lines} == {"True"}
    assert [line["fits"] for line in lines] == ["True", "True", "False"] * 2
    view = views.pareto(found)
    for form in (view.title, view.summary, view.svg, view.text, view._repr_html_()):
        assert "imulated" in form
    assert "imulated" in view.figure.layout.title.text
    page = export(found, tmp_path / "sweep.html", workload=LOAD).read_text()
    assert page.count("imulated") > 8
    assert "NVIDIA A100 80GB SXM data sheet" in page  # where the figures come from
    assert "9 ranks do not fill hosts of 8" in page


def test_text_tables_keep_within_100_columns_whatever_is_swept() -> None:
    axes: dict[str, Any] = {
        "topology": ["gb200nvl72", "gcp-a3-ultra"], "world_size": [72, 144], "batch_size": [1, 16_384],
        "hbm_cap": [10**9, 186 * 10**9], "codecs": ["fp32", ("fp16", "bf16")],
        "optimizer": ["exact_row_wise_adagrad", "exact_sgd"], "pipeline": ["sparse_dist", "none"],
        "sharding_group_size": [None, 8],
    }  # fmt: skip
    for count, seed in ((4, 1), (4, 2), (4, 3), (len(axes), 0))[: examples(1, 4)]:
        kept = {name: axes[name] for name in random.Random(seed).sample(sorted(axes), count)}
        found = sweep(TABLES[:2], LOAD.for_tables(TABLES[:2]), local_search_passes=0, **kept)
        assert max(map(len, str(found).splitlines())) <= 100
        assert "simulated step" in str(found)


@given(st.lists(st.tuples(*[st.integers(0, 5)] * 3), min_size=1, max_size=25))
def test_the_frontier_is_what_comparing_every_pair_leaves(values: list[tuple[int, ...]]) -> None:
    def beaten(mine: tuple[int, ...]) -> bool:
        return any(other != mine and all(o <= m for o, m in zip(other, mine, strict=True)) for other in values)

    assert undominated(np.array(values, dtype=float)).tolist() == [not beaten(mine) for mine in values]


def made(ranks: int, step_ms: float, cap: int = 80, fits: bool = True) -> SweepPoint:
    step = step_ms if fits else float("nan")
    return SweepPoint("h100", ranks, 10, 10 * ranks, cap, "fp32", "exact_sgd", "none", fits=fits, step_ms=step)


def test_pareto_knows_which_way_is_better_and_leaves_out_what_has_no_plan() -> None:
    points = (made(8, 2.0), made(8, 1.0), made(16, 1.0), made(16, 4.0), made(32, 9.0), made(4, 0.0, fits=False))
    found = Sweep(points, 1)
    assert found.objectives == ("world_size", "samples_per_s")
    assert found.pareto() == (points[1], points[2])
    assert found.pareto("step_ms") == (points[1], points[2])
    assert found.pareto("world_size", "step_ms") == (points[1],)
    assert found.pareto("samples_per_s_per_rank") == (points[1], points[2])
    small, large = made(8, 2.0, 40), made(8, 1.0, 80)
    assert Sweep((small, large, made(8, 3.0, 80)), 1).pareto() == (small, large)
    with pytest.raises(ValueError, match=r"no objective is named 'price'.*Fix: use one of world_size"):
        found.pareto("price")
    assert set(OBJECTIVES) <= set(dir(points[0]))


@pytest.mark.gate
def test_many_tables_on_2048_ranks_are_simulated() -> None:
    tables, load = random_tables(250, 7)
    found = sweep(tables, load, topology="h100", world_size=[2048], codecs=["fp16"], local_search_passes=0)
    assert found.points[0].fits
    assert found.points[0].lower_bound is not None
    assert "2,048" in str(found)


def test_progress_is_told_point_by_point() -> None:
    seen: list[tuple[int, int, int]] = []
    found = sweep(TABLES, LOAD, world_size=[8, 16, 17], progress=lambda *at: seen.append((*at[:2], at[2].world_size)))
    assert seen == [(1, 3, 8), (2, 3, 16), (3, 3, 17)]
    assert found.seconds > 0
    assert f"in {found.seconds:.1f} s" in " ".join(str(found).split())


def test_sharding_groups_lie_where_those_of_dmp_collection_do() -> None:
    machines = product([(16, 8), (16, 4), (8, 8), (12, 4)], [False, True], range(1, 17))
    for (world, local), contiguous, size in (case for case in machines if case[0][0] % case[2] == 0):
        machine: Any = SimpleNamespace(world_size=world, local_world_size=local, rank=0)  # nothing is sent
        grid = ReplicaGrid(machine, size, contiguous)
        mine = Replicated(Topology(world, "cuda", local_world_size=local), size, contiguous)
        assert (mine.replicas, mine.group.world_size) == (grid.num_replicas, size)
        assert mine.group.local_world_size == grid.ranks_per_node
        apart = any(len({rank // local for rank in ranks}) > 1 for ranks in grid.replica_groups)
        assert mine.inside_a_node == (not apart)


def test_a_sync_costs_what_counting_its_bytes_gives_and_steps_are_charged_their_share() -> None:
    load = replace(LOAD, optimizer="exact_adagrad", dense_parameters=10**6)
    arguments: dict[str, Any] = {"topology": "h100", "world_size": 32, "sharding_group_size": [None, 8]}
    each, tenth = (sweep(TABLES, load, sync_every=n, **arguments).points for n in (1, 10))
    whole, group = each
    assert whole.sync_ms == 0
    top = Topology.preset("h100x32")
    plan = best_plan(TABLES, Replicated(top, 8).group, workload=load)
    alone = plan.estimate
    held = alone.memory_bytes[:, :2].sum(axis=1).max()  # weights and states
    latency = top.intra_host_latency_ms + 3 * top.peer_ms  # 4 replicas, neighbours
    sync = 2 * 3 / 4 * held / top.intra_host_bw + 2 * latency
    dense = dense_step(load, top)[0] - dense_step(load, Replicated(top, 8).group)[0]
    assert dense < 0  # all ranks of a node share its links, of a group only two a node
    assert group.sync_ms == pytest.approx(sync)
    assert group.step_ms == pytest.approx(alone.step_ms + dense + sync)
    assert tenth[1].step_ms == pytest.approx(alone.step_ms + dense + sync / 10)
    (odd,) = sweep(TABLES, load, world_size=8, sharding_group_size=3).points
    assert "sharding_group_size=3 does not divide 8 ranks" in odd.reason


def test_launches_of_the_dense_part_count_where_they_take_longer_than_its_arithmetic() -> None:
    top = Topology.preset("h100x8", launch_ms=0.01, kernel_ms=0.0, matrix_half_batch=0.0)
    few, many = (dense_step(Workload(512, dense_parameters=10**7, dense_launches=count), top)[0] for count in (1, 1000))
    plain = dense_step(Workload(512, dense_parameters=10**7), top)[0]
    assert few == plain
    assert many == pytest.approx(plain + 1000 * 0.01 - 512 * 6 * 10**7 / top.flops_per_ms)


def test_what_is_wrong_in_every_point_is_refused_at_once() -> None:
    wrong: list[dict[str, Any]] = [
        {"topology": "h900"}, {"topology": [7]}, {"world_size": 0}, {"world_size": "8"}, {"batch_size": [64, -1]},
        {"hbm_cap": 1.5}, {"codecs": "fp12"}, {"optimizer": "sgd2"}, {"pipeline": "later"}, {"solver": "oracle"},
        {"sync_every": 0}, {"progress": "yes"}, {"world_size": []}, {"batch_size": 1, "global_batch_size": 8},
    ]  # fmt: skip
    assert not_refused((partial(sweep, TABLES, LOAD, **arguments), "") for arguments in wrong) == []
