"""A run for other machines: config, plan and script in one folder, from a notebook or ``recshard train --export``."""

from __future__ import annotations

from pathlib import Path

import yaml

from recshard_lab.arguments import checks_arguments
from recshard_lab.planner import tables_of
from recshard_lab.sharding import ShardingPlan, Topology
from recshard_lab.train.job.build import build_sharders, build_sources, build_unsharded, planner_of
from recshard_lab.train.job.config import PlanSection, TrainConfig

_SCRIPT = '''"""Trains as run.yaml beside it says, under the plan of plan.json. Written by recshard_lab.

    torchrun {how}train.py

A run that was killed goes on when it is started again.
"""

from pathlib import Path

from recshard_lab.launcher import join
from recshard_lab.train.job import read_config, run_training

if __name__ == "__main__":
    config = read_config(Path(__file__).with_name("run.yaml"))
    with join():
        run_training(config)
'''


@checks_arguments
def export_run(
    config: TrainConfig,
    folder: str | Path,
    plan: ShardingPlan | None = None,
    *,
    topology: Topology | None = None,
) -> list[Path]:
    """Writes ``run.yaml``, ``plan.json`` and ``train.py``, which trains under torchrun as the config says.

    Args:
        config: the run. Its relative paths start at the folder from then on, so those of data should be absolute.
        folder: where they go; made where it is not there.
        plan: of the model's tables; planned for `topology` when left out.
        topology: the ranks.

    Returns:
        The files.

    Raises:
        ValueError: neither plan nor topology, or data that cannot be had.
        PlanError: a plan that is not of these tables on these ranks.

    >>> from tempfile import mkdtemp
    >>> data = {"name": "synthetic-criteo", "num_samples": 64, "test_samples": 0, "rows": [20, 30]}
    >>> run = TrainConfig(model={"name": "dlrm"}, data=data, batch_size=16)
    >>> [path.name for path in export_run(run, mkdtemp(), topology=Topology(2))]
    ['run.yaml', 'plan.json', 'train.py']
    """
    if plan is None and topology is None:
        raise ValueError("export_run needs a plan, or a topology to plan for: give topology=Topology(world_size=...)")
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
    said = config.model_copy(update={"plan": PlanSection(path="plan.json")})
    nodes = world_size // local
    how = "" if nodes == 1 else f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:PORT "
    texts = {
        "run.yaml": yaml.safe_dump(said.model_dump(exclude_defaults=True), sort_keys=False),
        "plan.json": plan.to_json(indent=2),
        "train.py": _SCRIPT.format(how=f"{how}--nproc-per-node {local} "),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]
