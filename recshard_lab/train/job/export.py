"""A training run for other machines: config, plan and scripts in one folder."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

import yaml

from recshard_lab.arguments import checks_arguments
from recshard_lab.planner import tables_of
from recshard_lab.sharding import ShardingPlan, Topology
from recshard_lab.train.job.build import build_sharders, build_sources, build_unsharded, planner_of
from recshard_lab.train.job.config import PlanSection, TrainConfig

Launcher = Literal["torchrun", "slurm", "ray"]

_ABOUT = '''"""Trains as run.yaml says, under the plan of plan.json. Both are beside this file. Written by recshard_lab.

{how}

Start an interrupted run again in the same way: it resumes from its last checkpoint.
"""
'''

_JOIN = """
from pathlib import Path

from recshard_lab.launcher import join
from recshard_lab.train.job import read_config, run_training

if __name__ == "__main__":
    config = read_config(Path(__file__).with_name("run.yaml"))
    with join():
        done = run_training(config)
    if done.unsaved is not None:
        raise SystemExit(f"the run ended at step {{done.step}} and is not saved: {{done.unsaved}}")
"""

_RAY = """
from pathlib import Path

from recshard_lab.launcher import launch
from recshard_lab.train.job import read_config, run_training

if __name__ == "__main__":
    config = read_config(Path(__file__).with_name("run.yaml").resolve())
    with launch({world_size}, nodes={nodes}, engine="ray", backend="{backend}") as ranks:
        done = ranks.run(run_training, config)[0]
    if done.unsaved is not None:
        raise SystemExit(f"the run ended at step {{done.step}} and is not saved: {{done.unsaved}}")
"""
_HOW_RAY = """    ray job submit -- python "$PWD/train.py"

Submit it in this folder, which all machines of the cluster must have at the same path. The command starts this script
on the cluster's head. `RAY_ADDRESS=auto python train.py` does the same there."""

_SLURM = """#!/usr/bin/env bash
# Trains as run.yaml says, under the plan of plan.json, on Slurm. Written by recshard_lab.
#
#     sbatch train.sbatch
#
# Submit it in this folder, which all nodes must have.
#SBATCH --job-name=recshard-train
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
{gpus}#SBATCH --output=%x-%j.log
set -euo pipefail
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
port=$((20000 + SLURM_JOB_ID % 10000))
srun --kill-on-bad-exit=1 --cpu-bind=none torchrun --nnodes {nodes} --nproc-per-node {local} \\
  --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "${{hosts[0]}}:$port" train.py
"""


@checks_arguments
def export_run(
    config: TrainConfig,
    folder: str | Path,
    plan: ShardingPlan | None = None,
    *,
    topology: Topology | None = None,
    launcher: Launcher = "torchrun",
) -> list[Path]:
    """Writes ``run.yaml``, ``plan.json`` and ``train.py``, which trains on other machines as the config says.

    Args:
        config: the run. Its relative paths will start at the folder, so use absolute paths for data.
        folder: where the files go. It is created if needed.
        plan: of the model's tables. Default: planned for `topology`.
        topology: the ranks and their devices. ``slurm`` and ``ray`` need it.
        launcher: what starts ``train.py``. ``torchrun``: its first lines have the command. ``slurm``: the same, and a
            script ``train.sbatch`` for ``sbatch``. ``ray``: it launches the ranks on a Ray cluster, and is to be
            submitted with ``ray job submit``.

    Returns:
        The files.

    Raises:
        ValueError: there is neither a plan nor a topology, the launcher needs a topology or is unknown, or the data
            cannot be read.
        PlanError: the plan is not for these tables on these ranks.

    >>> from tempfile import mkdtemp
    >>> data = {"name": "synthetic-criteo", "num_samples": 64, "test_samples": 0, "rows": [20, 30]}
    >>> run = TrainConfig(model={"name": "dlrm"}, data=data, batch_size=16)
    >>> [path.name for path in export_run(run, mkdtemp(), topology=Topology(2), launcher="slurm")]
    ['run.yaml', 'plan.json', 'train.py', 'train.sbatch']
    """
    if launcher not in get_args(Launcher):
        raise ValueError(f"export_run(launcher={launcher!r}): expected 'torchrun', 'slurm' or 'ray'.")
    if topology is None and (plan is None or launcher != "torchrun"):
        lacks = "a plan, or a topology to plan for" if plan is None else "the devices of a node"
        raise ValueError(
            f"export_run(launcher={launcher!r}) needs {lacks}. Fix: pass topology=Topology(world_size=...)"
        )
    source, _ = build_sources(config)
    model = build_unsharded(config.model, source)
    if plan is None:
        assert topology is not None
        plan = planner_of(config, model, source, topology).plan(model, build_sharders(config))
    world_size = topology.world_size if topology is not None else plan.world_size
    local = topology.local_world_size if topology is not None else world_size
    plan = plan.resolved(tables_of(model), world_size, local)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    planned = config.model_copy(update={"plan": PlanSection(path="plan.json")})
    texts = {
        "run.yaml": yaml.safe_dump(planned.model_dump(exclude_defaults=True), sort_keys=False),
        "plan.json": plan.to_json(indent=2),
        **_scripts(launcher, world_size, local, topology),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


def _scripts(launcher: Launcher, world_size: int, local: int, topology: Topology | None) -> dict[str, str]:
    """File name -> text of what starts the run on `world_size` ranks, `local` on a node."""
    nodes = world_size // local
    if launcher == "ray":
        assert topology is not None
        backend = "nccl" if topology.compute_device == "cuda" else "gloo"
        script = _RAY.format(world_size=world_size, nodes=nodes, backend=backend)
        return {"train.py": _ABOUT.format(how=_HOW_RAY) + script}
    several = "" if nodes == 1 else f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:PORT "
    how = f"    torchrun {several}--nproc-per-node {local} train.py"
    if nodes > 1:
        how += "\n\nRun this on every node. HOST is the name of one of them, PORT a free port there."
    if launcher == "torchrun":
        return {"train.py": _ABOUT.format(how=how) + _JOIN.format()}
    assert topology is not None
    gpus = f"#SBATCH --gpus-per-node={local}\n" if topology.compute_device == "cuda" else ""
    batch = _SLURM.format(nodes=nodes, local=local, gpus=gpus)
    return {"train.py": _ABOUT.format(how="    sbatch train.sbatch") + _JOIN.format(), "train.sbatch": batch}
