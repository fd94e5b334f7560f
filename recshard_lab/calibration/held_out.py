"""How right predictions are, on random models and plans that nothing was fitted to.

Every model is trained under `LAYOUTS`; predictions are compared with the steps, and the plan that they call fastest of
the four schemes with the one that was. Models whose reference step says that the machine was busy are measured again,
at the end, once; which ones does not depend on any prediction.

Shape letters: M models, S layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from recshard_lab.calibration.calibrating import OTHER_OPTIMIZERS
from recshard_lab.calibration.cases import LAYOUTS, Case, draw_cases, draw_model
from recshard_lab.calibration.clock import faster_half
from recshard_lab.calibration.fit import errors
from recshard_lab.calibration.predict import Predictions
from recshard_lab.calibration.steps import BUSY, Timed, time_cases, usual_ms
from recshard_lab.planner.workload import Array
from recshard_lab.sharding import Topology

SEEDS = 1_000  # first number of the seeds of these models
SCHEMES = 4  # the first of LAYOUTS, among which the fastest is picked
CLOSE = 1.05  # times the fastest: what measuring cannot tell from it
MOST_NUMBERS = 4e6


@dataclass(frozen=True, eq=False)
class Judged:
    """Predictions of held-out cases beside what was measured.

    Attributes:
        error, ratio: geometric mean of the size of the error, 0.1 is 10%, and of predicted / measured.
        picked: share of models of which the scheme predicted to be fastest was.
        close: share of which it was at most 5% slower than the fastest.
        by_layout: ``[S]`` errors.
    """

    error: float
    ratio: float
    picked: float
    close: float
    by_layout: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Measured models, under every layout.

    Attributes:
        cases: layout after layout of model after model.
        step_ms: ``[M, S]``.
        halves_ms: ``[2, M, S]`` the same of every other turn: how well measuring repeats itself.
        again: how many models were measured again.
    """

    cases: list[Case]
    step_ms: Array
    halves_ms: Array
    again: int

    @property
    def noise(self) -> float:
        """Geometric mean of the difference of the two halves, divided by two: the error of the whole, about."""
        return float(np.exp(np.abs(np.log(self.halves_ms[0] / self.halves_ms[1])).mean() / 2) - 1)

    @property
    def agreed(self) -> float:
        """Share of models of which both halves of the turns call the same scheme the fastest."""
        first, second = self.halves_ms[:, :, :SCHEMES].argmin(axis=2)
        return float((first == second).mean())

    @property
    def favourite(self) -> tuple[str, float]:
        """The scheme that is most often the fastest, and how often: what to pick without predicting."""
        counts = np.bincount(self.step_ms[:, :SCHEMES].argmin(axis=1), minlength=SCHEMES)
        return LAYOUTS[int(counts.argmax())], float(counts.max() / counts.sum())

    def judge(self, topology: Topology) -> Judged:
        """Predictions of a topology beside these measurements."""
        predicted = Predictions(self.cases, topology).step_ms(topology).reshape(self.step_ms.shape)
        found = errors(predicted, self.step_ms)
        schemes = self.step_ms[:, :SCHEMES]
        best = predicted[:, :SCHEMES].argmin(axis=1)
        behind = schemes[np.arange(len(schemes)), best] / schemes.min(axis=1)
        by_layout = [errors(predicted[:, i], self.step_ms[:, i])["error"] for i in range(len(LAYOUTS))]
        return Judged(
            found["error"],
            found["ratio"],
            float((behind <= 1.0).mean()),
            float((behind <= CLOSE).mean()),
            tuple(by_layout),
        )


def measure_held_out(
    ranks: Any, seconds: float, *, turns: int = 11, seed: int = 0, tell: Callable[[str], object] = lambda line: None
) -> HeldOut:
    """Draws and times models until the time is up, two at least.

    Args:
        ranks: a launched session.
        seconds: about how long.
        turns: of each case.
        seed: of the models.
        tell: called with a line on each model.
    """
    begun, number = perf_counter(), 0
    cases: list[list[Case]] = []
    found: list[list[Timed]] = []
    while number < 2 or (perf_counter() - begun) * (number + 1) / number < 0.9 * seconds:
        other = OTHER_OPTIMIZERS[number // 4 % len(OTHER_OPTIMIZERS)] if number % 4 == 3 else None
        model = draw_model((SEEDS, seed, number), other, MOST_NUMBERS / Topology(ranks.world_size).slowdown)
        cases.append(draw_cases(model, LAYOUTS, ranks.world_size))
        found.append(time_cases(ranks, cases[-1], turns=turns, seed=SEEDS + number))
        steps = ", ".join(f"{one.step_ms:.1f}" for one in found[-1])
        tell(f"{len(model.tables)} tables, batch {model.workload.batch_size}, {model.workload.optimizer}: {steps} ms")
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
    """Errors by layout, of each topology by its name."""
    return "; ".join(
        f"{name}: " + ", ".join(f"{layout} {error:.0%}" for layout, error in zip(LAYOUTS, one.by_layout, strict=True))
        for name, one in judged
    )
