"""The wheel: what it contains, and that it works in an environment without the checkout."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import nbformat
import pytest
from packaging.version import Version

import recshard_lab

ROOT = Path(recshard_lab.__file__).parents[1]
SHIPPED = ("recshard_lab", "notebooks", "docs", "setup.py", "MANIFEST.in", "pyproject.toml", "README.md", "LICENSE")
"""What a build reads of the checkout."""


def run(*command: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a command without the checkout on Python's path. It must end with 0."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, cwd=cwd, env=kept)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, so that builds leave nothing in it."""
    folder = tmp_path_factory.mktemp("sources")
    for name in SHIPPED:
        if (ROOT / name).is_dir():
            unwanted = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
            shutil.copytree(ROOT / name, folder / name, ignore=unwanted)
        else:
            shutil.copy2(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    enough = Version(importlib.metadata.version("setuptools")) >= Version("77")
    options = ["--no-build-isolation"] if enough else []
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", *options, "-w", folder, sources)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def program(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`recshard` of an environment that has the wheel, and the dependencies of this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index"]
    run(*pip, "--no-warn-script-location", wheel)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "recshard"


@pytest.mark.gate
def test_the_wheel_contains_the_library_the_notebooks_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    ours = {name for name in names if ".dist-info/" not in name}
    library = [
        path for path in (ROOT / "recshard_lab").rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ]
    notebooks = {
        path
        for kind in ("*.ipynb", "*.md", "*/*.svg", "*/*.yaml", "*/*.tsv")
        for path in (ROOT / "notebooks").glob(kind)
    }
    notebooks = {path for path in notebooks if ".ipynb_checkpoints" not in path.parts}
    wanted = {str(path.relative_to(ROOT)) for path in library}
    assert len(notebooks) > 20
    pages = {
        path
        for kind in ("*.md", "concepts/*.md", "howto/*.md", "reference/*.md")
        for path in (ROOT / "docs").glob(kind)
    }
    assert pages
    assert ours == wanted | {
        *(f"recshard_lab/{path.relative_to(ROOT)}" for path in notebooks),
        *(f"recshard_lab/notebooks/{path.relative_to(ROOT)}" for path in pages),
    }


def test_one_place_holds_the_version(wheel: Path) -> None:
    assert wheel.name.startswith(f"recshard_lab-{recshard_lab.__version__}-")
    assert f"\nversion: {recshard_lab.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.search(rf"^## {re.escape(recshard_lab.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


@pytest.mark.gate
def test_an_installed_program_prints_versions_plans_the_example_and_copies_the_notebooks(
    program: Path, tmp_path: Path
) -> None:
    assert f"recshard {recshard_lab.__version__}\n" in run(program, "--version").stdout
    copied = run(program, "lab", "--copy-only", cwd=tmp_path)
    assert "Wrote recshard_notebooks (" in copied.stderr
    copies = tmp_path / "recshard_notebooks"
    index = (copies / "00_index.ipynb").read_text()
    assert index == (ROOT / "notebooks" / "00_index.ipynb").read_text().replace("](../docs/", "](docs/")
    planned = run(
        program, "plan", "make", copies / "examples" / "tables.yaml", "-n", 2, "--out", "p.json", cwd=tmp_path
    )
    assert "predicted step" in planned.stdout
    assert "Wrote p.json (" in planned.stderr
    assert run(program, "train", "--config", copies / "examples" / "run.yaml", "--check", cwd=tmp_path).stdout
    cells = [cell for path in copies.glob("*.ipynb") for cell in nbformat.read(path, as_version=4).cells]
    words = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    for target in re.findall(r"\]\((?!https?:|#)([^)\s]+?)\)", words):
        assert (copies / target.partition("#")[0]).exists(), target
    assert "TEACHING.md" in index


def bench(program: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run([*program, "bench"], capture_output=True, text=True, check=False, cwd=folder, env=kept)


def test_bench_of_an_installed_package_asks_for_a_checkout(program: Path, tmp_path: Path) -> None:
    done = bench([str(program)], tmp_path)
    assert done.returncode == 2
    assert f"no benchmarks in {program.parents[1]}" in done.stderr
    assert "Fix: clone the repository" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.nightly
def test_bench_of_a_checkout_works_outside_its_folder(tmp_path: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import recshard_lab; sys.path.remove({str(ROOT)!r}); "
    done = bench([sys.executable, "-c", f"{code}from recshard_lab.cli import main; main()"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "train_step" in done.stdout


@pytest.mark.nightly
@pytest.mark.timeout(600)  # installs build and twine from the package index, twice: 60 s
def test_build_and_twine_accept_the_sources(sources: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "tools", with_pip=True, symlinks=True)
    python = tmp_path / "tools" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "build", "twine")
    run(python, "-m", "build", "--outdir", tmp_path / "dist", sources)
    files = sorted((tmp_path / "dist").iterdir())
    assert [path.suffix for path in files] == [".whl", ".gz"]
    checked = run(python, "-m", "twine", "check", "--strict", *files)
    assert checked.stdout.count("PASSED") == 2
