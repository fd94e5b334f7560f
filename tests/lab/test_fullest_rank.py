"""Every place that names the fullest rank shows the same bytes: those that it holds, without the reserve."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from recshard_lab.cli import app
from recshard_lab.lab import PlanCompare, export, views
from recshard_lab.lab.compare.plan_comparison import compare_plans
from recshard_lab.lab.draw.theme import bytes_text
from recshard_lab.planner import EmbeddingShardingPlanner, Workload, sweep
from recshard_lab.planner.answers.text import gigabytes
from recshard_lab.sharding import ShardingPlan, Topology
from tests.lab.plans import table

TOP = Topology(2, "cuda", hbm_cap=80 * 10**9)  # 68 GB usable
TABLES = [table("movies", 300_000_000, 16), table("users", 90_000_000, 16), table("small", 1000)]


@pytest.fixture(scope="module")
def made() -> ShardingPlan:
    return EmbeddingShardingPlanner(TOP, keep_search=True).plan_tables(TABLES)


def test_core_lab_html_and_command_line_show_one_number(made: ShardingPlan, tmp_path: Path) -> None:
    estimate, search = made.estimate, made.search
    assert search is not None
    assert search.chosen is not None
    plan = search.plan(search.chosen)
    plan.planned = made.planned
    held = estimate.fullest_bytes
    assert held == estimate.memory_bytes.sum(axis=1).max() > 0.15 * TOP.memory_cap_bytes
    assert "reserve" not in estimate.memory_categories
    widget = PlanCompare(TABLES, TOP, plans={"a": plan, "b": "row_wise"})
    numbers = {
        "search": search.chosen.memory_bytes,
        "explain": plan.explain("movies").memory_bytes,
        "why_not": plan.why_not({"small": "table_wise"}).records()[0]["memory_bytes"],
        "sweep": sweep(TABLES, topology=TOP).points[0].memory_bytes,
        "compare": compare_plans(TABLES, TOP, {"a": plan}, Workload()).records()[0]["memory_bytes"],
        "widget": float(re.findall(r'data-memory-bytes="([^"]*)"', widget.cards["a"].value)[0]),
    }
    assert numbers == pytest.approx(dict.fromkeys(numbers, held))
    files = {"json": tmp_path / "plan.json", "html": tmp_path / "plan.html", "tables": tmp_path / "tables.json"}
    files["json"].write_text(plan.to_json())
    files["tables"].write_text(
        json.dumps([
            {key: getattr(t, key) for key in ("name", "num_embeddings", "embedding_dim", "feature_names")}
            for t in TABLES
        ])
    )  # fmt: skip
    export(widget, files["html"], plotly="none")
    options = ["--topology", "h100", "--ranks", "2"]
    asked = ["plan", "make", str(files["tables"]), *options, "--plan", str(files["json"])]
    said = CliRunner().invoke(app, asked, catch_exceptions=False).stdout
    compared = (
        CliRunner()
        .invoke(app, ["plan", "compare", str(files["tables"]), f"a={files['json']}", *options], catch_exceptions=False)
        .stdout
    )
    texts = {
        "estimate": re.findall(r"the fullest rank holds ([^,]+),", str(estimate)),
        "plan": re.findall(r"the fullest rank holds ([^,]+),", said),
        "explain": re.findall(r"The fullest rank holds (\S+ \S+) of", str(plan.explain("movies"))),
    }
    assert texts == {place: [gigabytes(held)] for place in texts}
    for text in (compared, files["html"].read_text(), views.memory(estimate, topology=TOP).summary):
        assert bytes_text(held) in text
    assert "68.0 of 80.0 GB usable" in said
    assert "68 GB usable" in views.memory(estimate, topology=TOP).summary
    assert re.search(r"usable per rank +68 GB", views.planner_search(search).text)


def test_a_plan_fits_exactly_up_to_the_usable_bytes(made: ShardingPlan) -> None:
    estimate = made.estimate
    just = replace(estimate, usable_bytes=estimate.held_bytes.copy())
    assert just.fits
    assert not replace(just, usable_bytes=just.usable_bytes - 1).fits
