"""A clock with simulated times: each operator takes the time that formulas and known figures give.

Every operator still runs once, on the device that a test chooses, so a wrong shape or a missing operator raises.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from time import sleep
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from benchmarks import ledger
from recshard_lab.calibration import calibrating, collectives, drift, operators
from recshard_lab.calibration import clock as module
from recshard_lab.calibration.clock import Clock, TimedOperator
from recshard_lab.calibration.predict import Predictions
from recshard_lab.calibration.steps import Timed
from recshard_lab.sharding import Topology

FIGURES: dict[str, Any] = {
    "launch_ms": 0.006,
    "kernel_ms": 0.003,
    "sync_ms": 0.025,
    "hbm_mem_bw": 3.1e9,
    "gather_row_bytes": 40.0,
    "cache_bw": 9e9,
    "lookup_ns_per_id": 0.03,
    "index_ns_per_id": 5.0,
    "index_ms": 0.2,
    "update_id_ns": {"exact_sgd": 0.2, "exact_row_wise_adagrad": 0.35},
    "update_cost": {"exact_sgd": 1.1, "exact_row_wise_adagrad": 1.6},
    "flops_per_ms": 4e10,
    "tf32_flops_per_ms": 3e11,
    "matrix_half_batch": 700.0,
    "ddr_mem_bw": 5e7,
    "host_ms": 0.045,
    "intra_host_latency_ms": 0.012,
    "peer_ms": 0.004,
    "intra_host_bw": 2.4e8,
    "reduce_scatter_cost": 1.25,
}
SMALL = operators.Sizes(1 << 20, 1 << 14, 1 << 9, 0, (8, 32, 128), (16, 64, 256), 32, 1 << 12, (1 << 10, 1 << 14))


def ms_of(op: str, sizes: tuple[int, ...], figures: dict[str, Any] = FIGURES) -> float:
    """Milliseconds of an operator, by the formulas of `figures_alone` and `figures_of` written a second time."""
    f = figures
    if op in ("launch", "kernel", "read", "issue"):
        return float(f[{"launch": "launch_ms", "kernel": "kernel_ms", "read": "sync_ms", "issue": "host_ms"}[op]])
    if op in ("gather", "reread"):
        count, cols = sizes
        if op == "reread":
            return float(count * 8 * cols / f["cache_bw"])
        return float(count * (8 * cols + f["gather_row_bytes"]) / f["hbm_mem_bw"])
    if op == "lookup" or op.startswith("train/"):
        count, cols, bag, _ = sizes
        row_ms = (4 * cols + f["gather_row_bytes"]) / f["hbm_mem_bw"]
        ms = f["lookup_ns_per_id"] * 1e-6 + row_ms + 4 * cols / bag / f["cache_bw"]
        if op != "lookup":
            optimizer = op.removeprefix("train/")
            ms += f["update_id_ns"][optimizer] * 1e-6 + (4 * cols + 4 * cols / bag) / f["cache_bw"]
            ms += 2 * row_ms * f["update_cost"][optimizer]
        return float(count * ms)
    if op == "index":
        return float(sizes[0] * f["index_ns_per_id"] * 1e-6 + f["index_ms"])
    if op.startswith("dense"):
        batch, width = sizes
        rate = f["tf32_flops_per_ms" if op == "dense_tf32" else "flops_per_ms"]
        return float(6 * 2 * width**2 * (batch + f["matrix_half_batch"]) / rate)
    if op == "copy":
        return float(2 * sizes[0] / f["hbm_mem_bw"])
    if op.startswith("copy_to"):
        return float(0.01 + sizes[0] / f["ddr_mem_bw"])
    nbytes, group = sizes
    ms = f["intra_host_latency_ms"] + (group - 1) * (f["peer_ms"] + nbytes / f["intra_host_bw"])
    return float(ms * {"all_to_all": 1, "reduce_scatter": f["reduce_scatter_cost"], "all_reduce": 2}[op])


class SimulatedClock(Clock):
    """A clock whose times follow from `ms_of`."""

    def times(
        self, op: str, sizes: tuple[int, ...], run: Callable[[], object], before: Callable[[], object] | None = None
    ) -> list[float]:
        run()
        return [ms_of(op, sizes)] * 3

    def host_times(self, op: str, sizes: tuple[int, ...], run: Callable[[], object], count: int) -> list[float]:
        run()
        return [ms_of(op, sizes)] * 3


def on_ledger() -> Clock:
    """A simulated clock of the ledger device."""
    ledger.register()
    return SimulatedClock(torch.device(ledger.DEVICE))


def operators_on_ledger() -> list[TimedOperator]:
    """Runs on each rank."""
    return operators.time_operators(on_ledger(), ["exact_sgd", "exact_row_wise_adagrad"], SMALL)


def collectives_on_ledger() -> list[collectives.Times]:
    """Runs on each rank."""
    sizes, collectives.GPU_SIZES = collectives.GPU_SIZES, (1 << 8, 1 << 16, 1 << 18)
    try:
        return collectives.times_on(on_ledger())
    finally:
        collectives.GPU_SIZES = sizes


def order_of_real_clock() -> tuple[list[str], list[float]]:
    """What `Clock.times` does on the ledger device after its warm-up, and the times that it reports."""
    ledger.register()
    order: list[str] = []

    class Event:
        def __init__(self, device: torch.device, enable_timing: bool) -> None:
            assert enable_timing
            assert device.type == "ledger"

        def record(self) -> None:
            order.append("event")

        def elapsed_time(self, end: Event) -> float:
            return 0.5

    class Recording(Clock):
        def synchronize(self) -> None:
            order.append("wait")

    clock, number = Recording(torch.device(ledger.DEVICE)), torch.zeros(1)

    def run() -> None:
        order.append("run")
        number.add_(1)

    with (
        patch.object(torch, "Event", Event),
        patch.object(module, "FLUSH_BYTES", 64),
        patch.object(module, "WARM_UP_S", 0.0),
    ):
        times = clock.times("add", (1,), run)
    return order[-3 * module.REPEATS - 1 :], times


def warm_up_calls(seconds: float) -> int:
    """Calls of a collective by `Clock.times` on the ledger device before the repeats, on a rank this slow."""
    ledger.register()
    calls: list[int] = []

    class Stopped(Exception):
        pass

    def event(**options: Any) -> None:
        raise Stopped

    def run() -> None:
        calls.append(1)
        sleep(seconds)

    clock = Clock(torch.device(ledger.DEVICE))
    clock._flush, clock._flush_ms = torch.empty(16), 1.0
    with patch.object(torch, "Event", event), suppress(Stopped):
        clock.times("all_to_all", (4, 2), run, before=run)
    return len(calls)


class FakeRanks:
    """Ranks of which nothing is launched: each call returns the answer of this name, otherwise 0."""

    def __init__(self, world_size: int = 2, device: str = "cpu", nodes: int = 1, **answers: Any) -> None:
        self.world_size, self.nodes, self.answers = world_size, nodes, answers
        self.backend = "gloo" if device == "cpu" else "nccl"
        self.devices = [torch.device(device, number if device == "cuda" else None) for number in range(world_size)]

    def run(self, fn: Any, /, *args: Any) -> list[Any]:
        return [self.answers.get(fn.__name__, 0.0)] * self.world_size


def simulate_steps(patch: pytest.MonkeyPatch, timed: list[TimedOperator], truth: Topology) -> None:
    """`calibrate` measures these operators, and steps that take what the cost model gives for known figures."""

    def steps(ranks: Any, cases: Any, **options: Any) -> list[Timed]:
        every = Predictions(cases, truth).step_ms(truth)
        return [Timed(float(ms), np.full(5, ms), np.zeros((2, 6)), 1.0) for ms in every]

    patch.setattr(calibrating, "time_alone", lambda ranks: timed)
    patch.setattr(calibrating, "time_cases", steps)


def simulate_check(patch: pytest.MonkeyPatch, stored: list[TimedOperator], slower: dict[str, float]) -> None:
    """`check` measures the stored times again, some of them longer by a factor."""
    ms = 2.0 * slower.get(calibrating.REFERENCE, 1.0)
    step = Timed(ms, None, None, ms)  # type: ignore[arg-type]
    now = [replace(one, ms=one.ms * slower.get(one.op, 1.02)) for one in stored]
    patch.setattr(drift, "time_alone", lambda ranks, short: now)
    patch.setattr(drift, "time_cases", lambda ranks, cases, turns: [step])
