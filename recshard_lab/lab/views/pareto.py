"""A what-if sweep as points: how fast against what it takes, and which points no other is better than.

Points stand in even steps of what is swept, so that 8 and 2,048 ranks both have room. What does not fit stands in a
strip of its own below, with its reason. Every number is simulated, and the picture says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from textwrap import wrap
from typing import Any

import numpy as np

from recshard_lab.lab.draw.plots import figure
from recshard_lab.lab.draw.rank_columns import MARGIN
from recshard_lab.lab.draw.svg import Svg
from recshard_lab.lab.draw.theme import LINES, WARNING, counted, ms_text, number, ticks
from recshard_lab.lab.draw.view import View, message_view
from recshard_lab.lab.views.registry import register_view
from recshard_lab.planner.sweep.points import Sweep, SweepPoint, axis_label, axis_text
from recshard_lab.text_table import TextTable

LEFT, HEIGHT, STRIP = 76.0, 260.0, 26.0
MOST_SERIES = 8
LOG_FROM = 30.0  # largest over smallest; beyond, the axis is logarithmic
_X = ("world_size", "hbm_cap", "batch_size", "global_batch_size")
_SERIES = ("topology", "pipeline", "codecs", "sharding_group_size", "hbm_cap", "batch_size", "global_batch_size")
_Y = {"samples_per_s": "samples a second", "step_ms": "ms a step"}


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
    summary = drawn.summary()

    def draw(uid: str) -> Svg:
        return _draw(drawn, title, summary, note, width, uid)

    def plot() -> Any:
        return _plot(drawn, title)

    return View("pareto", title, summary, _numbers(sweep), draw, plot)


def _with_number(point: SweepPoint) -> SweepPoint:
    """A point whose step is no number stands among those that have no plan."""
    if not point.fits or np.isfinite(point.step_ms):
        return point
    return replace(point, fits=False, problem="no number", reason="its simulated step is not a number")


class _Drawn:
    """What goes where, for both pictures."""

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
        self.log = low > 0 and high / low > LOG_FROM
        self.low, self.high = (low / 1.4, high * 1.4) if self.log else (0.0, high * 1.08)

    @staticmethod
    def _key(point: SweepPoint, names: Sequence[str]) -> str:
        return ", ".join(axis_text(name, point) for name in names)

    def place(self, point: SweepPoint) -> int:
        return self.places.index(getattr(point, self.x))

    def level(self, value: float) -> float:
        """From 0 at the bottom to 1."""
        if self.log:
            return float(np.log(value / self.low) / np.log(self.high / self.low))
        return (value - self.low) / (self.high - self.low)

    def levels(self) -> list[float]:
        if not self.log:
            return ticks(self.low, self.high)
        first, last = int(np.floor(np.log10(self.low))), int(np.ceil(np.log10(self.high)))
        found = [float(m * 10.0**e) for e in range(first, last + 1) for m in (1, 2, 5)]
        found = [value for value in found if self.low <= value <= self.high]
        return found if len(found) <= 8 else [value for value in found if f"{value:e}"[0] == "1"]

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
        words += f"; {without} have no plan, see the crosses" if without else ""
        return f"{words}. Simulated, not measured."


def _draw(drawn: _Drawn, title: str, summary: str, note: str, width: int, uid: str) -> Svg:
    svg = Svg(width, 0, title, summary, uid)
    top = svg.head(title, summary, MARGIN) + 14
    right, bottom = width - MARGIN - 8, top + HEIGHT
    step = (right - LEFT) / max(1, len(drawn.places))
    count = len(drawn.series)

    def y_of(point: SweepPoint) -> float:
        return bottom - drawn.level(getattr(point, drawn.y)) * HEIGHT if point.fits else bottom + 13

    crowded = set()  # points at one tick whose marks would cover one another
    marks = sorted((drawn.place(point), y_of(point), id(point)) for point in drawn.sweep.points)
    for (place, y, one), (other_place, other_y, other) in pairwise(marks):
        if place == other_place and other_y - y < 12:
            crowded |= {one, other}

    def x_of(point: SweepPoint, number_of_series: int) -> float:
        """At the tick, or beside it where the mark of another series would be covered."""
        aside = (number_of_series - (count - 1) / 2) * min(9, step / (count + 1))
        return LEFT + (drawn.place(point) + 0.5) * step + (aside if id(point) in crowded else 0.0)

    for level in drawn.levels():
        height = bottom - drawn.level(level) * HEIGHT
        svg.line(LEFT, height, right, height, 'stroke-opacity=".15"')
        svg.text(LEFT - 8, height + 4, _short(level), anchor="end", size=10, soft=True)
    svg.line(LEFT, bottom, right, bottom, 'stroke-opacity=".6"')
    missing = any(not point.fits for point in drawn.sweep.points)
    end = bottom + (STRIP if missing else 0)
    if missing:
        svg.text(LEFT - 8, bottom + 17, "no plan", anchor="end", size=10, soft=True)
    every = 1 + len(drawn.places) // 16
    for place, value in enumerate(drawn.places):
        if place % every == 0:
            words = axis_text(drawn.x, next(p for p in drawn.sweep.points if getattr(p, drawn.x) == value))
            svg.text(LEFT + (place + 0.5) * step, end + 16, words, anchor="middle", size=10, soft=True)
    svg.text(right, end + 32, drawn.x_label, anchor="end", soft=True)
    at = {id(p): i for i, points in enumerate(drawn.series.values()) for p in points}
    line = [(x_of(point, at[id(point)]), y_of(point)) for point in drawn.frontier()]
    if len(line) > 1:
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in line)
        svg.path(f"M{points}", 'fill="none" stroke="currentColor" stroke-opacity=".45" stroke-dasharray="4 4"')
    for i, points_of in enumerate(drawn.series.values()):
        for point in sorted(points_of, key=lambda one: id(one) in drawn.best):
            x = x_of(point, i)
            if point.fits:
                _mark(svg, x, y_of(point), i, id(point) in drawn.best, drawn.hover(point))
            else:
                cross = f"M{x - 4:.1f} {bottom + 9:.1f}l8 8m0 -8l-8 8"
                svg.path(cross, f'fill="none" stroke="{WARNING}" stroke-width="2"', drawn.hover(point))
    y = _legend(svg, drawn, end + 34, right)
    if note:
        svg.text(MARGIN, y + 12, note, soft=True)
        y += 18
    svg.height = y + 4
    return svg


def _legend(svg: Svg, drawn: _Drawn, y: float, right: float) -> float:
    """Series by marker, then what filled and dashed mean; returns the y below."""
    x = LEFT
    entries = [(i, name) for i, name in enumerate(drawn.series) if name] or [(0, "all points")]
    for i, name in entries:
        room = 26 + len(name) * 6.6
        if x > LEFT and x + room > right - 60:
            x, y = LEFT, y + 18
        _mark(svg, x + 6, y - 4, i, True, "")
        svg.text(x + 18, y, name)
        x += room + 10
    words = "Filled: on the Pareto frontier. Hollow: another point is better. Cross: no plan. Joined: ever better."
    for line in wrap(words, int((right - LEFT) / 5.9)):
        y += 18
        svg.text(LEFT, y, line, soft=True)
    return y + 9


_SHAPES = {
    "circle": "M{l} {y}a{r} {r} 0 1 0 {d} 0a{r} {r} 0 1 0 -{d} 0z",
    "square": "M{l} {t}h{d}v{d}h-{d}z",
    "diamond": "M{x} {t}L{e} {y}L{x} {b}L{l} {y}z",
    "triangle-up": "M{x} {t}L{e} {b}L{l} {b}z",
    "triangle-down": "M{x} {b}L{e} {t}L{l} {t}z",
    "cross": "M{l1} {l1y}h{w}v-{w}h{w}v{w}h{w}v{w}h-{w}v{w}h-{w}v-{w}h-{w}z",
    "pentagon": "{pentagon}",
    "hexagon": "{hexagon}",
}
_MARKS = [(colour, shape) for colour, _, shape in LINES if shape in _SHAPES]


def _mark(svg: Svg, x: float, y: float, series: int, filled: bool, hover: str) -> None:
    colour, shape = _MARKS[series % len(_MARKS)]
    r = 5.5 if filled else 4.0
    spots = {"x": x, "y": y, "r": r, "d": 2 * r, "l": x - r, "e": x + r, "t": y - r, "b": y + r}
    spots |= {"l1": x - r, "l1y": y - r / 3, "w": 2 * r / 3}
    said = {key: f"{value:.1f}" for key, value in spots.items()}
    said |= {name: _polygon(x, y, r, corners) for name, corners in (("pentagon", 5), ("hexagon", 6))}
    d = _SHAPES[shape].format(**said)
    ink = f'fill="{colour}"' if filled else 'fill="none" stroke-opacity=".8"'
    svg.path(d, f'{ink} stroke="{colour}" stroke-width="1.4" pointer-events="all"', hover)


def _polygon(x: float, y: float, r: float, corners: int) -> str:
    angles = np.arange(corners) * 2 * np.pi / corners - np.pi / 2
    return "M" + "L".join(f"{x + r * np.cos(a):.1f} {y + r * np.sin(a):.1f}" for a in angles) + "z"


def _short(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{number(value / size)}{unit}"
    return number(value)


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


def _plot(drawn: _Drawn, title: str) -> Any:
    import plotly.graph_objects as go

    labels = [axis_text(drawn.x, next(p for p in drawn.sweep.points if getattr(p, drawn.x) == v)) for v in drawn.places]
    line = drawn.frontier()
    traces: list[Any] = [
        go.Scatter(
            name="Pareto frontier",
            x=[labels[drawn.place(point)] for point in line],
            y=[getattr(point, drawn.y) for point in line],
            mode="lines",
            line={"color": "#7a828c", "dash": "dash", "width": 1.4},
            hoverinfo="skip",
        )
    ]
    for i, (name, points) in enumerate(drawn.series.items()):
        colour, shape = _MARKS[i % len(_MARKS)]
        fitting = [point for point in points if point.fits]
        if fitting:
            best = [id(point) in drawn.best for point in fitting]
            traces.append(
                go.Scatter(
                    name=name or "points",
                    x=[labels[drawn.place(point)] for point in fitting],
                    y=[float(f"{getattr(point, drawn.y):.6g}") for point in fitting],
                    mode="markers",
                    marker={
                        "symbol": [shape if good else f"{shape}-open" for good in best],
                        "size": [12 if good else 9 for good in best],
                        "color": colour,
                        "line": {"width": 1.6, "color": colour},
                    },
                    text=[drawn.hover(point).replace("\n", "<br>") for point in fitting],
                    hovertemplate="%{text}<extra></extra>",
                )
            )
    missing = [point for point in drawn.sweep.points if not point.fits]
    if missing:
        traces.append(
            go.Scatter(
                name="no plan",
                x=[labels[drawn.place(point)] for point in missing],
                y=[drawn.low] * len(missing),
                mode="markers",
                marker={"symbol": "x-thin", "size": 10, "line": {"width": 2, "color": WARNING}},
                text=[_wrapped(drawn.hover(point)) for point in missing],
                hovertemplate="%{text}<extra></extra>",
            )
        )
    return figure(
        traces,
        title,
        height=440,
        xaxis={"title": {"text": drawn.x_label}, "type": "category", "categoryarray": labels},
        yaxis={"title": {"text": _Y[drawn.y]}, "type": "log" if drawn.log else "linear"},
    )


def _wrapped(words: str) -> str:
    return "<br>".join(line for part in words.split("\n") for line in wrap(part, 80))
