"""The whole sweep: what is too long for every CI run. ``.ci/run --sweep`` sets RECSHARD_SWEEP=1.

`CONTRIBUTING.md` lists what only the sweep runs, and why.
"""

import os

SWEEP = os.environ.get("RECSHARD_SWEEP") == "1"


def cases(in_sweep: int) -> int:
    """How many random problems a test of the planner draws: a third of them in the gate."""
    return in_sweep if SWEEP else in_sweep // 3
