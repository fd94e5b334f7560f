"""Calibrates launched ranks: measures for a while, fits, and says what was found."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from recshard_lab.arguments import checks_arguments
from recshard_lab.calibration.cases import LAYOUTS, MAIN_OPTIMIZERS, Case, draw_cases, draw_model
from recshard_lab.calibration.collectives import as_dicts, dense_flops_per_ms, figures_of, time_collectives
from recshard_lab.calibration.fit import PER_OPTIMIZER, Fit, Fitted, Measurements, errors, figures_for, fit
from recshard_lab.calibration.load import OtherLoad, load_before, load_warning
from recshard_lab.calibration.predict import Predictions
from recshard_lab.calibration.steps import BUSY, Timed, time_cases, usual_ms
from recshard_lab.cores import usable_cores
from recshard_lab.planner.workload import OPTIMIZER_STATE_BYTES
from recshard_lab.sharding import Topology
from recshard_lab.sharding.hardware.device_profile import DeviceProfile
from recshard_lab.text_table import Printable, TextTable, wrapped

OTHER_OPTIMIZERS = tuple(name for name in OPTIMIZER_STATE_BYTES if name not in MAIN_OPTIMIZERS)
OTHER_LAYOUTS = ("table_wise", "row_wise")
NEW_SEEDS = 500  # first number of the seed of the model that nothing is fitted to
SEEDS = 7  # first number of the seeds of the models that are calibrated with; benchmarks draw from others
MOST_NUMBERS = 2e6  # of a model here: many short steps say more than a few long ones
TURNS, TURN_MS = 5, 12.0
FIT_S = 5.0  # kept back for the fit
LEAST_S = 5.0
MEASURED_APART = {"peer_ms": 1.5, "intra_host_bw": 1.5}  # how far whole steps may move what was timed alone


class Ranks(Protocol):
    """What is needed of launched ranks."""

    @property
    def world_size(self) -> int: ...

    @property
    def nodes(self) -> int: ...

    @property
    def backend(self) -> str: ...

    @property
    def devices(self) -> Sequence[Any]: ...

    def run(self, fn: Any, /, *args: Any) -> list[Any]: ...


@checks_arguments
@dataclass(frozen=True, eq=False)
class Calibration(Printable):
    """What was found.

    Attributes:
        profile: to save, and to load as a `Topology`.
        before: the topology of so many ranks by the defaults.
        before_error: geometric mean of its errors on the cases that were fitted to; `profile.error` is that after.
        figures: those that were fitted.
        new_error, new_before_error: the same two on a model that nothing was fitted to, measured last.
    """

    profile: DeviceProfile
    before: Topology
    before_error: float
    figures: tuple[Fitted, ...]
    new_error: float
    new_before_error: float

    @property
    def helps(self) -> bool:
        """Whether the calibrated figures are nearer than the defaults on the model that nothing was fitted to."""
        return self.new_error < self.new_before_error

    @property
    def topology(self) -> Topology:
        """The ranks as the planner should see them."""
        return self.profile.topology()

    def save(self, path: str | Path) -> None:
        """Writes the device profile, which `Topology.from_profile` and ``recshard plan --topology`` read."""
        self.profile.save(path)

    def parts(self) -> list[str | TextTable]:
        after = self.topology
        rows = [
            (name, f"{getattr(self.before, name):,.4g}", f"{getattr(after, name):,.4g}", "")
            for name in ("flops_per_ms", "reduce_scatter_cost")
        ]
        for figure in self.figures:
            value = getattr(self.before, figure.field)
            default = value if figure.optimizer is None else value.get(figure.optimizer, 0.0)
            spread = self.profile.spread.get(figure.name, float("nan"))
            rows.append((figure.name, f"{default:,.4g}", f"{figure.of(after):,.4g}", f"x or / {spread:.2f}"))
        table = TextTable(("figure", "default", "calibrated", "spread"), rows, right=(1, 2, 3))
        return [*self._sentences(), table]

    def summary(self) -> str:
        """The error of predictions before and after calibration, in lines of at most 100 characters."""
        return "\n".join(map(wrapped, self._sentences()))

    def _sentences(self) -> list[str]:
        profile = self.profile
        new = f"{self.new_error:.1%} with the calibrated figures, {self.new_before_error:.1%} with the defaults"
        verdict = (
            "Calibrated figures are nearer."
            if self.helps
            else ("Calibration did not help. Fix: calibrate again on a quiet machine, or for more seconds.")
        )
        lines = [
            f"{profile.world_size} rank{'s' * (profile.world_size > 1)} on {profile.cores_per_host} "
            f"core{'s' * (profile.cores_per_host > 1)}, {profile.cases} cases in {profile.seconds:.0f} s.",
            f"Error of predicted steps on these cases (geometric mean): {profile.error:.1%}, "
            f"{self.before_error:.1%} with the defaults.",
            f"Error on a new model: {new}. {verdict}",
            load_warning(profile.other_load),
        ]
        return [line for line in lines if line]


def calibrate(ranks: Ranks, seconds: float = 50.0, *, progress: bool = True, seed: int = 0) -> Calibration:
    """Measures what steps cost on launched ranks and fits the planner's figures to it.

    Collectives and dense arithmetic are timed alone, then random models under random plans are trained for a few steps
    each: every optimizer, table-wise, row-wise, column-wise, replicated and mixed. The figures follow by `fit`. One
    more model, which nothing is fitted to, is measured last and says whether the figures help.

    The load of other programs on the cores is measured before and meanwhile; it is kept as
    `DeviceProfile.other_load`, and a warning is printed where it is large.

    Args:
        ranks: as `launch` returns them: Gloo on CPU, one node.
        seconds: how long it may take; a model or two more if it is too short for every optimizer once.
        progress: draw a bar.
        seed: of the models.

    Raises:
        ValueError: ranks on several nodes or on GPUs, fewer seconds than `LEAST_S`.
    """
    if not all(hasattr(ranks, name) for name in ("world_size", "nodes", "backend", "devices", "run")):
        raise ValueError(f"ranks must be launched ranks (recshard_lab.launch), got {ranks!r:.60}")
    if not isinstance(seconds, int | float) or not LEAST_S <= seconds < float("inf"):
        raise ValueError(f"seconds must be a number from {LEAST_S:g} on, got {seconds!r:.40}")
    if not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed must be a whole number that is not negative, got {seed!r:.40}")
    if ranks.nodes != 1:
        raise ValueError(
            f"the ranks live on {ranks.nodes} nodes: virtual nodes have no link of their own that could be measured. "
            f"Fix: launch({ranks.world_size}) without nodes."
        )
    if ranks.devices[0].type != "cpu":
        raise ValueError(
            f"the ranks compute on {ranks.devices[0]} over {ranks.backend}: calibration measures ranks on the CPU. "
            f"Fix: launch({ranks.world_size}, devices='cpu'), or Topology.preset for published figures of GPUs."
        )
    begun, before = perf_counter(), Topology(ranks.world_size)
    warning = load_warning(load_before(ranks))
    if warning and progress:
        print(warning)
    load = OtherLoad(ranks)
    with _bar(progress, seconds) as tell:
        tell("collectives", 0.0)
        timed = time_collectives(ranks)
        alone = figures_of(timed, before)
        alone["flops_per_ms"] = dense_flops_per_ms(ranks) * before.slowdown
        start = replace(before, **alone)  # type: ignore[arg-type]
        cases: list[Case] = []
        found: list[Timed] = []
        for number, (optimizer, layouts) in enumerate(_turns()):
            spent = perf_counter() - begun
            each = spent / max(1, number)
            if number >= len(OPTIMIZER_STATE_BYTES) and spent + each + FIT_S > seconds:
                break
            tell(f"{optimizer} ({len(cases)} cases)", spent)
            model = draw_model((SEEDS, seed, number), optimizer, MOST_NUMBERS / before.slowdown)
            own = draw_cases(model, layouts, ranks.world_size)
            found += time_cases(ranks, own, turns=TURNS, turn_ms=TURN_MS, seed=number)
            cases += own
        tell(f"fit to {len(cases)} cases", perf_counter() - begun)
        measured = measurements(cases, found)
        figures = [_narrowed(figure, alone) for figure in figures_for(_optimizers(measured.cases), ranks.world_size)]
        fitted = fit(measured, start, figures)
        tell("a new model", perf_counter() - begun)
        new = draw_cases(draw_model((NEW_SEEDS, seed), None, MOST_NUMBERS / before.slowdown), LAYOUTS, ranks.world_size)
        new_ms = np.array([one.step_ms for one in time_cases(ranks, new, turns=TURNS, turn_ms=TURN_MS, seed=seed)])
    predict = Predictions(new, before)
    checked = [errors(predict.step_ms(top), new_ms)["error"] for top in (fitted.topology, before)]
    kernels = _kernels(cases, found)
    spent, share = perf_counter() - begun, load.share()
    return _calibration(fitted, measured, kernels, alone, before, as_dicts(timed), spent, share, checked)


def measurements(cases: Sequence[Case], timed: Sequence[Timed]) -> Measurements:
    """What cases took, as `fit` wants it; those of busy moments are left out, unless nothing else is there."""
    usual = usual_ms(timed)
    quiet = [i for i, one in enumerate(timed) if one.reference_ms <= BUSY * usual]
    missing = {case.model.workload.optimizer for case in cases} - {cases[i].model.workload.optimizer for i in quiet}
    kept = [i for i in range(len(cases)) if i in set(quiet) or cases[i].model.workload.optimizer in missing]
    phases = np.array([_parts(cases[i], timed[i]) for i in kept])
    return Measurements([cases[i] for i in kept], np.array([timed[i].step_ms for i in kept]), phases)


def _parts(case: Case, timed: Timed) -> list[float]:
    """ms of `PARTS`: kernels' of the slowest rank, exchanges' of the last rank to join them, which waits for nobody."""
    ms = timed.phases_ms
    parts = [ms[:, 0].min(), ms[:, 1].max(), ms[:, 2:5].sum(axis=1).min(), ms[:, 5].max()]
    if len(ms) == 1 or case.layout == "data_parallel":  # nothing is sent between lookup and gradients
        parts[1] = parts[2] = np.nan
    return [float(part) if part > 0 else np.nan for part in parts]


def _turns() -> Iterator[tuple[str, Sequence[str]]]:
    """Optimizers and layouts of one model after the other: each optimizer once, then mostly the main ones."""
    for optimizer in MAIN_OPTIMIZERS:
        yield optimizer, LAYOUTS
    for optimizer in OTHER_OPTIMIZERS:
        yield optimizer, OTHER_LAYOUTS
    number = 0
    while True:
        for optimizer in MAIN_OPTIMIZERS:
            yield optimizer, LAYOUTS
        yield OTHER_OPTIMIZERS[number % len(OTHER_OPTIMIZERS)], OTHER_LAYOUTS
        number += 1


def _optimizers(cases: Sequence[Case]) -> list[str]:
    return list(dict.fromkeys(case.model.workload.optimizer for case in cases))


def _narrowed(figure: Fitted, alone: dict[str, float]) -> Fitted:
    if figure.field in alone and figure.field in MEASURED_APART:
        return replace(figure, factor=MEASURED_APART[figure.field])
    return figure


def _calibration(
    fitted: Fit,
    measured: Measurements,
    kernels: dict[str, list[str]],
    alone: dict[str, float],
    before: Topology,
    collectives: list[dict[str, Any]],
    seconds: float,
    other_load: float,
    checked: Sequence[float],
) -> Calibration:
    predictions = Predictions(measured.cases, before)
    figures = dict(alone)
    per_optimizer = {figure.field for figure in PER_OPTIMIZER}
    for figure in fitted.figures:
        value = getattr(fitted.topology, figure.field)
        if figure.field in per_optimizer:
            value = {name: own for name, own in value.items() if name in _optimizers(measured.cases)}
        figures[figure.field] = value
    profile = DeviceProfile(
        world_size=before.world_size,
        local_world_size=before.local_world_size,
        compute_device=before.compute_device,
        cores_per_host=before.cores_per_host,
        figures=figures,
        machine=machine(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=round(seconds, 1),
        spread={figure.name: float(spread) for figure, spread in zip(fitted.figures, fitted.spread, strict=True)},
        kernels=kernels,
        collectives=tuple(collectives),
        cases=len(measured.cases),
        error=errors(predictions.step_ms(fitted.topology), measured.step_ms)["error"],
        other_load=round(other_load, 3),
    )
    before_error = errors(predictions.step_ms(before), measured.step_ms)["error"]
    return Calibration(profile, before, before_error, fitted.figures, *checked)


def _kernels(cases: Sequence[Case], timed: Sequence[Timed]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for case, one in zip(cases, timed, strict=True):
        known = found.setdefault(case.model.workload.optimizer, [])
        known += [name for name in one.kernels if name not in known]
    return found


def machine() -> dict[str, str]:
    """What was measured on, and with."""
    import torch

    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "cores": str(usable_cores()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "backend": "gloo",
    }


@contextmanager
def _bar(progress: bool, seconds: float) -> Iterator[Any]:
    """Gives what is called with what is going on, and the seconds spent."""
    if not progress:
        yield lambda what, spent: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("calibrating"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task("", total=seconds)
        yield lambda what, spent: bar.update(task, description=what, completed=spent)
