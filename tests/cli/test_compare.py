"""``recshard plan compare``: plans from files, schemes and the planner, side by side."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import recshard_lab as rs
from recshard_lab.cli import app
from recshard_lab.sources import read_source

TABLES = """\
- {name: movies, num_embeddings: 9000, embedding_dim: 16, feature_names: [seen], pooling_factor: [2.5]}
- {name: users, num_embeddings: 500, embedding_dim: 8, feature_names: [user]}
"""


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    path = tmp_path / "tables.yaml"
    path.write_text(TABLES)
    return path


@pytest.mark.gate
def test_it_prints_what_python_predicts_and_writes_the_page(tables: Path, tmp_path: Path) -> None:
    read = read_source(str(tables))
    workload = read.workload(batch_size=64, optimizer="exact_sgd")
    planner = rs.EmbeddingShardingPlanner(rs.Topology(2), workload=workload)
    mine = planner.plan_tables(read.configs)
    plan, page, picture = tmp_path / "mine.json", tmp_path / "all.html", tmp_path / "all.svg"
    rs.export(mine, plan)
    wishes = [str(plan), "planner", "cut=row_wise"]
    more = ["--ranks", "2", "--batch-size", "64", "--out", str(page), "--out", str(picture)]
    done = CliRunner().invoke(app, ["plan", "compare", str(tables), *wishes, *more], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    heads, step = done.stdout.splitlines()[:2]
    assert heads.split() == ["mine", "planner", "cut"]
    wanted = f"{mine.estimate.step_ms:.3g} ms"
    assert step.startswith("Step")
    assert step.count(wanted) == 2  # the file holds what the planner makes
    assert page.read_text().startswith("<!doctype html>")
    assert ">cut</th>" in page.read_text()
    assert picture.read_text().startswith("<svg ")


def test_two_plans_of_one_name_and_files_that_are_none_are_refused(tables: Path, tmp_path: Path) -> None:
    refused = CliRunner().invoke(app, ["plan", "compare", str(tables), "planner", "planner", "--ranks", "2"]).exception
    assert "two plans are named 'planner': a name must be unique. Fix: OTHER=planner" in str(refused)
    odd = tmp_path / "odd.json"
    odd.write_text("{}")
    refused = CliRunner().invoke(app, ["plan", "compare", str(tables), str(odd), "planner", "--ranks", "2"]).exception
    assert "odd.json: field 'schema'" in str(refused)
    refused = CliRunner().invoke(app, ["plan", "compare", str(tables), "rowwise", "--ranks", "2"]).exception
    assert "plan 'rowwise' is neither" in str(refused)
