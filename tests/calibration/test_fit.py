"""The fit, on times that the cost model itself made up: the constants behind them must come out again."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.calibration import draw_family
from recshard_lab.calibration.alone import figures_alone
from recshard_lab.calibration.calibrating import OTHER_OPTIMIZERS
from recshard_lab.calibration.cases import LAYOUTS, Case, draw_cases, draw_model, lookup_case
from recshard_lab.calibration.clock import TimedOperator
from recshard_lab.calibration.fit import PARTS, Measurements, errors, figures_for, fit, with_figures
from recshard_lab.calibration.predict import Predictions
from recshard_lab.planner import estimate
from recshard_lab.planner.workload import Array
from recshard_lab.sharding import Topology

MAIN = ("exact_sgd", "exact_row_wise_adagrad", "exact_adagrad")
TRUTH = {
    "ddr_mem_bw": 1.2e7,
    "intra_host_bw": 9e5,
    "peer_ms": 0.5,
    "launch_ms": 0.14,
    "row_split_ms": 0.7,
    "bag_ns": 25.0,
    "replicas_ms": 0.35,
    "norm_ms": 1.1,
}


def drawn(count: int, world_size: int, first: int = 0) -> list[Case]:
    models = [draw_model((first, number), MAIN[number % 3]) for number in range(count)]
    return [case for model in models for case in draw_cases(model, LAYOUTS, world_size)]


def made_up(cases: list[Case], truth: Topology, noise: float) -> Measurements:
    """Times that a machine with these figures would take, each off by a random factor."""
    phases = Predictions(cases, truth).phases(truth).max(axis=-1)
    parts: Array = np.stack([phases[list(part)].sum(axis=0) for part in PARTS], axis=1)
    rng = np.random.default_rng(0)
    steps = phases.sum(axis=0) * np.exp(rng.normal(0, noise, len(cases)))
    return Measurements(cases, steps, np.where(parts > 0, parts, np.nan) * np.exp(rng.normal(0, noise, parts.shape)))


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_constants_come_out_of_the_times_that_they_made(world_size: int) -> None:
    start = Topology(world_size, cores_per_host=2)
    figures = figures_for(MAIN, world_size)
    plain = with_figures(start, figures, [figure.of(start) for figure in figures])
    truth = replace(plain, **TRUTH)  # type: ignore[arg-type]
    found = fit(made_up(drawn(24, world_size), truth, 0.03), start, figures)
    for name, value in TRUTH.items():
        assert getattr(found.topology, name) == pytest.approx(value, rel=0.25), name
    others = drawn(8, world_size, first=99)
    expected = Predictions(others, truth).step_ms(truth)
    assert errors(Predictions(others, start).step_ms(start), expected)["error"] > 0.15
    assert errors(Predictions(others, start).step_ms(found.topology), expected)["error"] < 0.04


def test_lookups_alone_separate_an_optimizers_arithmetic_from_its_memory() -> None:
    start = Topology(2, cores_per_host=2)
    figures = figures_for(["exact_sgd", "adam"], 2)
    plain = with_figures(start, figures, [figure.of(start) for figure in figures])
    slow = {
        "update_cost": {**plain.update_cost, "adam": 9.0},
        "update_number_ns": {**plain.update_number_ns, "adam": 20.0},
    }
    truth = replace(plain, **slow)  # type: ignore[arg-type]
    narrow = [case for case in drawn(6, 2) if case.model.workload.optimizer == "exact_sgd"]
    model, few = draw_model((5, 5), "adam"), draw_family("large_batch", (1,)).tables
    narrow += draw_cases(replace(model, tables=few, workload=model.workload.for_tables(few)), LAYOUTS, 2)
    tables = [(16, 1 << 20), (128, 1 << 17), (128, 1 << 14)]
    lookups = [lookup_case(name, 2, 4096, cols, 32, rows) for name in ("exact_sgd", "adam") for cols, rows in tables]
    alone = made_up(lookups, truth, 0.03)
    alone.parts_ms[:, [0, 2]], alone.step_ms[:] = np.nan, np.nan
    measured = made_up(narrow, truth, 0.03)
    wide = draw_cases(draw_model((8, 3), "adam"), LAYOUTS, 2)
    expected = Predictions(wide, truth).step_ms(truth)
    without, found = fit(measured, start, figures), fit(measured, start, figures, alone)
    error = errors(Predictions(wide, start).step_ms(found.topology), expected)["error"]
    assert error < 0.05
    assert error < 0.5 * errors(Predictions(wide, start).step_ms(without.topology), expected)["error"]
    assert found.topology.update_cost["adam"] == pytest.approx(9.0, rel=0.3)


def test_many_predictions_at_once_are_those_of_the_planner() -> None:
    cases = drawn(6, 2)
    cases += draw_cases(draw_model((1, 1), OTHER_OPTIMIZERS[0]), LAYOUTS, 2)
    truth = replace(Topology(2, cores_per_host=1), cache_bytes=1e6, contention=0.5, half_duplex=0.7, replicas_ms=0.2)
    together = Predictions(cases, Topology(2)).step_ms(truth)
    for case, found in zip(cases, together, strict=True):
        one = estimate(case.plan, list(case.model.tables), truth, case.model.workload)
        assert found == pytest.approx(one.step_ms, rel=1e-9)


def test_latency_and_rate_come_out_of_collectives() -> None:
    top = Topology(4, cores_per_host=2)  # three peers, two ranks a core
    times = [("all_to_all", n, 0.3 * 3 * 2 + 3 * 2 * n / 1e6) for n in (256, 4096, 65536, 1 << 20)]
    times += [("reduce_scatter", n, 5 * ms) for _, n, ms in times]
    found = figures_alone([TimedOperator(op, (n, 4), ms) for op, n, ms in times], top)
    assert found["peer_ms"] == pytest.approx(0.3, rel=1e-3)
    assert found["intra_host_bw"] == pytest.approx(1e6, rel=1e-3)
    assert found["reduce_scatter_cost"] == pytest.approx(5.0)
