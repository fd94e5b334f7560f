"""Predicted steps of held-out random models and plans, with and without calibration: errors, and fastest schemes.

For each number of ranks: calibrate, then train models outside the fit under four schemes and a mixed plan. The same
measurements judge the default figures and the calibrated ones. Two other ways to pick a scheme are compared:
"measured twice" picks by one half of the turns and is judged by the other half, "table-wise" always picks table-wise.
A second set of models is beyond the range of the fitted ones: rows of 256 numbers, a million rows, batches of 16,384.
Published, on GPUs: an error of 5.2%, and 85% of picks right (arXiv 2404.12674).
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import Figure
from recshard_lab.calibration.calibrating import calibrate
from recshard_lab.calibration.held_out import HeldOut, Judged, layouts_line, measure_held_out

WORLDS = (2, 4)
SECONDS, QUICK_SECONDS = (50.0, 80.0, 40.0), (25.0, 35.0, 15.0)  # calibrating, held-out models, models beyond the range
MOST_ERROR, LEAST_CLOSE = 15.0, 85.0  # percent


def figures(*, quick: bool = False, only: Sequence[str] = ()) -> list[Figure]:
    """Errors and picks for each number of ranks.

    Args:
        quick: half the time.
        only: parts of names, "2 ranks". Default: all.

    Raises:
        ValueError: an `only` that is in no name.
    """
    from recshard_lab.launcher import launch

    names = {f"{world} ranks": world for world in WORLDS}
    for part in only:
        if not any(part in name for name in names):
            raise ValueError(f"no figure has {part!r} in its name. Names: {', '.join(names)}")
    calibrating, measuring, beyond = QUICK_SECONDS if quick else SECONDS
    found = []
    for name, world in names.items():
        if only and not any(part in name for part in only):
            continue
        with launch(world, devices="cpu") as ranks:
            calibration = calibrate(ranks, calibrating, progress=False)
            sets = {
                name: measure_held_out(ranks, measuring),
                f"{name}, beyond the range": measure_held_out(ranks, beyond, beyond=True),
            }
        for label, held_out in sets.items():
            before, after = held_out.judge(calibration.before), held_out.judge(calibration.topology)
            found += table(label, held_out, before, after, calibration.summary())
    return found


def table(name: str, held_out: HeldOut, before: Judged, after: Judged, fitted: str) -> list[Figure]:
    """The figures of one set of models."""
    note = (
        f"{name}: {fitted}\n"
        f"{name}: {len(held_out.step_ms)} held-out models, {held_out.step_ms.size} cases, steps of "
        f"{held_out.step_ms.min():.1f} to {held_out.step_ms.max():.1f} ms, {held_out.again} models measured a second "
        f"time. Predicted / measured: defaults {before.ratio:.2f}, calibrated {after.ratio:.2f}.\n"
        f"{name}: errors by layout: {layouts_line((('defaults', before), ('calibrated', after)))}."
    )
    target = not name.endswith("range")
    repeated, table_wise = held_out.repeated, held_out.table_wise

    def percent(what: str, value: float, defaults: float, twice: float, constant: float | None = None) -> Figure:
        beside = {"defaults": 100 * defaults, "measured twice": 100 * twice}
        if constant is not None:
            beside["table-wise"] = 100 * constant
        bound = {"target": MOST_ERROR} if "error" in what else {"target": LEAST_CLOSE, "at_most": False}
        kept = bound if target and "exact" not in what else {}
        return Figure(f"{name}: {what}", 100 * value, "%", beside=beside, note=note, **kept)  # type: ignore[arg-type]

    picks = {"picked within 5% of the fastest": "close", "fastest of four schemes picked (exact)": "exact"}
    return [
        percent("error of a step, geometric mean", after.error, before.error, held_out.noise),
        *(
            percent(what, *(getattr(one, kind) for one in (after.picks, before.picks, repeated, table_wise)))
            for what, kind in picks.items()
        ),
    ]
