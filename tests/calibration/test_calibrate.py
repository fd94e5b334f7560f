"""Calibrating two launched ranks for real, and what can be done with what comes of it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import calibration as bench
from recshard_lab.calibration import Calibration, check
from recshard_lab.calibration.alone import time_alone
from recshard_lab.calibration.clock import as_dicts
from recshard_lab.cli import app
from recshard_lab.planner.workload import OPTIMIZER_STATE_BYTES
from recshard_lab.sharding import Topology
from tests.calibration.test_device_profile import profile
from tests.launched import launched

pytestmark = pytest.mark.clock  # calibration measures


ranks = launched(2)


@pytest.fixture(scope="module")
def found(ranks: Any) -> Calibration:
    done: Calibration = ranks.calibrate(6.0, progress=False)
    return done


def test_every_optimizer_is_measured_and_every_figure_told(found: Calibration) -> None:
    assert set(found.profile.optimizers) == set(OPTIMIZER_STATE_BYTES)
    ops = {one["op"] for one in found.profile.operators}
    assert ops > {"all_to_all", "reduce_scatter", "all_reduce", "gather", "dense", "reference_step"}
    assert found.profile.kernels["adam"] == ["native"]
    assert found.profile.machine["torch"]
    assert found.profile.date[:2] == "20"
    told = str(found)
    for name in ("flops_per_ms", "reduce_scatter_cost", "peer_ms", "update_cost[exact_sgd]"):
        assert name in told
        assert name in found._repr_html_()


def test_held_out_models_are_predicted_better_than_by_the_defaults(ranks: Any, found: Calibration) -> None:
    held_out = bench.measure_held_out(ranks, 6.0, turns=5)
    after, before = held_out.judge(found.topology), held_out.judge(found.before)
    assert after.error < before.error
    rows = bench.table("2 ranks", held_out, before, after, found.summary())
    assert [row.name.partition(": ")[2] for row in rows] == [
        "error of a step, geometric mean",
        "picked within 5% of the fastest",
        "fastest of four schemes picked (exact)",
    ]
    assert set(rows[1].beside) == {"defaults", "measured twice", "table-wise"}
    assert rows[0].value == pytest.approx(100 * after.error)
    assert rows[0].beside["defaults"] == pytest.approx(100 * before.error)


def test_the_file_is_a_topology_and_the_planner_takes_it(found: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    found.save(path)
    assert Topology.from_profile(path) == found.topology
    tables = tmp_path / "tables.csv"
    tables.write_text("name,num_embeddings,embedding_dim,feature_names\nt,1000,16,f\n")
    runner = CliRunner()
    done = runner.invoke(app, ["plan", "make", str(tables), "--topology", str(path)])
    assert done.exit_code == 0, done.output
    assert "t " in done.output
    refused = runner.invoke(app, ["plan", "make", str(tables), "--topology", str(path), "--ranks", "3"])
    assert isinstance(refused.exception, ValueError)
    assert "recshard calibrate --ranks 3" in str(refused.exception)


def test_a_slower_rank_is_noticed_by_measuring(ranks: Any) -> None:
    """Each rank reads rows eight times; nothing is simulated."""
    stored = time_alone(ranks)
    then = profile(operators=tuple(as_dicts([one for one in stored if one.op == "gather"])))
    ranks.exec(
        "from recshard_lab.calibration import operators\nonce = operators._call\n"
        "def slowly(*args, **options):\n    call = once(*args, **options)\n"
        "    return lambda: [call() for _ in range(8)]\noperators._call = slowly"
    )
    try:
        found = check(ranks, then)
    finally:
        ranks.exec("operators._call = once")
    assert found.moved == ("gather",)
    assert found.rows[0].ratio > 2


def test_the_command_checks_a_profile_and_exits_with_1_on_drift(found: Calibration, tmp_path: Path) -> None:
    fast = tuple({**one, "ms": one["ms"] / 1000} for one in found.profile.operators)
    replace(found.profile, operators=fast).save(tmp_path / "then.json")
    done = CliRunner().invoke(app, ["calibrate", "--check", str(tmp_path / "then.json")])
    assert done.exit_code == 1, done.output
    assert "gather" in done.output
    assert "operators moved" in done.output
