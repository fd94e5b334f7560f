"""Every control of every widget answers within 150 ms, with 26 tables on 8 ranks: measured on all that can be moved.

A control is moved from Python, as a message from the page moves it, until all that the page is to show has been sent.
Charts are live figures; two widgets show the balance of their plans, the chart with the most panels.
A button hands its work to a thread: what counts is when it is free again. One count in three must keep the time, for
machines are shared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import ipywidgets as ipw
import pytest

from recshard_lab.lab import DrawingBoard, LiveCounters, PlanCompare, RanksPanel, SchemeSwitcher, SkewScale
from recshard_lab.lab.widgets import chart_box
from recshard_lab.lab.widgets.components import SplitLines, StepSlider, TileCanvas
from recshard_lab.lab.widgets.export_control import ExportControl
from recshard_lab.launcher import Ranks, launch
from recshard_lab.planner import Workload
from recshard_lab.sharding import Topology
from tests.lab.plans import many, table

LIMIT_MS = 150.0
COUNTS = 3
MODEL = """
import numpy as np, torch
import recshard_lab as rs
from recshard_lab.lab.compare.measure import random_batch
tables = [
    rs.EmbeddingBagConfig(name=f"t{i:02d}", num_embeddings=100 + 40 * i, embedding_dim=16, feature_names=[f"f{i}"])
    for i in range(26)
]
model = rs.DistributedModelParallel(rs.EmbeddingBagCollection(tables))
batch = random_batch(tables, rs.Workload(16, 2.0), np.random.default_rng(rank))
def train_step():
    loss = model(batch).values().square().mean()
    loss.backward()
    return loss
"""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with launch(8) as made:
        made.exec(MODEL)
        yield made


def drawing_board(_: Any) -> DrawingBoard:
    stripes = [(rank, (1000 * rank, 1000 * (rank + 1)), (0, 64)) for rank in range(8)]
    return DrawingBoard(table("movies", 8000, 64), Topology(8), tiles=stripes)


@pytest.fixture(autouse=True, scope="module")
def live() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chart_box, "beside_a_kernel", lambda: True)
        chart_box.loading().result(60)
        yield


WIDGETS: dict[str, Callable[[Any], ipw.Box]] = {
    "PlanCompare": lambda _: PlanCompare(many(26), Topology(8, ddr_cap=10**12)),
    "SkewScale": lambda _: SkewScale(many(26), Topology(8, ddr_cap=10**12)),
    "SchemeSwitcher": lambda ranks: SchemeSwitcher(ranks, "model", "train_step", workload=Workload(16, 2.0)),
    "DrawingBoard": drawing_board,
    "LiveCounters": lambda ranks: LiveCounters(ranks, cache_rows=10),
    "RanksPanel": lambda _: RanksPanel(),  # last, for it ends the ranks
}


def inside(widget: ipw.Widget) -> Iterator[ipw.Widget]:
    yield widget
    for child in getattr(widget, "children", ()):
        yield from inside(child)


def moves(control: ipw.Widget) -> Iterator[Callable[[], None]]:
    """One move after the other, each to another place; none for what is no control, or may not be used now."""
    put = partial(setattr, control)
    hidden = getattr(control.layout, "display", "") == "none"  # a figure of plotly has another kind of layout
    if getattr(control, "disabled", False) or hidden:
        return
    if isinstance(control, (ipw.Dropdown, ipw.ToggleButtons)):
        values = [value for _, value in control._options_full] if hasattr(control, "_options_full") else control.options
        for value in [v for v in values if v != control.value][-COUNTS:]:
            yield partial(put, "value", value)
    elif isinstance(control, StepSlider):
        for step in range(COUNTS):
            yield partial(put, "index", (control.index + 1 + step) % len(control.labels))
    elif isinstance(control, (ipw.Checkbox, ipw.ToggleButton)):
        yield from (partial(put, "value", on) for on in (not control.value, control.value))
    elif isinstance(control, ipw.Textarea):
        yield from (partial(put, "value", text) for text in (control.value + "\n", control.value))
    elif isinstance(control, ipw.Text):
        yield from (partial(put, "value", text) for text in ("t01", "another", ""))
    elif isinstance(control, ipw.BoundedIntText):
        yield from (partial(put, "value", number) for number in (7, 8, 9))
    elif isinstance(control, SplitLines):
        first, *rest = control.ends
        yield from (partial(put, "ends", [max(0, first - moved), *rest]) for moved in (1, 2, 3))
    elif isinstance(control, TileCanvas):
        for rank in (1, 2, 3):
            yield partial(put, "tiles", [[rank, *control.tiles[0][1:]], *control.tiles[1:]])
    elif isinstance(control, ExportControl):
        yield from (partial(put, "kind", kind) for kind, *_ in control.kinds)
    elif isinstance(control, ipw.Button):
        yield control.click


@contextmanager
def put_back(widget: ipw.Widget, control: ipw.Widget) -> Iterator[None]:
    """What is moved in SkewScale goes back, so that the next control is moved with 8 ranks too."""
    place = "index" if isinstance(control, StepSlider) else "value" if isinstance(control, ipw.Dropdown) else None
    if not isinstance(widget, SkewScale):  # a plan comparison that is back at 8 ranks would run 26 large tables there
        place = None
    before = None if place is None else getattr(control, place)
    yield
    if place is not None:
        setattr(control, place, before)


def at_rest(widget: Any) -> None:
    """Waits for the work that a control started."""
    if hasattr(widget, "wait"):
        widget.wait()
    assert widget.worker.wait("run", "work", "export", timeout_s=30)


@pytest.mark.clock
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", WIDGETS)
def test_every_control_answers_within_150_ms_for_26_tables_on_8_ranks(ranks: Ranks, name: str) -> None:
    widget = WIDGETS[name](ranks)
    spent: dict[str, float] = {}
    if isinstance(widget, (PlanCompare, SchemeSwitcher)):
        widget.picture.value = "balance"
    try:
        for number, control in enumerate(inside(widget)):
            best = float("inf")
            with put_back(widget, control):
                for move in moves(control):
                    begun = time.perf_counter()
                    move()
                    if hasattr(widget, "wait") and not isinstance(widget, SkewScale):  # its plans by scheme come later
                        widget.wait()
                    best = min(best, 1000 * (time.perf_counter() - begun))
                    at_rest(widget)
                    if best <= LIMIT_MS:
                        break
            at_rest(widget)
            if best < float("inf"):
                words = getattr(control, "description", "")
                spent[f"{number}: {type(control).__name__} {words}"] = best
    finally:
        widget.close()
    slowest = sorted(spent.items(), key=lambda pair: -pair[1])
    figures = [box.figure for box in inside(widget) if isinstance(box, chart_box.ChartBox)]
    assert any(figures) == isinstance(widget, (PlanCompare, SkewScale, SchemeSwitcher, LiveCounters))
    assert len(spent) >= 2
    assert [(one, round(ms)) for one, ms in slowest if ms > LIMIT_MS] == []
