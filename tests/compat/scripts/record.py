"""Records the losses of these scripts under TorchRec: ``python -m tests.compat.scripts.record``, from the root.

``RECSHARD_PEERS`` names the interpreter of an environment with TorchRec; without it one is made.
"""

import json
import os
import re
import subprocess
from pathlib import Path

from benchmarks.apparatus.environments import TorchRecEnv

HERE = Path(__file__).parent
SCRIPTS = ("training_loop", "planned_pipeline", "two_tower", "walk_through", "criteo_dlrm")
RUNS = {
    f"{name} on {ranks}": (name, ranks) for name in SCRIPTS for ranks in ((1, 2) if name == "criteo_dlrm" else (2,))
}
LOSSES = HERE / "losses.json"


def losses_of(ranks: int, python: str, *command: str) -> list[list[float]]:
    """Runs a script on ranks. The losses of each rank.

    Raises:
        RuntimeError: it failed, with the end of what it printed.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [python, "-W", "ignore", *torchrun, *command],
        capture_output=True,
        text=True,
        check=False,
        cwd=HERE,
        env={**os.environ, "PYTHONPATH": str(HERE.parents[2]), "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        raise RuntimeError(f"{command} ended with {done.returncode}:\n{done.stderr[-6000:]}")
    found = re.findall(r"rank (\d) loss (\d+\.\d{6})", done.stdout)
    return [[float(loss) for number, loss in found if number == str(rank)] for rank in range(ranks)]


def main() -> None:
    """The command."""
    with TorchRecEnv() as env:
        found = {run: losses_of(ranks, env.python, f"{name}.py") for run, (name, ranks) in RUNS.items()}
    LOSSES.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
