"""Whole scripts for TorchRec: their losses on ranks are TorchRec's. Copies of its tutorials run at night."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from recshard_lab.compat import read_script
from tests.compat.scripts.record import HERE, LOSSES, RUNS, SCRIPTS, losses_of

ROOT = Path(__file__).parents[2]
TUTORIALS = os.environ.get("RECSHARD_TUTORIALS", "")
BY_DAY = ("criteo_dlrm on 2", "planned_pipeline on 2", "walk_through on 2")
COPIES = sorted(path for kind in ("*.py", "*.ipynb") for path in Path(TUTORIALS).glob(kind)) if TUTORIALS else []


@pytest.mark.gate
@pytest.mark.parametrize(
    "run", [pytest.param(run, marks=[] if run in BY_DAY else [pytest.mark.nightly]) for run in RUNS]
)
def test_a_script_gives_the_losses_of_torchrec(run: str) -> None:
    name, ranks = RUNS[run]
    ours = losses_of(ranks, sys.executable, "-m", "recshard_lab.compat", "--shadow", "--translate", f"{name}.py")
    theirs = json.loads(LOSSES.read_text())[run]
    assert [len(losses) for losses in ours] == [24 if name == "criteo_dlrm" else 5] * ranks
    for rank in range(ranks):
        assert ours[rank] == pytest.approx(theirs[rank], abs=2e-5)


def test_losses_of_every_script_are_recorded() -> None:
    files = {path.stem for path in HERE.glob("*.py")} - {"__init__", "record"}
    assert files == set(SCRIPTS)
    assert set(RUNS) == set(json.loads(LOSSES.read_text())), "Fix: python -m tests.compat.scripts.record"


@pytest.mark.parametrize("name", SCRIPTS)
def test_nothing_that_they_use_is_refused(name: str) -> None:
    report = read_script(HERE / f"{name}.py")
    assert not report.of("refused")
    assert len(report.tables) in (2, 3, 4)
    assert not report.unread


SPAWNS = """
import sys
import torch.distributed as dist
import torch.multiprocessing as mp
import torchrec

def job(rank, store):
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=2)
    sys.stdout.write(f"{rank} {dist.get_backend()} {torchrec.JaggedTensor.__module__}\\n")  # in one piece
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(job, (sys.argv[1],), nprocs=2)
"""


@pytest.mark.gate
def test_processes_that_a_script_spawns_run_it_too(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SPAWNS)
    done = run(tmp_path, "--translate", "train.py", str(tmp_path / "store"))
    printed = [f"{rank} gloo recshard_lab.sparse.jagged_tensor" for rank in range(2)]
    assert sorted(done.stdout.splitlines()) == printed, done.stderr


@pytest.mark.gate
def test_a_notebook_runs_without_its_shell_lines(tmp_path: Path) -> None:
    cells = [["!pip install torchrec\n", "import torchrec"], ["print(torchrec.PoolingType.SUM.value, __name__)"]]
    code = [{"cell_type": "code", "source": source} for source in cells]
    (tmp_path / "tutorial.ipynb").write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": "x ="}, *code]}))
    done = run(tmp_path, "tutorial.ipynb")
    assert done.stdout.split() == ["SUM", "__main__"], done.stderr


def run(folder: Path, *arguments: str, ranks: int = 0) -> subprocess.CompletedProcess[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    return subprocess.run(
        [sys.executable, "-W", "ignore", *torchrun, "-m", "recshard_lab.compat", "--shadow", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
    )


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.skipif(not COPIES, reason="RECSHARD_TUTORIALS names no folder with scripts")
@pytest.mark.parametrize("path", COPIES, ids=lambda path: path.name)
def test_a_copy_of_a_tutorial_runs_on_two_ranks(path: Path, tmp_path: Path) -> None:
    """A script starts under torchrun. A notebook, and a script that sets its own rank, runs in one process."""
    source = path.read_text()
    alone = path.suffix == ".ipynb" or 'os.environ["RANK"]' in source
    done = run(path.parent, "--translate", path.name, ranks=0 if alone else 2)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
