"""``python -m recshard_lab.compat``: a script for TorchRec runs unchanged; refusals say what to do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from recshard_lab.compat import differences, report

SCRIPT = """
import sys
import torch
import torchrec

if __name__ == "__main__":
    import beside
    print(sys.argv[1:], beside.WORD, torchrec.JaggedTensor.__module__, torch.device("cuda:0").type)
"""


def run(folder: Path, *arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*([str(path)] if path else []), root])}
    command = [sys.executable, "-m", "recshard_lab.compat", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=env)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("WORD = 'beside'\n")
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def test_a_script_runs_unchanged_with_its_arguments_and_its_neighbours(script: Path) -> None:
    done = run(script, "--shadow", "train.py", "--epochs", "2")
    assert done.stdout.split() == ["['--epochs',", "'2']", "beside", "recshard_lab.sparse.jagged_tensor", "cuda"], done


def test_a_script_can_be_translated(script: Path) -> None:
    done = run(script, "--shadow", "--translate", "train.py")
    assert done.stdout.split()[-1] == "cpu", (
        done.stderr
    )  # this machine has no GPU for each of its ranks, or tests hide it


def test_what_cannot_run_is_refused(script: Path) -> None:
    assert "none.py is not a file. Fix: pass the path" in run(script, "none.py").stderr
    (script / "site" / "torchrec").mkdir(parents=True)
    (script / "site" / "torchrec" / "__init__.py").write_text("")
    refused = run(script, "train.py", path=script / "site")
    assert refused.returncode == 2
    assert "torchrec is installed here" in refused.stderr
    assert "pass --shadow" in refused.stderr


def test_without_a_script_it_prints_the_names_and_the_differences(tmp_path: Path) -> None:
    told = run(tmp_path).stdout
    assert report() in told
    assert str(differences()) in told
