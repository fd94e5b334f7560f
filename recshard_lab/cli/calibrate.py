"""``recshard calibrate``: measures this machine and writes a profile for ``recshard plan --topology``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def calibrate(
    ranks: Annotated[int, typer.Option(help="Number of ranks to launch and measure.", min=1)] = 2,
    out: Annotated[Path, typer.Option(help="Path of the device profile, JSON.")] = Path("device_profile.json"),
    seconds: Annotated[float, typer.Option(help="Time budget in seconds. A longer run is more exact.")] = 50.0,
) -> None:
    """Measure lookups, optimizers, collectives and steps on this machine, and fit the planner's cost model to them."""
    from recshard_lab.calibration import calibrate as run
    from recshard_lab.launcher import launch

    with launch(ranks, backend="gloo") as launched:
        found = run(launched, seconds)
    found.save(out)
    print(found)
    print(f"\nWrote {out}. Plan with it: recshard plan TABLES --topology {out}, or Topology.from_profile({str(out)!r})")
