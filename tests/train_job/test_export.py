"""Exported runs train where they are started: by Slurm's script on two hosts; `test_ray` has a Ray cluster."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import recshard_lab as rs
from recshard_lab.cli import app
from recshard_lab.train.job import TrainConfig, export_run, run_training
from tests.launcher import hosts
from tests.train_job.runs import config_of, weights_of
from tests.train_job.test_runs import apart

pytestmark = pytest.mark.timeout(150)

TWO_NODES = rs.Topology(2, local_world_size=1)


def exported(folder: Path, launcher: str) -> dict[str, Any]:
    """The config of a run whose files are in `folder`."""
    config = config_of(folder, max_steps=3)
    config["log"] = {"progress": "lines"}
    export_run(TrainConfig.model_validate(config), folder, topology=TWO_NODES, launcher=launcher)  # type: ignore[arg-type]
    return config


def check_trained(config: dict[str, Any], folder: Path) -> None:
    """The checkpoint is of two ranks on two nodes, with the weights that one process trains."""
    weights, extra = weights_of(config)
    assert (extra["step"], extra["world"]) == (3, [2, 1])
    alone = {**config, "checkpoint": {"path": str(folder / "alone")}}
    run_training(TrainConfig.model_validate(alone))
    assert apart(weights, weights_of(alone)[0]) <= 1e-5


@pytest.mark.nightly
@hosts.needs_hosts
def test_the_script_for_slurm_trains_on_the_hosts_of_its_job(tmp_path: Path) -> None:
    config = exported(tmp_path, "slurm")
    script = tmp_path / "train.sbatch"
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n" in script.read_text()
    assert "--gpus-per-node" not in script.read_text()
    slurm = tmp_path / "slurm"  # its two commands
    slurm.mkdir()
    with hosts.two_hosts() as pair:
        tasks = [shlex.join(host.command()[:-1]) + ' "$PWD" "$@" & tasks+=($!)' for host in pair]
        lines = ["while [[ $1 == --* ]]; do shift; done", *tasks, 'for task in "${tasks[@]}"; do wait "$task"; done']
        host_names = ['[ "$*" = "show hostnames host[0-1]" ]', "echo host0; echo host1"]
        for name, text in (("srun", lines), ("scontrol", host_names)):
            (slurm / name).write_text("\n".join(["#!/usr/bin/env bash", "set -e", *text, ""]))
            (slurm / name).chmod(0o755)
        environment = {
            **os.environ,
            "PATH": f"{slurm}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(hosts.ROOT),
            "OMP_NUM_THREADS": "1",
            "SLURM_JOB_NODELIST": "host[0-1]",
            "SLURM_JOB_ID": "12345678",
        }
        done = subprocess.run(
            ["bash", str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks" in done.stdout
    check_trained(config, tmp_path)


def test_scripts_request_what_the_topology_has(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(config_of(tmp_path)))
    options = ["train", "--config", str(file), "--export", str(tmp_path / "out"), "--topology", "h100x16"]
    torchrun = "torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:PORT --nproc-per-node 8"
    for launcher, name, words in (
        ("slurm", "train.sbatch", "#SBATCH --gpus-per-node=8\n"),
        ("ray", "train.py", 'launch(16, nodes=2, engine="ray", backend="nccl")'),
        ("torchrun", "train.py", torchrun),
    ):
        done = CliRunner().invoke(app, [*options, "--launcher", launcher])
        assert str(tmp_path / "out" / name) in done.stderr
        assert words in (tmp_path / "out" / name).read_text()
    script = tmp_path / "out" / "train.sbatch"
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0


def test_launchers_that_are_unknown_or_lack_a_topology_are_refused(tmp_path: Path) -> None:
    config = TrainConfig.model_validate(config_of(tmp_path))
    plan = rs.ShardingPlan({})
    with pytest.raises(ValueError, match=r"launcher must be .*'slurm'.*got 'mpi'"):
        export_run(config, tmp_path, topology=TWO_NODES, launcher="mpi")  # type: ignore[arg-type]
    for launcher in ("slurm", "ray"):
        with pytest.raises(ValueError, match=r"needs the devices of a node\. Fix: pass topology=Topology"):
            export_run(config, tmp_path, plan, launcher=launcher)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
