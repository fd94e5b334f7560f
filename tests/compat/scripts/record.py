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
SCRIPTS = ("training_loop", "planned_pipeline", "two_tower", "walk_through")
LOSSES = HERE / "losses.json"


def losses_of(python: str, *command: str) -> list[list[float]]:
    """Runs a script on two ranks. The losses of each rank.

    Raises:
        RuntimeError: it failed, with the end of what it printed.
    """
    done = subprocess.run(
        [python, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *command],
        capture_output=True,
        text=True,
        check=False,
        cwd=HERE,
        env={**os.environ, "PYTHONPATH": str(HERE.parents[2]), "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        raise RuntimeError(f"{command} ended with {done.returncode}:\n{done.stderr[-6000:]}")
    found = re.findall(r"rank (\d) loss (\d+\.\d{6})", done.stdout)
    return [[float(loss) for number, loss in found if number == str(rank)] for rank in range(2)]


def main() -> None:
    """The command."""
    with TorchRecEnv() as env:
        found = {name: losses_of(env.python, f"{name}.py") for name in SCRIPTS}
    LOSSES.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
