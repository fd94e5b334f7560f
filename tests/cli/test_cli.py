"""The command line, as a user types it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from jupyterlab.labapp import LabApp
from typer.testing import CliRunner

import benchmarks
from benchmarks import Figure
from recshard_lab import shipped
from recshard_lab.cli import app
from recshard_lab.lab import server

TABLES = [{"name": "movies", "num_embeddings": 1000, "embedding_dim": 16, "feature_names": ["movie"]}]


def recshard(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The installed program's entry point, in a process of its own."""
    code = "from recshard_lab.cli import main; main()"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


def test_help_names_every_command() -> None:
    words = CliRunner().invoke(app, ["--help"]).output
    assert all(command in words for command in ("lab", "demo", "bench", "plan", "topologies"))
    assert all(f"\n {code}  " in words for code in ("0  ", "1  ", "2  ", "130"))


def test_bench_without_a_name_lists_the_files_of_the_folder() -> None:
    listed = CliRunner().invoke(app, ["bench"]).output
    files = {path.stem for path in Path(benchmarks.__file__).parent.glob("*.py")} - {"__init__"}
    assert files == set(benchmarks.benchmark_names())  # folders hold what several of them need
    assert all(name in listed for name in files)


@pytest.mark.gate
def test_json_is_one_object_and_nothing_else() -> None:
    figures = json.loads(CliRunner().invoke(app, ["bench", "plan", "--json"]).stdout)
    plan = figures["plan of 26 tables x 8 ranks"]
    assert {"value", "unit", "target", "ok", "CPU"} == set(plan)
    assert plan["unit"] == "ms"


@pytest.mark.parametrize(("value", "code"), [(1.0, 0), (3.0, 1)])
def test_check_exits_with_one_when_a_target_is_missed(monkeypatch: pytest.MonkeyPatch, value: float, code: int) -> None:
    figures = [Figure("a time", value, "ms", target=2.0), Figure("told only", 9e9, "ms")]
    fake = benchmarks.Benchmark("fake", "measures nothing", lambda: figures)
    monkeypatch.setattr(benchmarks, "benchmark_named", lambda name: fake)
    assert CliRunner().invoke(app, ["bench", "fake", "--check"]).exit_code == code
    assert CliRunner().invoke(app, ["bench", "fake"]).exit_code == 0


def test_a_users_mistake_ends_in_one_line_that_names_it() -> None:
    done = recshard("bench", "nonsense")
    assert done.returncode == 2
    assert "no benchmark is named 'nonsense'" in done.stderr
    assert "Traceback" not in done.stderr


def test_plan_refuses_two_world_sizes(tmp_path: Path) -> None:
    tables = tmp_path / "tables.json"
    tables.write_text(json.dumps(TABLES))
    error = CliRunner().invoke(app, ["plan", "make", str(tables), "--topology", "h100x8", "--ranks", "4"]).exception
    assert "has 8 ranks, but world_size is 4" in str(error)


def test_topologies_lists_the_machines_and_tells_the_sources_of_one() -> None:
    listed = CliRunner().invoke(app, ["topologies"]).output
    assert all(name in listed for name in ("h100", "gb200nvl72", "aws-p5", "cpu-laptop"))
    assert "3,082 of 3,350 GB/s" in CliRunner().invoke(app, ["topologies", "h100"]).output


@pytest.fixture
def notebooks() -> Path:
    return shipped.notebook_folder()


def test_lab_opens_the_first_notebook_on_loopback_with_its_token(
    notebooks: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    notebook = server.find_notebook(notebooks, "01")
    assert notebook.name == "01_shard_your_first_model.ipynb"
    words = server.arguments(notebook, port=9999, browser=False)
    assert "--ServerApp.ip=127.0.0.1" in words
    assert "--no-browser" in words
    assert not [word for word in words if "token" in word or "password" in word]
    lab = LabApp()
    lab.parse_command_line(words[:2])
    assert lab.news_url is None
    assert lab.check_for_updates_class.__name__ == "NeverCheckForUpdate"
    with pytest.raises(FileNotFoundError, match=r"no notebook starts with '99'.*Fix: .*01_shard_your_first_model"):
        server.find_notebook(notebooks, "99")
    monkeypatch.setattr(shipped, "_CHECKOUT", tmp_path / "notebooks")
    monkeypatch.setattr(shipped, "_INSTALLED", tmp_path / "site")
    with pytest.raises(FileNotFoundError, match=f"no notebooks in {tmp_path / 'site'}"):
        shipped.notebook_folder()


def test_lab_opens_the_notebooks_of_a_checkout_and_copies_those_of_an_installation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, notebooks: Path
) -> None:
    opened: list[Path] = []
    monkeypatch.setattr(server, "serve", lambda notebook, port, browser: opened.append(notebook))
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["lab"]).exit_code == 0
    assert not list(tmp_path.iterdir())
    installed = tmp_path / "site" / "notebooks"
    shutil.copytree(notebooks, installed)
    shutil.copytree(notebooks.parent / "docs", installed / "docs")
    monkeypatch.setattr(shipped, "_INSTALLED", installed)
    monkeypatch.setattr(shipped, "in_checkout", lambda: False)
    done = CliRunner().invoke(app, ["lab", "06"])
    copies = tmp_path / "recshard_notebooks"
    words = server.arguments(notebooks / "00_index.ipynb")  # JupyterLab opens no file above its root
    assert f"--ServerApp.root_dir={notebooks.parent}" in words
    assert words[-1] == "--LabApp.default_url=/lab/tree/notebooks/00_index.ipynb"
    words = server.arguments(copies / "00_index.ipynb")
    assert f"--ServerApp.root_dir={copies}" in words
    assert opened == [notebooks / "00_index.ipynb", copies / "06_sharding_schemes.ipynb"]
    page = (notebooks / "TEACHING.md").read_text()
    assert (copies / "TEACHING.md").read_text() == page.replace("](../docs/", "](docs/") != page
    assert (copies / "docs" / "serving.md").is_file()
    assert {path.name for path in copies.glob("*.ipynb")} == {path.name for path in notebooks.glob("*.ipynb")}
    assert list((copies / "images").iterdir())
    assert (copies / "examples" / "tables.yaml").is_file()
    assert "Wrote recshard_notebooks (" in done.stderr


@pytest.mark.parametrize(
    ("options", "answer", "kept"), [([], "", True), ([], "n\n", True), ([], "y\n", False), (["--yes"], "", False)]
)
def test_lab_overwrites_a_changed_copy_only_after_a_yes(
    tmp_path: Path, options: list[str], answer: str, kept: bool
) -> None:
    command = ["lab", "--copy-only", "--folder", str(tmp_path), *options]
    assert CliRunner().invoke(app, command).exit_code == 0
    mine = tmp_path / "01_shard_your_first_model.ipynb"
    mine.write_text("mine")
    done = CliRunner().invoke(app, command, input=answer)
    assert done.exit_code == 0, done.output
    assert (mine.read_text() == "mine") == kept
    assert ("01_shard_your_first_model.ipynb. Overwrite?" in done.stdout) == (not options)
    assert ("note: kept 1 file in" in done.stderr) == kept
    unchanged = CliRunner().invoke(app, command, input="")
    assert "Wrote" not in unchanged.stderr
    assert kept == ("Overwrite?" in unchanged.stdout or "--yes overwrites" in unchanged.stderr)


def test_a_sweep_says_that_a_file_of_tables_is_embeddings_only(tmp_path: Path) -> None:
    tables, out = tmp_path / "tables.json", tmp_path / "points.csv"
    tables.write_text(json.dumps(TABLES))
    done = CliRunner().invoke(app, ["plan", "sweep", str(tables), "-n", "8", "--out", str(out)])
    assert "Embeddings only: " in done.stdout
    assert "1 point of 1 table, 1 with a plan" in " ".join(done.stdout.split())
    assert f"Wrote {out} (" in " ".join(done.stderr.split())
