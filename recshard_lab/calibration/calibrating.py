"""Calibrates launched ranks: measures operators and whole steps, and fits the figures of a `Topology` to them."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import cycle
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from recshard_lab.arguments import checks_arguments
from recshard_lab.calibration import operators
from recshard_lab.calibration.alone import figures_alone, time_alone
from recshard_lab.calibration.cases import LAYOUTS, MAIN_OPTIMIZERS, Case, draw_cases, draw_model, lookup_case
from recshard_lab.calibration.clock import TimedOperator, as_dicts, by_op
from recshard_lab.calibration.fit import Fitted, Measurements, errors, figures_for, fit
from recshard_lab.calibration.load import OtherLoad, load_before, load_warning
from recshard_lab.calibration.predict import Predictions
from recshard_lab.calibration.steps import BUSY, Timed, time_cases, usual_ms
from recshard_lab.cores import driver, usable_cores
from recshard_lab.planner.workload import OPTIMIZER_STATE_BYTES, Array
from recshard_lab.sharding import Topology
from recshard_lab.sharding.hardware.device_profile import PER_OPTIMIZER, DeviceProfile
from recshard_lab.text_table import Printable, TextTable, wrapped

OTHER_OPTIMIZERS = tuple(name for name in OPTIMIZER_STATE_BYTES if name not in MAIN_OPTIMIZERS)
OTHER_LAYOUTS = ("table_wise", "row_wise")
NEW_SEEDS = 500  # first number of the seed of the model that is measured last
SEEDS = 7  # first number of the seeds of fitted models; benchmarks draw from others
MOST_NUMBERS = {"cpu": 2e6, "cuda": 2e8}  # ids x columns of a step: many short steps are better than a few long ones
TURNS, TURN_MS = 5, 12.0
REFERENCE = "reference_step"  # the operator of that name in a profile
FIT_S = 5.0  # reserved for the fit
LEAST_S = 5.0
TIMED_ALONE = {"peer_ms": 1.5, "intra_host_bw": 1.5}  # priors of figures that are timed alone too


@checks_arguments
@dataclass(frozen=True, eq=False)
class Calibration(Printable):
    """The result of `calibrate`.

    Attributes:
        profile: the device profile, to save.
        before: the topology of these ranks with default figures.
        before_error: error of its predictions on the fitted cases, geometric mean; `profile.error` is `topology`'s.
        figures: the fitted figures.
        new_error, new_before_error: the same errors on a model outside the fit, measured last.
    """

    profile: DeviceProfile
    before: Topology
    before_error: float
    figures: tuple[Fitted, ...]
    new_error: float
    new_before_error: float

    @property
    def helps(self) -> bool:
        """Whether the calibrated figures predict the model outside the fit better than the defaults."""
        return self.new_error < self.new_before_error

    @property
    def topology(self) -> Topology:
        """The calibrated topology, for the planner."""
        return self.profile.topology()

    def save(self, path: str | Path) -> None:
        """Writes the device profile for `Topology.from_profile` and ``recshard plan make --topology``."""
        self.profile.save(path)

    def parts(self) -> list[str | TextTable]:
        after = self.topology
        fitted = {figure.field for figure in self.figures}
        rows = [
            (name, f"{getattr(self.before, name):,.4g}", f"{value:,.4g}", "timed alone")
            for name, value in self.profile.figures.items()
            if name not in fitted and name not in PER_OPTIMIZER
        ]
        for figure in self.figures:
            value = getattr(self.before, figure.field)
            default = value if figure.optimizer is None else value.get(figure.optimizer, 0.0)
            spread = self.profile.spread.get(figure.name, float("nan"))
            rows.append((figure.name, f"{default:,.4g}", f"{figure.of(after):,.4g}", f"x or / {spread:.2f}"))
        table = TextTable(("figure", "default", "calibrated", "spread"), rows, right=(1, 2, 3))
        return [*self._sentences(), table]

    def summary(self) -> str:
        """Errors before and after, on fitted cases and on a new model, in lines of at most 100 characters."""
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
            f"{profile.world_size} rank{'s' * (profile.world_size > 1)} on {self._hardware()}, {profile.cases} cases "
            f"in {profile.seconds:.0f} s.",
            f"Error of predicted steps on these cases (geometric mean): {profile.error:.1%}, "
            f"{self.before_error:.1%} with the defaults.",
            f"Error on a new model: {new}. {verdict}",
            load_warning(profile.other_load),
        ]
        return [line for line in lines if line]

    def _hardware(self) -> str:
        cores, device = self.profile.cores_per_host, self.profile.machine.get("device", "")
        return device if self.profile.compute_device != "cpu" else f"{cores} core{'s' * (cores > 1)}"


def calibrate(ranks: Any, seconds: float = 50.0, *, progress: bool = True, seed: int = 0) -> Calibration:
    """Measures operators and whole steps on launched ranks and fits the planner's figures to them.

    1. Every rank times operators alone: launches, random reads, lookups, dense layers, copies (`operators.py`).
    2. The ranks time collectives by size and, on GPUs, by group (`collectives.py`).
    3. The ranks train random models under table-wise, row-wise, column-wise, replicated and mixed plans (`steps.py`).
       `fit` fits the other figures to these steps.
    4. One more model, outside the fit, gives the error before and after.

    On CPUs, the load of other programs is measured before and meanwhile. `DeviceProfile.other_load` has it, and a
    warning is printed above 10%.

    Args:
        ranks: launched ranks on one node: CPUs with Gloo, or one GPU per rank with NCCL.
        seconds: time budget. A budget too short for the main optimizers is exceeded by a model or two.
        progress: draw a bar.
        seed: of the models.

    Raises:
        ValueError: ranks on several nodes, ranks that share a GPU, fewer seconds than `LEAST_S`.
    """
    check_ranks(ranks)
    if not isinstance(seconds, int | float) or not LEAST_S <= seconds < float("inf"):
        raise ValueError(f"seconds must be a number from {LEAST_S:g} on, got {seconds!r:.40}. Fix: seconds=50")
    if not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed must be a whole number that is not negative, got {seed!r:.40}. Fix: seed=0")
    begun, before = perf_counter(), default_topology(ranks)
    warning = load_warning(load_before(ranks))
    if warning and progress:
        print(wrapped(warning))
    load, most = OtherLoad(ranks), MOST_NUMBERS[before.compute_device] / before.slowdown
    with _bar(progress, seconds) as report:
        report("operators", 0.0)
        timed = time_alone(ranks)
        alone = figures_alone(timed, before)
        cases: list[Case] = []
        found: list[Timed] = []
        for number, (optimizer, layouts) in enumerate(_turns()):
            spent = perf_counter() - begun
            if number >= len(MAIN_OPTIMIZERS) and spent + spent / number + FIT_S > seconds:
                break
            report(f"{optimizer} ({len(cases)} cases)", spent)
            drawn = draw_cases(draw_model((SEEDS, seed, number), optimizer, most), layouts, ranks.world_size)
            found += time_cases(ranks, drawn, turns=TURNS, turn_ms=TURN_MS, seed=number)
            cases += drawn
        report(f"fit to {len(cases)} cases", perf_counter() - begun)
        measured = measurements(cases, found)
        figures = [
            replace(each, factor=TIMED_ALONE.get(each.field, each.factor)) if each.field in alone else each
            for each in figures_for(operators.OPTIMIZERS, ranks.world_size, before.compute_device)
        ]
        lookups = _lookup_measurements(timed, ranks.world_size) if before.compute_device == "cpu" else None
        fitted = fit(measured, replace(before, **alone), figures, lookups)
        report("a new model", perf_counter() - begun)
        new = draw_cases(draw_model((NEW_SEEDS, seed), None, most), LAYOUTS, ranks.world_size)
        new_ms = np.array([one.step_ms for one in time_cases(ranks, new, turns=TURNS, turn_ms=TURN_MS, seed=seed)])

    def errors_of(cases: Sequence[Case], ms: Array) -> tuple[float, float]:
        """With the fitted figures, and with the defaults."""
        predictions = Predictions(cases, before)
        after, default = (errors(predictions.step_ms(top), ms)["error"] for top in (fitted.topology, before))
        return after, default

    error, before_error = errors_of(measured.cases, measured.step_ms)
    values = {**alone, **{figure.field: getattr(fitted.topology, figure.field) for figure in fitted.figures}}
    for name in PER_OPTIMIZER & values.keys():  # only the measured optimizers
        values[name] = {key: values[name][key] for key in operators.OPTIMIZERS if key in values[name]}
    profile = DeviceProfile(
        world_size=before.world_size,
        local_world_size=before.local_world_size,
        compute_device=before.compute_device,
        cores_per_host=before.cores_per_host,
        figures=values,
        machine=ranks.run(machine)[0],
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=round(perf_counter() - begun, 1),
        spread={figure.name: float(spread) for figure, spread in zip(fitted.figures, fitted.spread, strict=True)},
        kernels=ranks.run(operators.kernels_on_rank)[0],
        operators=tuple(as_dicts([*timed, TimedOperator(REFERENCE, (), usual_ms(found))])),
        cases=len(measured.cases),
        error=error,
        other_load=round(load.share(), 3),
    )
    return Calibration(profile, before, before_error, fitted.figures, *errors_of(new, new_ms))


def check_ranks(ranks: Any) -> None:
    """Raises ValueError for ranks whose times cannot be measured."""
    if not all(hasattr(ranks, name) for name in ("world_size", "nodes", "backend", "devices", "run")):
        raise ValueError(f"ranks must be launched ranks, got {ranks!r:.60}. Fix: ranks=recshard_lab.launch(2)")
    if ranks.nodes != 1:
        raise ValueError(
            f"the ranks live on {ranks.nodes} nodes: virtual nodes have no link that could be measured. "
            f"Fix: launch({ranks.world_size}) without nodes."
        )
    if ranks.devices[0].type != "cpu" and len(set(map(str, ranks.devices))) < ranks.world_size:
        raise ValueError(
            f"{ranks.world_size} ranks share {ranks.devices[0]}: each waits for the others' kernels, so no rank's time "
            f"can be measured. Fix: launch({len(set(map(str, ranks.devices)))}), or launch({ranks.world_size}, "
            f"devices='cpu')"
        )


def default_topology(ranks: Any) -> Topology:
    """The topology of these ranks with default figures; on GPUs, with their memory in bytes."""
    if ranks.devices[0].type == "cpu":
        return Topology(ranks.world_size)
    return Topology(ranks.world_size, compute_device="cuda", hbm_cap=min(ranks.run(_memory_bytes)))


def _memory_bytes() -> int:
    import torch

    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)


def measurements(cases: Sequence[Case], timed: Sequence[Timed]) -> Measurements:
    """Measured cases for `fit`, without those of busy moments unless an optimizer has no others."""
    usual = usual_ms(timed)
    quiet = {i for i, one in enumerate(timed) if one.reference_ms <= BUSY * usual}
    missing = set(_optimizers(cases)) - set(_optimizers([cases[i] for i in quiet]))
    kept = [i for i in range(len(cases)) if i in quiet or cases[i].model.workload.optimizer in missing]
    parts = np.array([_parts(cases[i], timed[i]) for i in kept])
    return Measurements([cases[i] for i in kept], np.array([timed[i].step_ms for i in kept]), parts)


def _lookup_measurements(alone: Sequence[TimedOperator], world_size: int) -> Measurements:
    """Lookups that were timed alone, as cases: each rank holds one table and looks up the ids of all ranks.

    Random models cannot separate an optimizer's time for memory from that for arithmetic. A large table and one that a
    cache holds can.
    """
    ops, cases, parts = by_op(alone), [], []
    forward = {one.sizes: one.ms for one in ops["lookup"]}
    for one in (one for op, timed in ops.items() if op.startswith("train/") for one in timed):
        cases.append(lookup_case(one.op.removeprefix("train/"), world_size, *one.sizes))
        parts.append([np.nan, forward[one.sizes], np.nan, max(one.ms - forward[one.sizes], 1e-6)])
    return Measurements(cases, np.full(len(cases), np.nan), np.array(parts))


def _parts(case: Case, timed: Timed) -> list[float]:
    """Milliseconds of `PARTS`: kernels of the slowest rank; exchanges of the rank that joins last and never waits."""
    ms = timed.phases_ms
    parts = [ms[:, 0].min(), ms[:, 1].max(), ms[:, 2:5].sum(axis=1).min(), ms[:, 5].max()]
    if len(ms) == 1 or case.layout == "data_parallel":  # no message between lookup and gradients
        parts[1] = parts[2] = np.nan
    return [float(part) if part > 0 else np.nan for part in parts]


def _turns() -> Iterator[tuple[str, Sequence[str]]]:
    """Optimizer and layouts of each model: rounds of the main optimizers and one of the others."""
    for other in cycle(OTHER_OPTIMIZERS):
        for optimizer in MAIN_OPTIMIZERS:
            yield optimizer, LAYOUTS
        yield other, OTHER_LAYOUTS


def _optimizers(cases: Sequence[Case]) -> list[str]:
    return list(dict.fromkeys(case.model.workload.optimizer for case in cases))


def machine() -> dict[str, str]:
    """System, processor, device, driver and versions of this rank."""
    import torch
    import torch.distributed as dist

    from recshard_lab.comm import ShardingEnv, compute_device, uses_nccl

    env = ShardingEnv.default()
    found = {
        "system": f"{platform.system()} {platform.release()}",
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "cores": str(usable_cores()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "backend": "nccl" if uses_nccl(env) else "gloo",
    }
    if compute_device(env).type == "cuda":
        found["device"] = torch.cuda.get_device_name()
        found["driver"] = driver()
        found["cuda"] = str(torch.version.cuda)
        if dist.is_nccl_available():
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


@contextmanager
def _bar(progress: bool, seconds: float) -> Iterator[Any]:
    """Yields a function of the current work and the seconds spent, which updates the bar."""
    if not progress:
        yield lambda what, spent: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("calibrating"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task("", total=seconds)
        yield lambda what, spent: bar.update(task, description=what, completed=spent)
