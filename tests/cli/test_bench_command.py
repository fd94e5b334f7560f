"""``recshard bench``: the benchmarks of a checkout. `test_wheel` has the refusal of an installed package."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import recshard_lab

ROOT = Path(recshard_lab.__file__).parents[1]
BENCH = [sys.executable, "-c", "from recshard_lab.cli import main; main()", "bench"]


@pytest.mark.nightly
def test_bench_works_outside_the_folder_of_the_checkout(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import recshard_lab; sys.path.remove({str(ROOT)!r}); "
    command = [*BENCH[:2], code + BENCH[2], "bench"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert "train_step" in done.stdout
