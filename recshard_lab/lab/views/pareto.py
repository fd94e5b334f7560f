"""A what-if sweep as points: speed by what is swept, and the points that no other point beats.

Values of the swept axis have equal distances, so that 8 and 2,048 ranks both have room. Points without a plan are
crosses on the axis; their tooltips have the reason. All numbers are simulated, as the caption states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from recshard_lab.lab.charts import spec
from recshard_lab.lab.draw.theme import LINES, WARNING, as_sentence, counted, ms_text, number
from recshard_lab.lab.draw.view import View, message_view
from recshard_lab.lab.views.registry import register_view
from recshard_lab.planner.sweep.points import Sweep, SweepPoint, axis_label, axis_text
from recshard_lab.text_table import TextTable

MOST_SERIES = 8
LOG_FROM = 30.0  # largest over smallest; beyond, the axis is logarithmic
_X = ("world_size", "hbm_cap", "batch_size", "global_batch_size")
_SERIES = ("topology", "pipeline", "codecs", "sharding_group_size", "hbm_cap", "batch_size", "global_batch_size")
_Y = {"samples_per_s": "samples per second", "step_ms": "ms per step"}


@register_view("Simulated sweep", place=90)
def pareto(sweep: Sweep, *, y: str = "samples_per_s", note: str = "", width: int = 860) -> View:
    """The points of a sweep, those on the Pareto frontier filled and joined.

    Args:
        sweep: what `recshard_lab.sweep` returned.
        y: "samples_per_s" or "step_ms".
        note: a sentence under the picture.
        width: of the static picture, in pixels.
    """
    if y not in _Y:
        raise ValueError(f"y must be one of {', '.join(_Y)}, got {y!r}")
    sweep = replace(sweep, points=tuple(_with_number(point) for point in sweep.points))
    if not any(point.fits for point in sweep.points):
        reasons = list(dict.fromkeys(point.reason for point in sweep.points))
        return message_view(
            "pareto", "Simulated sweep", f"No point has a plan. {reasons[0] if reasons else ''}".strip()
        )
    drawn = _Drawn(sweep, y)
    title = f"Simulated: {_Y[y]} by {drawn.x_label}"

    words = "Filled: on the Pareto frontier. Hollow: another point is better. Cross: nothing fits."
    words += " Dashed line: joins the best points."
    chart = spec.Chart(title, drawn.summary(), ((_panel(drawn, width),),), f"{words} {as_sentence(note)}".strip())
    return View.of_chart("pareto", chart, _numbers(sweep), width)


def _with_number(point: SweepPoint) -> SweepPoint:
    """A point whose step is not a number counts as one without a plan."""
    if not point.fits or np.isfinite(point.step_ms):
        return point
    return replace(point, fits=False, problem="not a number", reason="its simulated step is not a number")


class _Drawn:
    """Places, series and the best points."""

    def __init__(self, sweep: Sweep, y: str) -> None:
        self.sweep, self.y = sweep, y
        self.varied = varied = sweep.varied
        self.x = next((name for name in _X if name in varied), "world_size")
        self.x_label = axis_label(self.x)
        self.places = sorted({getattr(point, self.x) for point in sweep.points})
        keys: list[str] = []
        for name in (name for name in _SERIES if name in varied and name != self.x):
            now, more = ({self._key(p, names) for p in sweep.points} for names in (keys, [*keys, name]))
            if len(now) < len(more) <= MOST_SERIES:
                keys.append(name)
        self.series: dict[str, list[SweepPoint]] = {}
        for point in sweep.points:
            self.series.setdefault(self._key(point, keys), []).append(point)
        self.best = {id(point) for point in sweep.pareto()}
        values = np.array([getattr(point, y) for point in sweep.points if point.fits])
        low, high = float(values.min()), float(values.max())
        spread = low > 0 and high / low > LOG_FROM
        self.y_axis = (
            spec.log(values.tolist(), _Y[y]) if spread else spec.linear(values.tolist(), _Y[y], "count", pad=0.08)
        )

    @staticmethod
    def _key(point: SweepPoint, names: Sequence[str]) -> str:
        return ", ".join(axis_text(name, point) for name in names)

    def place(self, point: SweepPoint) -> int:
        return self.places.index(getattr(point, self.x))

    def frontier(self) -> list[SweepPoint]:
        """The best of each place that is on the Pareto frontier, and better than that of all places before it."""
        best: dict[int, SweepPoint] = {}
        sign = 1 if self.y == "step_ms" else -1
        for point in self.sweep.points:
            if id(point) in self.best:
                at = self.place(point)
                if at not in best or sign * getattr(point, self.y) < sign * getattr(best[at], self.y):
                    best[at] = point
        found: list[SweepPoint] = []
        for at in sorted(best):
            if not found or sign * getattr(best[at], self.y) < sign * getattr(found[-1], self.y):
                found.append(best[at])
        return found

    def hover(self, point: SweepPoint) -> str:
        where = ", ".join(f"{axis_label(name)} {axis_text(name, point)}" for name in self.varied)
        if not point.fits:
            return f"{where}\n{point.problem}: {point.reason}"
        words = f"{where}\nsimulated step {ms_text(point.step_ms)}, {number(point.samples_per_s)} samples/s"
        return f"{words}\non the Pareto frontier" if id(point) in self.best else words

    def summary(self) -> str:
        without = sum(not point.fits for point in self.sweep.points)
        count = len(self.sweep.points)
        verb = "is" if len(self.best) == 1 else "are"
        words = f"{len(self.best)} of {counted(count, 'point')} {verb} on the Pareto frontier"
        words += f" of {self.sweep.objectives_text}"
        words += f"; {without} have no plan" if without else ""
        return f"{words}. Simulated, not measured."


def _panel(drawn: _Drawn, width: int) -> spec.Panel:
    labels = [axis_text(drawn.x, next(p for p in drawn.sweep.points if getattr(p, drawn.x) == v)) for v in drawn.places]
    at = _beside(drawn, width)
    line = drawn.frontier()
    marks: list[spec.Mark] = []
    if len(line) > 1:
        values = tuple(float(getattr(point, drawn.y)) for point in line)
        places = tuple(at[id(point)] for point in line)
        marks.append(
            spec.Lines("Pareto frontier", places, values, dash="4 4", width=1.2, hover=tuple(map(drawn.hover, line)))
        )
    for i, (name, points) in enumerate(drawn.series.items()):
        colour, _, symbol = LINES[i % len(LINES)]
        for best in (False, True):
            some = [
                (at[id(point)], getattr(point, drawn.y), drawn.hover(point), "")
                for point in points
                if point.fits and (id(point) in drawn.best) == best
            ]
            style = {"symbol": symbol, "colour": colour, "filled": best, "size": 5.5 if best else 4.0}
            marks += spec.points(name or "points", some, **style)
    low = drawn.y_axis.low
    missing = [(at[id(point)], low, drawn.hover(point), "") for point in drawn.sweep.points if not point.fits]
    marks += spec.points("no plan", missing, symbol="x", colour=WARNING, size=4.5)
    return spec.Panel(spec.categories(labels, drawn.x_label), drawn.y_axis, tuple(marks), height=260.0)


def _beside(drawn: _Drawn, width: int) -> dict[int, float]:
    """Place of each point on the x axis: at its tick, or beside it where it would cover a point of another series."""
    count, step = len(drawn.series), (width - 100) / max(1, len(drawn.places))
    series = {id(point): i for i, points in enumerate(drawn.series.values()) for point in points}
    level = {id(p): drawn.y_axis.share(getattr(p, drawn.y)) * 260 if p.fits else 0.0 for p in drawn.sweep.points}
    marks = sorted((drawn.place(point), level[id(point)], id(point)) for point in drawn.sweep.points)
    crowded = set()
    for (place, y, one), (other_place, other_y, other) in pairwise(marks):
        if place == other_place and other_y - y < 12:
            crowded |= {one, other}
    aside = min(9.0, step / (count + 1)) / step
    return {
        id(point): drawn.place(point) + (series[id(point)] - (count - 1) / 2) * aside * (id(point) in crowded)
        for point in drawn.sweep.points
    }


def _numbers(sweep: Sweep) -> TextTable:
    axes, best = sweep.varied, {id(point) for point in sweep.pareto()}
    heads = [*(axis_label(name) for name in axes), "simulated step", "samples/s", "Pareto", "bound by or reason"]
    rows = []
    for point in sweep.points:
        cells = [axis_text(name, point) for name in axes]
        if point.fits:
            cells += [
                ms_text(point.step_ms),
                number(point.samples_per_s),
                "*" if id(point) in best else "",
                point.bound_by,
            ]
        else:
            cells += [point.problem, "", "", point.reason]
        rows.append(cells)
    return TextTable(heads, rows)
