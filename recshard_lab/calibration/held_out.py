"""Errors of predictions on random models and plans outside the fit.

Every model is trained under `LAYOUTS`. Predictions are compared with the measured steps, and the scheme that is
predicted fastest with the fastest one. Models with a slow reference step are measured a second time at the end,
independently of the predictions.

Shape letters: M models, S layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from recshard_lab.calibration.calibrating import OTHER_OPTIMIZERS
from recshard_lab.calibration.cases import FAMILIES, LAYOUTS, Case, draw_cases, draw_family, draw_model
from recshard_lab.calibration.clock import faster_half
from recshard_lab.calibration.fit import errors
from recshard_lab.calibration.predict import Predictions
from recshard_lab.calibration.steps import BUSY, Timed, time_cases, usual_ms
from recshard_lab.planner.workload import Array
from recshard_lab.sharding import Topology

SEEDS = 1_000  # first number of the seeds of these models
SCHEMES = 4  # the first of LAYOUTS, of which the fastest is picked
CLOSE = 1.05  # a pick counts as close up to this many times the fastest
MOST_NUMBERS = 4e6


@dataclass(frozen=True)
class Picks:
    """How good the chosen schemes of M models are.

    Attributes:
        exact: share of models whose fastest scheme was chosen.
        close: share of models whose chosen scheme is at most 5% slower than the fastest.
    """

    exact: float
    close: float

    @classmethod
    def of(cls, chosen: Array, ms: Array) -> Picks:
        """Of the chosen columns ``[M]`` of measured steps ``[M, schemes]``.

        >>> Picks.of(np.array([0, 1]), np.array([[1.0, 2.0], [1.0, 1.04]]))
        Picks(exact=0.5, close=1.0)
        """
        behind = ms[np.arange(len(ms)), chosen] / ms.min(axis=1)
        return cls(float((behind <= 1).mean()), float((behind <= CLOSE).mean()))


@dataclass(frozen=True, eq=False)
class Judged:
    """Predictions beside measurements.

    Attributes:
        error, ratio: geometric mean of the size of the error (0.1 is 10%), and of predicted / measured.
        picks: of the schemes that are predicted fastest.
        by_layout: ``[S]`` errors.
    """

    error: float
    ratio: float
    picks: Picks
    by_layout: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Measured models under every layout.

    Attributes:
        cases: of each model, all layouts.
        step_ms: ``[M, S]``.
        halves_ms: ``[2, M, S]`` steps from the even and from the odd turns.
        again: number of models that were measured a second time.
    """

    cases: list[Case]
    step_ms: Array
    halves_ms: Array
    again: int

    @property
    def noise(self) -> float:
        """Half the difference of the two halves, geometric mean: about the error of measuring."""
        return float(np.exp(np.abs(np.log(self.halves_ms[0] / self.halves_ms[1])).mean() / 2) - 1)

    @property
    def repeated(self) -> Picks:
        """Picks of measuring once and judging by a second measurement: one half of the turns by the other."""
        halves = self.halves_ms[:, :, :SCHEMES]
        one, other = (Picks.of(halves[i].argmin(axis=1), halves[1 - i]) for i in (0, 1))
        return Picks((one.exact + other.exact) / 2, (one.close + other.close) / 2)

    @property
    def table_wise(self) -> Picks:
        """Picks of always choosing table-wise."""
        return Picks.of(np.zeros(len(self.step_ms), dtype=int), self.step_ms[:, :SCHEMES])

    def judge(self, topology: Topology) -> Judged:
        """Predictions of a topology beside these measurements."""
        predicted = Predictions(self.cases, topology).step_ms(topology).reshape(self.step_ms.shape)
        found = errors(predicted, self.step_ms)
        picks = Picks.of(predicted[:, :SCHEMES].argmin(axis=1), self.step_ms[:, :SCHEMES])
        by_layout = [errors(predicted[:, i], self.step_ms[:, i])["error"] for i in range(len(LAYOUTS))]
        return Judged(found["error"], found["ratio"], picks, tuple(by_layout))


def measure_held_out(
    ranks: Any,
    seconds: float,
    *,
    turns: int = 11,
    seed: int = 0,
    beyond: bool = False,
    report: Callable[[str], object] = lambda line: None,
) -> HeldOut:
    """Draws and times at least two models.

    Args:
        ranks: a launched session.
        seconds: time budget, approximate.
        turns: of each case.
        seed: of the models.
        beyond: draw models of `FAMILIES` in turn, which are beyond the range of the fitted models.
        report: called with a line on each model.
    """
    begun, number = perf_counter(), 0
    cases: list[list[Case]] = []
    found: list[list[Timed]] = []
    while number < 2 or (perf_counter() - begun) * (number + 1) / number < 0.9 * seconds:
        other = OTHER_OPTIMIZERS[number // 4 % len(OTHER_OPTIMIZERS)] if number % 4 == 3 else None
        most = MOST_NUMBERS / Topology(ranks.world_size).slowdown
        if beyond:
            model = draw_family(FAMILIES[number % len(FAMILIES)], (SEEDS, seed, number))
        else:
            model = draw_model((SEEDS, seed, number), other, most)
        cases.append(draw_cases(model, LAYOUTS, ranks.world_size))
        found.append(time_cases(ranks, cases[-1], turns=turns, seed=SEEDS + number))
        steps = ", ".join(f"{one.step_ms:.1f}" for one in found[-1])
        report(f"{len(model.tables)} tables, batch {model.workload.batch_size}, {model.workload.optimizer}: {steps} ms")
        number += 1
    limit = BUSY * usual_ms([own[0] for own in found])
    busy = [i for i, own in enumerate(found) if own[0].reference_ms > limit]
    for i in busy:
        if perf_counter() - begun < 1.2 * seconds:
            again = time_cases(ranks, cases[i], turns=turns, seed=SEEDS + i)
            found[i] = min(found[i], again, key=lambda timed: timed[0].reference_ms)
    halves = [[[faster_half(one.turns_ms[half::2]) for one in own] for own in found] for half in (0, 1)]
    steps_ms = np.array([[one.step_ms for one in own] for own in found])
    return HeldOut([case for own in cases for case in own], steps_ms, np.array(halves), len(busy))


def layouts_line(judged: Sequence[tuple[str, Judged]]) -> str:
    """Errors by layout, of each named topology."""
    return "; ".join(
        f"{name}: " + ", ".join(f"{layout} {error:.0%}" for layout, error in zip(LAYOUTS, one.by_layout, strict=True))
        for name, one in judged
    )
