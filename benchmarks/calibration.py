"""Predicted steps of held-out random models and plans, with and without calibration: errors, and fastest schemes.

For each number of ranks: calibrate, then train models that were not fitted to, under four schemes and a mixed plan.
Predictions by the defaults and by the calibration are judged by the same measurements. Beside them stand what measuring
is worth (two halves of the same turns against each other), and how often the most common winner wins, which is what
picking always the same scheme would get. Published to beat: 5.2% and 85% of picks (arXiv 2404.12674), on GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import Figure
from recshard_lab.calibration.calibrating import calibrate
from recshard_lab.calibration.held_out import HeldOut, Judged, layouts_line, measure_held_out

WORLDS = (2, 4)
SECONDS, QUICK_SECONDS = (50.0, 80.0), (25.0, 35.0)  # of calibrating, of measuring held-out models
MOST_ERROR, LEAST_PICKED = 15.0, 85.0  # percent


def figures(*, quick: bool = False, only: Sequence[str] = ()) -> list[Figure]:
    """Errors and picks for each number of ranks.

    Args:
        quick: half the time.
        only: parts of names, "2 ranks"; all when left out.

    Raises:
        ValueError: an `only` that is in no name.
    """
    from recshard_lab.launcher import launch

    names = {f"{world} ranks": world for world in WORLDS}
    for part in only:
        if not any(part in name for name in names):
            raise ValueError(f"nothing is named {part!r}; there are: {', '.join(names)}")
    calibrating, measuring = QUICK_SECONDS if quick else SECONDS
    found = []
    for name, world in names.items():
        if only and not any(part in name for part in only):
            continue
        with launch(world) as ranks:
            calibration = calibrate(ranks, calibrating, progress=False)
            held_out = measure_held_out(ranks, measuring)
        before, after = held_out.judge(calibration.before), held_out.judge(calibration.topology)
        found += table(name, held_out, before, after, calibration.summary())
    return found


def table(name: str, held_out: HeldOut, before: Judged, after: Judged, fitted: str) -> list[Figure]:
    """The figures of one number of ranks."""
    models = len(held_out.step_ms)
    favourite, share = held_out.favourite
    note = (
        f"{name}: {fitted}.\n"
        f"{name}: {models} held-out models, {held_out.step_ms.size} cases, steps of {held_out.step_ms.min():.1f} to "
        f"{held_out.step_ms.max():.1f} ms; {held_out.again} measured again in a quieter moment. Predicted / measured: "
        f"defaults {before.ratio:.2f}, calibrated {after.ratio:.2f}.\n"
        f"{name}: errors by layout: {layouts_line((('defaults', before), ('calibrated', after)))}.\n"
        f"{name}: 'repeated' compares two halves of the same turns; 'constant' picks always {favourite}."
    )
    constant = 100 * share

    def percent(what: str, first: float, second: float, **more: float) -> Figure:
        bound = {"target": MOST_ERROR} if "error" in what else {"target": LEAST_PICKED, "at_most": False}
        beside = {"defaults": 100 * first, **more}
        kept = bound if "within" not in what else {}
        return Figure(f"{name}: {what}", 100 * second, "%", beside=beside, note=note, **kept)  # type: ignore[arg-type]

    repeated, agreed = 100 * held_out.noise, 100 * held_out.agreed
    return [
        percent("error of a step, geometric mean", before.error, after.error, repeated=repeated),
        percent("fastest of four schemes picked", before.picked, after.picked, repeated=agreed, constant=constant),
        percent("picked within 5% of the fastest", before.close, after.close),
    ]
