"""How long PlanCompare takes to answer a control: 26 tables on 8 ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median, quantiles
from typing import Any

from benchmarks import Figure
from benchmarks.plan import RANKS, TABLES, criteo_like
from recshard_lab.sharding import Topology

MOVES = 12  # of each kind of control
_ANSWER = f"PlanCompare answers a control, {TABLES} tables x {RANKS} ranks"
TARGETS = {f"{_ANSWER}, median": 150.0, f"{_ANSWER}, nine in ten": 150.0}


def figures() -> list[Figure]:
    """A control is moved to a value it has not had; the clock stops when all pictures and numbers are there."""
    from recshard_lab.lab import PlanCompare

    widget = PlanCompare(criteo_like(), Topology(RANKS, compute_device="cuda", hbm_cap=16 * 1024**3))
    taken: dict[str, list[float]] = {}
    worked: dict[str, list[float]] = {}
    for control, move in _moves(widget):
        begun, begun_cpu = time.perf_counter(), time.process_time()
        move()
        taken.setdefault(control, []).append(1e3 * (time.perf_counter() - begun))
        worked.setdefault(control, []).append(1e3 * (time.process_time() - begun_cpu))
    larger = taken.pop("more ranks")
    del worked["more ranks"]
    every, every_cpu = ([one for times in kind.values() for one in times] for kind in (taken, worked))
    return [
        Figure(f"{_ANSWER}, median", median(every), "ms", beside={"CPU": median(every_cpu)}),
        Figure(f"{_ANSWER}, nine in ten", _nine_in_ten(every), "ms", beside={"CPU": _nine_in_ten(every_cpu)}),
        *(Figure(f"  {control}, median of {len(times)}", median(times), "ms") for control, times in taken.items()),
        Figure("  beyond: up to 128 ranks, slowest", max(larger), "ms"),
    ]


def _nine_in_ten(times: list[float]) -> float:
    return quantiles(times, n=10)[-1]


def _moves(widget: Any) -> Iterator[tuple[str, Callable[[], None]]]:
    """Control by control, each move to a question that was not asked before."""
    for number, menu in zip(range(MOVES), widget.menus.values(), strict=False):
        yield "the scheme of a table", _move(menu, ("row_wise", "column_wise")[number % 2])
    for name in ("batch_size", "memory_cap", "world_size"):
        slider = getattr(widget, name)
        start = slider.value
        values = [value for _, value in slider.options if value != start][:MOVES]
        for value in values:
            yield ("more ranks" if name == "world_size" and value > start else name), _move(slider, value)
        slider.value = start


def _move(control: Any, value: Any) -> Callable[[], None]:
    def move() -> None:
        control.value = value

    return move
