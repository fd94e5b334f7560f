"""Fits the figures of a `Topology` to measured steps, by least squares of logarithms.

Every figure is fitted as its logarithm, with a prior around its start. A residual is ``log(predicted / measured)``, so
short steps count like long ones. The predictions are those of `planner.model`. Residuals beyond two standard
deviations count linearly (Huber loss), so one disturbed measurement has little effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from recshard_lab.calibration.cases import Case
from recshard_lab.calibration.predict import Predictions
from recshard_lab.planner.workload import Array
from recshard_lab.sharding import Topology

STEP_DEVIATION, PHASE_DEVIATION, ALONE_DEVIATION = 0.08, 0.3, 0.1  # standard deviations of measured logarithms
PARTS = ((0,), (1,), (2, 3, 4), (5,))  # phases that are measured together: ids, lookup, rows and gradients, update


@dataclass(frozen=True)
class Fitted:
    """A fitted figure and its prior, a log-normal distribution.

    Args:
        field: of `Topology`.
        start: median of the prior if the topology has 0; otherwise the topology's figure is.
        factor: one standard deviation of the prior, up or down.
        optimizer: key of the figure, if the field is a mapping.
    """

    field: str
    start: float
    factor: float
    optimizer: str | None = None

    @property
    def name(self) -> str:
        """``field`` or ``field[optimizer]``."""
        return self.field if self.optimizer is None else f"{self.field}[{self.optimizer}]"

    def of(self, topology: Topology) -> float:
        """The topology's figure, or `start`."""
        found = getattr(topology, self.field)
        value = found if self.optimizer is None else found.get(self.optimizer, 0.0)
        return float(value or self.start)


#: compute device -> figures of one rank, of exchanges, and of each optimizer. The starts on CPUs are of the machine
#: that the defaults of `Topology` were measured on. On GPUs `alone.py` times rates, so steps may change them little.
FIGURES: dict[str, tuple[tuple[Fitted, ...], tuple[Fitted, ...], tuple[Fitted, ...]]] = {
    "cpu": (
        (
            Fitted("ddr_mem_bw", 6.5e6, 2.0),
            Fitted("cache_bw", 60e6, 2.0),
            Fitted("cache_bytes", 16e6, 3.0),
            Fitted("lookup_ns_per_id", 2.0, 2.0),
            Fitted("bag_ns", 10.0, 2.0),
            Fitted("update_ns_per_id", 10.0, 2.0),
            Fitted("route_ns_per_id", 12.0, 2.0),
            Fitted("host_ms", 0.08, 2.0),
            Fitted("shard_feature_ms", 0.005, 2.0),
            Fitted("launch_ms", 0.05, 2.0),
            Fitted("row_split_ms", 0.38, 2.0),
            Fitted("step_ms", 0.23, 2.0),
        ),
        (
            Fitted("contention", 0.4, 2.5),
            Fitted("half_duplex", 0.9, 1.5),
            Fitted("sort_ns_per_id", 40.0, 2.0),
            Fitted("sum_ns_per_number", 0.3, 2.0),
            Fitted("replica_ms", 0.03, 2.0),
            Fitted("replicas_ms", 0.2, 2.0),
            Fitted("norm_ms", 0.4, 2.0),
            Fitted("norm_ns_per_row", 30.0, 2.0),
            Fitted("intra_host_bw", 1.6e6, 2.0),
            Fitted("peer_ms", 0.26, 2.0),
        ),
        (Fitted("update_cost", 2.0, 2.5), Fitted("update_number_ns", 1.0, 6.0)),
    ),
    "cuda": (
        (
            Fitted("hbm_mem_bw", 1e9, 1.3),
            Fitted("cache_bw", 3e9, 1.5),
            Fitted("lookup_ns_per_id", 0.02, 2.0),
            Fitted("route_ns_per_id", 0.05, 3.0),
            Fitted("launch_ms", 0.01, 2.0),
            Fitted("sync_ms", 0.02, 2.0),
            Fitted("host_ms", 0.03, 2.0),
            Fitted("step_ms", 0.2, 3.0),
        ),
        (
            Fitted("intra_host_bw", 1e8, 1.5),
            Fitted("peer_ms", 0.002, 2.0),
        ),
        (Fitted("update_cost", 2.0, 1.5),),
    ),
}


@dataclass(frozen=True, eq=False)
class Measurements:
    """Measured cases.

    Attributes:
        cases: C models under plans.
        step_ms: ``[C]``.
        parts_ms: ``[C, 4]`` of `PARTS`, without waits for slower ranks; NaN if they were not separated.
    """

    cases: Sequence[Case]
    step_ms: Array
    parts_ms: Array


@dataclass(frozen=True, eq=False)
class Fit:
    """The result of a fit.

    Attributes:
        topology: with the fitted figures.
        figures: the fitted figures.
        spread: uncertainty of each as a factor, up or down (one standard deviation).
    """

    topology: Topology
    figures: tuple[Fitted, ...]
    spread: tuple[float, ...]


def figures_for(optimizers: Sequence[str], world_size: int, compute_device: str = "cpu") -> tuple[Fitted, ...]:
    """The figures to fit after these optimizers were measured. On one rank, figures of exchanges are left out.

    >>> [figure.name for figure in figures_for(["exact_sgd"], 1, "cuda")][-2:]
    ['step_ms', 'update_cost[exact_sgd]']
    """
    own, exchanges, per_optimizer = FIGURES[compute_device]
    each = [replace(figure, optimizer=name) for name in optimizers for figure in per_optimizer]
    return (*own, *(exchanges if world_size > 1 else ()), *each)


def with_figures(topology: Topology, figures: Sequence[Fitted], values: Iterable[float]) -> Topology:
    """The topology with these values of these figures."""
    changed: dict[str, Any] = {}
    for figure, value in zip(figures, values, strict=True):
        if figure.optimizer is None:
            changed[figure.field] = min(1.0, float(value)) if figure.field == "half_duplex" else float(value)
        else:
            changed.setdefault(figure.field, dict(getattr(topology, figure.field)))[figure.optimizer] = float(value)
    return replace(topology, **changed)


def fit(
    measured: Measurements, topology: Topology, figures: Sequence[Fitted], alone: Measurements | None = None
) -> Fit:
    """Fits figures to measured cases.

    Args:
        measured: the cases.
        topology: of the same ranks. Figures that are not fitted stay; the others start from it.
        figures: to fit.
        alone: cases of which only parts were measured; their ``step_ms`` is NaN.
    """
    from scipy.optimize import least_squares

    if alone is not None:
        measured = Measurements(
            [*measured.cases, *alone.cases],
            np.concatenate([measured.step_ms, alone.step_ms]),
            np.concatenate([measured.parts_ms, alone.parts_ms]),
        )
    predictions = Predictions(measured.cases, topology)
    start = np.log([figure.of(topology) for figure in figures])
    reach = np.log([figure.factor for figure in figures])
    of_case = np.where(np.isfinite(measured.step_ms), PHASE_DEVIATION, ALONE_DEVIATION)
    deviations = np.broadcast_to(of_case[:, None], measured.parts_ms.shape)
    whole, separated = np.isfinite(measured.step_ms), np.isfinite(measured.parts_ms)

    def residuals(at: Array) -> Array:
        phases = predictions.phases(with_figures(topology, figures, np.exp(start + at * reach))).max(axis=-1)
        steps = np.log(phases.sum(axis=0)[whole] / measured.step_ms[whole]) / STEP_DEVIATION
        sums = np.stack([phases[list(part)].sum(axis=0) for part in PARTS], axis=1)
        parts = np.log(sums[separated] / measured.parts_ms[separated]) / deviations[separated]
        return np.concatenate([_huber(steps), _huber(parts), at])

    found = least_squares(residuals, np.zeros(len(start)), method="trf", x_scale=1.0, max_nfev=40, xtol=1e-4, ftol=1e-5)
    inverse = np.linalg.inv(found.jac.T @ found.jac)
    spread = np.exp(np.sqrt(np.diag(inverse)) * reach)
    return Fit(with_figures(topology, figures, np.exp(start + found.x * reach)), tuple(figures), tuple(spread))


def _huber(residuals: Array, limit: float = 2.0) -> Array:
    """Residuals whose squares are those of a Huber loss."""
    size = np.abs(residuals)
    return np.where(
        size <= limit, residuals, np.sign(residuals) * np.sqrt(np.maximum(2 * limit * size - limit**2, 0.0))
    )


def errors(predicted: Array, measured: Array) -> Mapping[str, float]:
    """Errors of predictions: geometric mean of predicted / measured, and of the size of the error (0.1 is 10%).

    >>> errors(np.array([2.0, 0.5]), np.array([1.0, 1.0]))
    {'ratio': 1.0, 'error': 1.0}
    """
    ratio = np.log(predicted / measured)
    return {"ratio": float(np.exp(ratio.mean())), "error": float(np.exp(np.abs(ratio).mean()) - 1)}
