"""``recshard calibrate``: measures this machine and writes or checks a device profile."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recshard_lab.cli.options import OUTPUT, check_out, note_written, ranks_option


def calibrate(
    ranks: Annotated[int, ranks_option("Number of ranks to launch and measure.")] = 2,
    seconds: Annotated[float, typer.Option(help="Time budget in seconds. A longer run is more exact.")] = 50.0,
    cpu: Annotated[bool, typer.Option("--cpu", help="Measure CPU ranks even if every rank has a GPU.")] = False,
    check: Annotated[
        Path | None,
        typer.Option(help="Measure for a few seconds, compare with this device profile, and exit with 1 on drift."),
    ] = None,
    threshold: Annotated[float, typer.Option(help="With --check: relative change that counts as drift.")] = 0.25,
    out: Annotated[Path, typer.Option(help="Path of the device profile, .json.", rich_help_panel=OUTPUT)] = Path(
        "device_profile.json"
    ),
) -> None:
    """Measure operators, collectives and steps on this machine, and fit the planner's cost model to them."""
    from recshard_lab.calibration import calibrate as run
    from recshard_lab.calibration import check as check_drift
    from recshard_lab.launcher import launch
    from recshard_lab.sharding.hardware.device_profile import DeviceProfile

    if check is not None:
        profile = DeviceProfile.load(check)
        with launch(profile.world_size, devices="cpu" if profile.compute_device == "cpu" else None) as launched:
            drift = check_drift(launched, profile, threshold)
        print(drift)
        raise typer.Exit(1 if drift.moved else 0)
    check_out([out], {".json": "a device profile"})
    with launch(ranks, devices="cpu" if cpu else None) as launched:
        found = run(launched, seconds)
    found.save(out)
    print(found)
    print(f"\nPlan with it: recshard plan make TABLES --topology {out}")
    print(f"Later, check whether it still holds: recshard calibrate --check {out}")
    note_written(out)
