"""`recshard plan sweep`, as a user types it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from recshard_lab.cli import app
from recshard_lab.cli.plan.simulate import integers

TABLES = [
    {"name": f"t{i}", "num_embeddings": 10**6, "embedding_dim": 64, "feature_names": [f"f{i}"], "pooling_factor": 10}
    for i in range(3)
]


def whatif(folder: Path, *arguments: str) -> tuple[int, str]:
    tables = folder / "tables.json"
    tables.write_text(json.dumps(TABLES))
    done = CliRunner().invoke(app, ["plan", "sweep", str(tables), *arguments])
    return done.exit_code, done.output if done.exception is None else f"{done.output}{done.exception}"


def test_it_prints_all_points_and_writes_a_page_and_a_csv(tmp_path: Path) -> None:
    page, points = tmp_path / "out.html", tmp_path / "out.csv"
    code, said = whatif(
        tmp_path,
        *("--topology", "h100,a100", "--ranks", "8, 16,12", "--global-batch-size", "8k", "--codecs", "fp16/bf16"),
        *("--out", str(page), "--out", str(points)),
    )
    assert code == 0, said
    assert "Simulated, not measured: 6 points of 3 tables, 4 with a plan, in" in said
    assert "batch 8,192 of all ranks" in said.replace("\n", " ")
    assert said.count("impossible") == 2
    assert max(len(line) for line in said.splitlines() if not line.startswith("Wrote ")) <= 100  # paths are not cut
    assert len(points.read_text().splitlines()) == 7
    assert "<svg" in page.read_text()
    assert "What if: tables.json (simulated)" in page.read_text()


def test_memory_groups_and_pipelines_are_swept_too(tmp_path: Path) -> None:
    code, said = whatif(
        tmp_path,
        *("-n", "16", "--memory-gb", "0.05,80", "--sharding-group-size", "all,8", "--sync-every", "4"),
        *("--pipeline", "none,prefetch", "--batch-size", "256"),
    )
    assert code == 0, said
    assert "8 points of 3 tables" in said
    assert "does not fit" in said
    assert "every 4 steps" in said.replace("\n", " ")


@pytest.mark.parametrize(("arguments", "told"), [
    (["--ranks", "eight"], "--ranks takes numbers separated by commas, got 'eight'"),
    (["--ranks", "1.5"], "--ranks takes whole numbers of at least 1, got '1.5'"),
    (["--batch-size", "8", "--global-batch-size", "64"], "not both"),
    (["--topology", "h1000"], "topology preset 'h1000' does not exist"),
    (["--codecs", "fp12"], "'fp12' is not a number format"),
    (["--example", "mlperf-dlrm-dcnv2"], "tables.json' and --example mlperf-dlrm-dcnv2 exclude each other"),
])  # fmt: skip
def test_a_mistake_is_told(tmp_path: Path, arguments: list[str], told: str) -> None:
    code, said = whatif(tmp_path, *arguments)
    assert code != 0
    assert told in said


def test_integers_know_binary_thousands() -> None:
    assert integers("8,2k", "x") == [8, 2048]
    assert integers("0.5,80", "x", 10**9) == [5 * 10**8, 80 * 10**9]
