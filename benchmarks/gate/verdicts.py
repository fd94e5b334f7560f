"""Verdicts on figures: kept or missed, by the median of three where the first try misses."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median

from benchmarks import Benchmark, Figure
from benchmarks.gate.record import Pass, Recorded, measure, ratio_of
from recshard_lab.cores import machine

TRIES = 3


@dataclass(frozen=True)
class Verdict:
    """A figure with a target, and all that was measured of it.

    Args:
        benchmark: its benchmark's name.
        tries: the figure of each pass, one or `TRIES`.
        passes: the passes.
        recorded: what it was when it was recorded.
    """

    benchmark: str
    tries: tuple[Figure, ...]
    passes: tuple[Pass, ...]
    recorded: Recorded

    @property
    def slowdowns(self) -> tuple[float, ...]:
        """How many times as slow as the recorded machine this one was in each pass, at least 1."""
        return tuple(self.recorded.slowdown(f, one.reference) for f, one in zip(self.tries, self.passes, strict=True))

    @property
    def figure(self) -> Figure:
        """The figure with the median of the tries, a time as it is at the recorded machine's speed.

        A try that is NaN counts as the worst.
        """
        first = self.tries[0]
        worst = math.inf if first.at_most else -math.inf
        values = [
            f.value / slow if f.value == f.value else worst for f, slow in zip(self.tries, self.slowdowns, strict=True)
        ]
        return Figure(first.name, median(values), first.unit, first.target, first.at_most)

    @property
    def ratio(self) -> float | None:
        """The median ratio to the reference step; None for figures without a CPU time."""
        ratios = [ratio_of(f, one.reference) for f, one in zip(self.tries, self.passes, strict=True)]
        known = [math.inf if ratio != ratio else ratio for ratio in ratios if ratio is not None]
        return median(known) if known else None

    @property
    def missed(self) -> str:
        """Why the figure is missed; empty where it is kept."""
        figure, most = self.figure, self.recorded.most
        if not figure.ok:
            return f"{figure.value:.4g} {figure.unit} misses its target of {figure.bound}"
        if self.ratio is not None and most is not None and self.ratio > most:
            return (
                f"{self.ratio:.4g} reference steps, recorded {self.recorded.ratio:.4g}, at most {most:.4g}: slower code"
            )
        return ""

    def as_dict(self) -> dict[str, object]:
        """Plain data for the JSON file. Infinite medians are null."""
        figure = self.figure
        return {
            "benchmark": self.benchmark,
            "figure": figure.name,
            "unit": figure.unit,
            "tries": [f.value if math.isfinite(f.value) else None for f in self.tries],
            "slowdowns": list(self.slowdowns),
            "median": figure.value if math.isfinite(figure.value) else None,
            "target": figure.target,
            "at_most": figure.at_most,
            "reference_step_ms": [one.reference.wall for one in self.passes],
            "reference_step_cpu_ms": [one.reference.cpu for one in self.passes],
            "cpu": [f.beside.get("CPU") for f in self.tries],
            "ratio": self.ratio if self.ratio is None or math.isfinite(self.ratio) else None,
            "recorded_ratio": self.recorded.ratio,
            "most_ratio": self.recorded.most,
            "ok": not self.missed,
            "missed": self.missed,
        }


def judge(
    benchmark: Benchmark, known: Mapping[str, Recorded], measuring: Callable[[Benchmark], Pass] = measure
) -> list[Verdict]:
    """Measures a benchmark once, and two more times when a figure misses. Every figure is then judged by its median.

    Args:
        benchmark: what is measured.
        known: its recorded figures.
        measuring: measures it once.

    Raises:
        ValueError: a figure with a target is not recorded, or a target or a recorded figure is not measured.
    """
    passes = [measuring(benchmark)]
    found = _verdicts(benchmark, passes, known)
    if any(verdict.missed for verdict in found):
        passes += [measuring(benchmark) for _ in range(TRIES - 1)]
        found = _verdicts(benchmark, passes, known)
    return found


def _verdicts(benchmark: Benchmark, passes: list[Pass], known: Mapping[str, Recorded]) -> list[Verdict]:
    by_name = [{f.name: f for f in one.figures if f.target is not None} for one in passes]
    names = list(by_name[0])
    for what, others in (("recorded", known), ("a target", benchmark.targets)):
        if others and (absent := sorted(set(others) - set(names))):
            raise ValueError(f"benchmark {benchmark.name!r} did not measure {absent[0]!r}, which is {what}. {_FIX}")
    if unknown := sorted(set(names) - set(known)):
        raise ValueError(f"benchmark {benchmark.name!r} has no record of {unknown[0]!r}. {_FIX}")
    return [
        Verdict(benchmark.name, tuple(each[name] for each in by_name), tuple(passes), known[name]) for name in names
    ]


_FIX = "Fix: python -m benchmarks.gate record NAME, and commit the file."


def write(path: Path, verdicts: Iterable[Verdict]) -> None:
    """Writes all tries of all figures, with the machine and the date."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"machine": machine(), "date": datetime.now().isoformat(timespec="seconds")}
    path.write_text(json.dumps(data | {"figures": [verdict.as_dict() for verdict in verdicts]}, indent=1) + "\n")
