"""The example of models with trillions of parameters: total, tiers, copies, reasons; all of it at night."""

import re
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from recshard_lab.cli import app
from recshard_lab.cli.plan import simulate
from recshard_lab.planner import estimate
from recshard_lab.planner.sweep.replicas import Replicated
from recshard_lab.planner.sweep.trillions import (
    DIMS,
    FIGURES,
    MODELS,
    NUM_TABLES,
    SYNC_EVERY,
    copies_of,
    gap_of,
    trillion_example,
    trillion_tables,
    trillion_workload,
)
from recshard_lab.sharding import ParameterConstraints, Topology
from tests.planner.problems import best_plan


def test_the_tables_have_the_published_number_of_parameters() -> None:
    for total in MODELS.values():
        tables = trillion_tables(total)
        assert len(tables) == NUM_TABLES
        assert sum(table.num_embeddings * table.embedding_dim for table in tables) == pytest.approx(total, rel=1e-6)
        assert {table.embedding_dim for table in tables} == set(DIMS)
    assert sum("assumed" in source for _, _, source in FIGURES) >= 7


def test_what_cannot_be_simulated_is_refused_with_a_fix() -> None:
    for wrong in ({"world_sizes": []}, {"num_tables": 0}, {"num_tables": 2**40}, {"name": "meta-2t"}):
        with pytest.raises(ValueError, match="Fix: "):
            trillion_example(**{"name": "meta-1.25t", "num_tables": 2, **wrong})  # type: ignore[arg-type]


@pytest.mark.nightly
def test_every_point_is_a_plan_of_one_copy_and_the_sync_of_the_others() -> None:
    found = trillion_example("meta-1.25t", [64, 128], num_tables=40)
    by_size = {(p.world_size, p.sharding_group_size): (tier, p) for tier, p in found.points}
    assert set(by_size) == {(64, 32), (64, 64), (128, 32), (128, 64), (128, 128)}
    assert by_size[64, 32][0] == "HBM + host"  # 2.5 TB of weights, 2.2 TB of usable HBM
    tables, load = trillion_tables(MODELS["meta-1.25t"], 40), trillion_workload()
    for (ranks, size), (tier, point) in by_size.items():
        assert copies_of(point) == ranks // size
        assert point.fits
        group = Topology.preset(f"h100x{ranks}")
        replicas = Replicated(group, size, use_inter_host_allreduce=True)
        both = {table.name: ParameterConstraints(compute_kernels=["fused", "fused_uvm"]) for table in tables}
        plan = best_plan(tables, replicas.group, workload=load, constraints=both if tier != "HBM" else None)
        one_copy = estimate(plan, tables, replicas.group, load)
        more = replicas.more_dense_ms(load) + replicas.sync_ms(one_copy) / SYNC_EVERY
        assert point.step_ms == pytest.approx(one_copy.step_ms + more)
        assert point.memory_bytes == pytest.approx(one_copy.fullest_bytes)
        assert (point.host_bytes > 0) == (tier != "HBM")
        assert gap_of(point) == pytest.approx(plan.estimate.gap, abs=0.01)
        assert point.sync_ms == replicas.sync_ms(one_copy)


def test_a_sync_averages_rows_in_host_memory_too() -> None:
    tables, load = trillion_tables(MODELS["meta-1.25t"], 40), trillion_workload()
    both = {table.name: ParameterConstraints(compute_kernels=["fused", "fused_uvm"]) for table in tables}
    replicas = Replicated(Topology.preset("h100x64"), 32, use_inter_host_allreduce=True)
    plan = best_plan(tables, replicas.group, workload=load, constraints=both)
    held = [0.0] * 32
    for sharding in plan.tables().values():
        for shard in sharding.shards:
            held[shard.rank] += 2 * shard.num_elements + 4 * shard.num_rows  # fp16, and a number per row
    assert replicas.sync_bytes(plan.estimate) == pytest.approx(2 * (2 - 1) / 2 * max(held), rel=1e-6)


def test_a_model_that_fits_nowhere_says_why() -> None:
    found = trillion_example("meta-3t", [32], num_tables=40, topology="v100")
    assert not any(point.fits for _, point in found.points)
    text = " ".join(str(found).split())
    assert re.search(r"A group of 32 GPUs, HBM alone: table 't\d+' .* does not fit", text)
    assert "A group of 32 GPUs, HBM and host memory:" in text
    with pytest.raises(ValueError, match=r"no model is named 'meta-2t'\. Fix: use one of meta-1\.25t, meta-3t"):
        trillion_example("meta-2t")


@pytest.mark.gate
def test_the_command_prints_and_writes_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate, "trillion_example", partial(trillion_example, num_tables=40))
    page, points = tmp_path / "page.html", tmp_path / "points.csv"
    command = ["plan", "sweep", "--example", "meta-1.25t", "-n", "64", "--out", str(page), "--out", str(points)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    assert "1.25 trillion parameters in 40 synthetic tables" in said
    assert re.search(r"64 64 1 HBM [\d.]+ ms", said)
    assert "introducing-torchrec" in said
    assert len(points.read_text().splitlines()) == 1 + 2
    assert "Memory and copies" in page.read_text()
    refused = CliRunner().invoke(app, ["plan", "sweep", "--example", "meta-3t", "--batch-size", "8"])
    assert "fixes batch size. Fix: leave --batch-size out" in str(refused.exception)


@pytest.mark.nightly
@pytest.mark.timeout(1200)  # about 110 s of CPU time a model, most of it on 2,048 and 4,096 GPUs
@pytest.mark.parametrize("name", MODELS)
def test_all_sizes_up_to_4096_gpus_have_plans_near_the_bound(name: str) -> None:
    found = trillion_example(name)
    assert {point.world_size for _, point in found.shown} == {64, 128, 256, 512, 1024, 2048, 4096}
    for tier, point in found.shown:
        assert point.fits
        assert tier == "HBM" or (name, point.world_size) == ("meta-3t", 64)
        gap = gap_of(point)
        assert gap < 0.4
