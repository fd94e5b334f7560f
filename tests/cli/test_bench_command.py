"""``recshard bench``: the benchmarks of a checkout, and a clear refusal where there is none."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from setuptools import find_packages

import recshard_lab

ROOT = Path(recshard_lab.__file__).parents[1]
BENCH = [sys.executable, "-c", "from recshard_lab.cli import main; main()", "bench"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages that the wheel contains, and nothing else."""
    site = tmp_path_factory.mktemp("site")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    packages = find_packages(str(ROOT), **settings)
    for package in {name.partition(".")[0] for name in packages}:
        shutil.copytree(ROOT / package, site / package, ignore=shutil.ignore_patterns("__pycache__"))
    return site


def test_wheels_contain_the_library_and_no_benchmarks(installed: Path) -> None:
    assert [path.name for path in installed.iterdir()] == ["recshard_lab"]


def test_bench_of_an_installed_package_asks_for_a_checkout(installed: Path, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(BENCH, capture_output=True, text=True, check=False, cwd=tmp_path, env=env)
    assert done.returncode == 2
    assert f"no benchmarks in {installed}" in done.stderr
    assert "Fix: clone the repository" in done.stderr
    assert "Traceback" not in done.stderr


def test_bench_works_outside_the_folder_of_the_checkout(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import recshard_lab; sys.path.remove({str(ROOT)!r}); "
    command = [*BENCH[:2], code + BENCH[2], "bench"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert "train_step" in done.stdout
