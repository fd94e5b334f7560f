"""``recshard calibrate``: what steps cost on this machine, as a file that ``recshard plan --topology`` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def calibrate(
    ranks: Annotated[int, typer.Option(help="How many ranks to launch and measure.", min=1)] = 2,
    out: Annotated[Path, typer.Option(help="Where the device profile goes, as JSON.")] = Path("device_profile.json"),
    seconds: Annotated[float, typer.Option(help="How long it may take; more is more exact.")] = 50.0,
) -> None:
    """Measure lookups, optimizers, collectives and steps on this machine, and fit the planner's figures to them."""
    from recshard_lab.calibration import calibrate as run
    from recshard_lab.launcher import launch

    with launch(ranks, backend="gloo") as launched:
        found = run(launched, seconds)
    found.save(out)
    print(found)
    print(f"\nWrote {out}. Plan with it: recshard plan TABLES --topology {out}, or Topology.from_profile({str(out)!r})")
