"""Verdicts on figures, each measured once: kept or missed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from benchmarks import Benchmark, Figure
from benchmarks.gate.record import Pass, Recorded, measure, steps_of
from benchmarks.gate.reference import Reference
from recshard_lab.cores import machine


@dataclass(frozen=True)
class Verdict:
    """A figure with a target, and whether it keeps the target.

    Args:
        benchmark: its benchmark's name.
        figure: what was measured.
        reference: the reference step beside it.
        recorded: what the figure was when it was recorded.
    """

    benchmark: str
    figure: Figure
    reference: Reference
    recorded: Recorded

    @property
    def most(self) -> float | None:
        """The largest number of reference steps that keeps the figure; None if it is not a time."""
        assert self.figure.target is not None
        return self.recorded.most(self.figure.target)

    @property
    def steps(self) -> float | None:
        """The figure in reference steps; None if it is not a time."""
        return None if self.most is None else steps_of(self.figure, self.reference)

    @property
    def missed(self) -> str:
        """Why the figure is missed; empty where it is kept. NaN is missed."""
        if self.steps is None or self.most is None:
            value = f"{self.figure.value:.4g} {self.figure.unit}".rstrip()
            return "" if self.figure.ok else f"{value} misses its target of {self.figure.bound}"
        return "" if self.steps <= self.most else f"{self.steps:.4g} reference steps, at most {self.most:.4g}"

    def as_dict(self) -> dict[str, object]:
        """Plain data for the JSON file. Numbers that are not finite are null."""

        def finite(number: float | None) -> float | None:
            return number if number is not None and math.isfinite(number) else None

        return {
            "benchmark": self.benchmark,
            "figure": self.figure.name,
            "unit": self.figure.unit,
            "value": finite(self.figure.value),
            "cpu": self.figure.beside.get("CPU"),
            "target": self.figure.target,
            "at_most": self.figure.at_most,
            "reference_step_ms": self.reference.wall,
            "reference_step_cpu_ms": self.reference.cpu,
            "steps": finite(self.steps),
            "most_steps": self.most,
            "missed": self.missed,
        }


def judge(
    benchmark: Benchmark, known: Mapping[str, Recorded], measuring: Callable[[Benchmark], Pass] = measure
) -> list[Verdict]:
    """Measures a benchmark once. Judges every figure that has a target.

    Args:
        benchmark: what is measured.
        known: its recorded figures.
        measuring: measures it once.

    Raises:
        ValueError: a figure with a target is not recorded, or a target or a recorded figure is not measured.
    """
    measured = measuring(benchmark)
    found = {figure.name: figure for figure in measured.figures if figure.target is not None}
    for what, others in (("recorded", known), ("a target", benchmark.targets)):
        if others and (absent := sorted(set(others) - set(found))):
            raise ValueError(f"benchmark {benchmark.name!r} did not measure {absent[0]!r}, which is {what}. {_FIX}")
    if unknown := sorted(set(found) - set(known)):
        raise ValueError(f"benchmark {benchmark.name!r} has no record of {unknown[0]!r}. {_FIX}")
    return [Verdict(benchmark.name, figure, measured.reference, known[name]) for name, figure in found.items()]


_FIX = "Fix: python -m benchmarks.gate record NAME, and commit the file."


def write(path: Path, verdicts: Iterable[Verdict]) -> None:
    """Writes all figures, with the machine and the date."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"machine": machine(), "date": datetime.now().isoformat(timespec="seconds")}
    path.write_text(json.dumps(data | {"figures": [verdict.as_dict() for verdict in verdicts]}, indent=1) + "\n")
