"""What the figures were when they were last recorded: values for the docs, ratios to the reference for the gate."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from statistics import median

from benchmarks import Benchmark, Figure
from benchmarks.gate.reference import Reference, time_reference
from recshard_lab.cores import machine

TIMES_MS = {"ms": 1.0, "s": 1000.0}
"""Units of time, in milliseconds."""
FLOOR = 0.5
"""The least slowdown that fails: 50%. Machines whose caches differ measure ratios that differ by up to 30%."""
WIDER = 1.5
"""A slowdown fails beyond so many times the recorded variation, where that is more than `FLOOR`."""


@dataclass(frozen=True)
class Recorded:
    """A figure over several passes.

    Args:
        value: median, in `unit`.
        unit: of the figure.
        at_most: whether the target is an upper bound.
        ratio: median of the figure's CPU time divided by the reference step's; None for figures without a CPU time.
        variation: how far the worst pass was above that median, as a share of it.
        note: what the docs state beside the value instead of its date.
        step_ms: time of the reference step, ms by the clock, on the machine and in the state that `value` is from.
    """

    value: float
    unit: str
    at_most: bool = True
    ratio: float | None = None
    variation: float = 0.0
    note: str = ""
    step_ms: float | None = None

    def most(self, target: float) -> float | None:
        """The largest number of reference steps that keeps a figure; None for other units than time.

        By the clock it is the target, which holds on the recorded machine. By CPU time it is 50% more than recorded.

        >>> Recorded(50.0, "ms", step_ms=4.0).most(target=80.0)
        20.0
        >>> Recorded(50.0, "ms", step_ms=4.0, ratio=4.0, variation=0.1).most(target=80.0)
        6.0
        """
        if self.step_ms is None or self.unit not in TIMES_MS or not self.at_most:
            return None
        if self.ratio is None:
            return target * TIMES_MS[self.unit] / self.step_ms
        return self.ratio * (1 + max(FLOOR, WIDER * self.variation))


@dataclass(frozen=True)
class Pass:
    """One measurement of a benchmark: its figures, and the reference step before and after it."""

    figures: tuple[Figure, ...]
    reference: Reference


def measure(benchmark: Benchmark, **options: object) -> Pass:
    """Measures a benchmark once, with its options, between two measurements of the reference step.

    The faster one counts: threads that a benchmark leaves behind slow the second.
    """
    before = time_reference()
    figures = tuple(benchmark.run(**options))
    after = time_reference()
    return Pass(figures, Reference(min(before.wall, after.wall), min(before.cpu, after.cpu)))


def ratio_of(figure: Figure, reference: Reference) -> float | None:
    """The figure's CPU time divided by the reference step's; None for a figure without a CPU time.

    By the clock, the ratio of one process to several, or to one that waits, changes with what else a machine runs.

    >>> ratio_of(Figure("plan", 80.0, "ms", beside={"CPU": 20.0}), Reference(wall=40.0, cpu=10.0))
    2.0
    """
    return steps_of(figure, reference) if "CPU" in figure.beside else None


def steps_of(figure: Figure, reference: Reference) -> float:
    """A time in reference steps: by CPU time if the figure has one, otherwise by the clock.

    >>> steps_of(Figure("launch", 80.0, "ms"), Reference(wall=40.0, cpu=10.0))
    2.0
    """
    time, step = (figure.beside["CPU"], reference.cpu) if "CPU" in figure.beside else (figure.value, reference.wall)
    return time * TIMES_MS[figure.unit] / step


def recorded(passes: Iterable[Pass]) -> dict[str, Recorded]:
    """The figures of a benchmark that have a target, over several passes."""
    each = list(passes)
    found = {}
    for figure in each[0].figures:
        if figure.target is not None:
            same = [next(f for f in one.figures if f.name == figure.name) for one in each]
            ratios = [ratio_of(f, one.reference) for f, one in zip(same, each, strict=True)]
            step_ms = median(one.reference.wall for one in each)
            found[figure.name] = _recorded(same, [ratio for ratio in ratios if ratio is not None], rounded(step_ms))
    return found


def _recorded(same: list[Figure], ratios: list[float], step_ms: float) -> Recorded:
    value = rounded(median(f.value for f in same))
    if not ratios:
        return Recorded(value, same[0].unit, same[0].at_most, step_ms=step_ms)
    middle = median(ratios)
    variation = max(ratios) / middle - 1 if middle else 0.0
    return Recorded(value, same[0].unit, same[0].at_most, rounded(middle), rounded(variation), step_ms=step_ms)


def rounded(number: float) -> float:
    """To three digits.

    >>> rounded(0.0123456), rounded(98765.4)
    (0.0123, 98800.0)
    """
    return round(number, 2 - math.floor(math.log10(abs(number)))) if number else 0.0


class Record:
    """The committed file: benchmark -> machine, date, passes, figures.

    Args:
        path: JSON; an absent file is an empty record.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[str, dict[str, object]] = json.loads(path.read_text()) if path.exists() else {}

    def figures(self, benchmark: str) -> dict[str, Recorded]:
        """The recorded figures of a benchmark; none where it was never recorded."""
        entry = self.entries.get(benchmark, {})
        figures: Mapping[str, dict[str, object]] = entry.get("figures", {})  # type: ignore[assignment]
        return {name: Recorded(**fields) for name, fields in figures.items()}  # type: ignore[arg-type]

    def add(self, benchmark: Benchmark, passes: int, measuring: Callable[[Benchmark], Pass] = measure) -> None:
        """Measures a benchmark several times and writes its medians to the file."""
        found = recorded(measuring(benchmark) for _ in range(passes))
        self.entries[benchmark.name] = {
            "machine": machine(),
            "date": date.today().isoformat(),
            "passes": passes,
            "figures": {name: asdict(figure) for name, figure in found.items()},
        }
        self.path.write_text(json.dumps(self.entries, indent=1) + "\n")
