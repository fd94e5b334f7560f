"""Curves: one loss curve per scheme on top of one another, which is the point: a plan changes nothing that is learned.

Curves that coincide are drawn from broad to narrow, so that each one can be seen under the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from recshard_lab.lab.draw.plots import figure
from recshard_lab.lab.draw.rank_columns import MARGIN
from recshard_lab.lab.draw.svg import Svg
from recshard_lab.lab.draw.theme import LINES, MIDDLE_INK, SCHEMES, as_sentence, look_of, number, ticks
from recshard_lab.lab.draw.view import View, message_view
from recshard_lab.lab.views.registry import register_view
from recshard_lab.text_table import TextTable

MOST_POINTS = 240  # per curve in the static picture
FEW_POINTS = 12  # so few are marked one by one
LEFT, HEIGHT = 62.0, 230.0

Curve = Sequence[float] | tuple[Sequence[float], Sequence[float]]


@register_view("Loss curves", place=5)
def curves(
    losses: Mapping[str, Curve],
    *,
    x_label: str = "step",
    y_label: str = "loss",
    summary: str = "",
    marks: Sequence[float] = (),
    log_y: bool = False,
    note: str = "",
    width: int = 860,
) -> View:
    """Curves by name on one pair of axes, with the largest distance between any two of them in words.

    x values that double from one point to the next, such as numbers of GPUs, are on a logarithmic axis.

    Args:
        losses: name (a scheme's) -> values, or ``(x, values)``.
        x_label, y_label: what the axes show.
        summary: a sentence over the picture. Default: how far apart the curves are.
        marks: x at which a dashed line is drawn, for the note to explain.
        log_y: a logarithmic y axis, if all values are positive.
        note: a sentence under the picture: where the data come from.
        width: of the static picture, in pixels.
    """
    lines = {name: _points(curve) for name, curve in losses.items()}
    empty = [name for name, (_, y) in lines.items() if len(y) == 0]
    if not lines or empty:
        what = f"The curve {empty[0]!r} has no points." if empty else "There is no curve to show."
        return message_view("curves", "Loss curves", what)
    ends = [f"{_label(name)}: {y_label} became {y[~np.isfinite(y)][0]} at {x_label} {number(x[~np.isfinite(y)][0])}"
            for name, (x, y) in lines.items() if not np.isfinite(y).all()]  # fmt: skip
    if all(not np.isfinite(y).any() for _, y in lines.values()):
        return message_view("curves", "Loss curves", ". ".join(ends) + ".")
    title = f"{y_label[:1].upper()}{y_label[1:]} by {x_label}" + (f", {len(lines)} curves" if len(lines) > 1 else "")
    summary = ". ".join(ends) + "." if ends else summary or _distance(lines, y_label)
    log_y = log_y and all((y[np.isfinite(y)] > 0).all() for _, y in lines.values())

    def draw(uid: str) -> Svg:
        return _draw(lines, title, summary, x_label, list(marks), log_y, as_sentence(note), width, uid)

    def plot() -> Any:
        return _plot(lines, title, x_label, y_label, list(marks), log_y)

    return View("curves", title, summary, _numbers(lines, x_label, y_label), draw, plot)


Lines = dict[str, tuple[np.ndarray, np.ndarray]]


def _points(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    if isinstance(curve, tuple) and len(curve) == 2 and np.ndim(curve[0]) == 1:
        x, y = np.asarray(curve[0], dtype=float), np.asarray(curve[1], dtype=float)
        if len(x) != len(y):
            raise ValueError(f"a curve has {len(x)} x values and {len(y)} y values: give as many of both")
        return x, y
    y = np.asarray(curve, dtype=float)
    return np.arange(1.0, len(y) + 1), y


def _distance(lines: Lines, y_label: str) -> str:
    """How far apart the curves are where they share their x."""
    first, *others = lines.values()
    if not others:
        return f"Ends at {y_label} {number(float(first[1][-1]), 4)}."
    if any(len(x) != len(first[0]) or (x != first[0]).any() for x, _ in others):
        return "The curves were not taken at the same points."
    stacked = np.stack([y for _, y in lines.values()])
    apart = float((stacked.max(axis=0) - stacked.min(axis=0)).max())
    if apart == 0:
        return f"All {len(lines)} curves are equal, bit for bit."
    relative = apart / (float(np.abs(stacked).max()) or 1.0)
    return f"Largest distance between any two curves: {apart:.2g} ({relative:.1g} of the largest {y_label})."


def _doubling(lines: Lines) -> list[float]:
    """The x values if each is twice the one before, with at least two doublings; else none."""
    xs = np.unique(np.concatenate([x for x, _ in lines.values()]))
    whole = len(xs) >= 3 and xs[0] > 0 and np.allclose(np.diff(np.log2(xs)).round(), np.diff(np.log2(xs)), atol=1e-9)
    return [float(x) for x in xs] if whole and len(xs) <= FEW_POINTS and xs[-1] >= 8 * xs[0] else []


def _draw(
    lines: Lines,
    title: str,
    summary: str,
    x_label: str,
    marks: list[float],
    log_y: bool,
    note: str,
    width: int,
    uid: str,
) -> Svg:
    good = [np.isfinite(y) for _, y in lines.values()]
    ys = np.concatenate([y[ok] for (_, y), ok in zip(lines.values(), good, strict=True)])
    xs = np.concatenate([x for x, _ in lines.values()])
    height_of = np.log10 if log_y else float
    low, high = float(height_of(ys.min())), float(height_of(ys.max()))
    pad = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    low, high = low - pad, high + pad
    doubling = _doubling(lines)
    place = np.log2 if doubling else float
    x0, x1 = float(place(xs.min())), float(place(xs.max()))
    span = (x1 - x0) or 1.0
    right = width - MARGIN - 8
    svg = Svg(width, 0, title, summary, uid)
    top = svg.head(title, summary, MARGIN) + 14

    def at(x: float, y: float) -> tuple[float, float]:
        share = (high - float(height_of(y))) / (high - low)
        return LEFT + (float(place(x)) - x0) / span * (right - LEFT), top + share * HEIGHT

    bottom = 10**low if log_y else low
    for level in _log_ticks(low, high) if log_y else ticks(low, high):
        height = at(xs[0], level)[1]
        svg.line(LEFT, height, right, height, 'stroke-opacity=".15"')
        svg.text(LEFT - 8, height + 4, number(level, 3), anchor="end", size=10, soft=True)
    for tick in doubling or ticks(x0, x1):
        across = at(tick, bottom)[0]
        svg.text(across, top + HEIGHT + 16, number(tick), anchor="middle", size=10, soft=True)
    svg.line(LEFT, top + HEIGHT, right, top + HEIGHT, 'stroke-opacity=".6"')
    for mark in marks:
        across = at(mark, bottom)[0]
        svg.line(across, top, across, top + HEIGHT, 'stroke-dasharray="4 3" stroke-opacity=".6"')
    svg.text(right, top + HEIGHT + 32, x_label, anchor="end", soft=True)
    count = len(lines)
    legend_x, legend_y = LEFT, top + HEIGHT + 28
    for i, (name, (x, y)) in enumerate(lines.items()):
        colour, dash, _ = LINES[i % len(LINES)]
        thick = _thickness(i, count)
        style = f'fill="none" stroke="{colour}" stroke-width="{thick:.1f}" stroke-linejoin="round"'
        style += f' stroke-dasharray="{dash}"' if dash and i else ""
        keep = _thinned(np.isfinite(y))
        points = " ".join(f"{px:.1f},{py:.1f}" for px, py in (at(float(x[k]), float(y[k])) for k in keep))
        svg.path(f"M{points}", style, f"{_label(name)}: ends at {number(float(y[-1]), 4)}")
        if len(keep) <= FEW_POINTS:
            r = 2 + thick / 2
            for k in keep:
                px, py = at(float(x[k]), float(y[k]))
                arc = f"a{r:.1f} {r:.1f} 0 1 0"
                dot = f"M{px - r:.1f} {py:.1f}{arc} {2 * r:.1f} 0{arc} -{2 * r:.1f} 0z"
                where = f"{x_label} {number(float(x[k]))}: {number(float(y[k]), 4)}"
                svg.path(dot, f'fill="{colour}"', f"{_label(name)}, {where}")
        words = f"{_label(name)}: {number(float(y[-1]), 4)}"
        room = 46 + len(words) * 6.6
        if legend_x > LEFT and legend_x + room > right - 40:
            legend_x, legend_y = LEFT, legend_y + 17
        svg.path(f"M{legend_x:.1f} {legend_y:.1f}h30", style)
        svg.text(legend_x + 37, legend_y + 4, words)
        legend_x += room + 8
    end = legend_y + 14
    if note:
        svg.text(MARGIN, end + 12, note, soft=True)
    svg.height = end + (20 if note else 2)
    return svg


def _log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten between ``10 ** low`` and ``10 ** high``; with 2 and 5 times them where there are few.

    >>> _log_ticks(0.9, 3.1), _log_ticks(0.2, 1.1)
    ([10.0, 100.0, 1000.0], [2.0, 5.0, 10.0])
    """
    powers = range(int(np.floor(low)), int(np.ceil(high)) + 1)
    tens = [10.0**power for power in powers if low <= power <= high]
    if len(tens) >= 3:
        return tens
    every = (factor * 10.0**power for power in powers for factor in (1, 2, 5))
    return [level for level in every if low <= np.log10(level) <= high]


def _thickness(place: int, count: int) -> float:
    """Broad below, narrow on top, so that equal curves all show."""
    return 2.0 if count == 1 else 1.6 + min(1.7, 5 / count) * (count - 1 - place)


def _thinned(finite: np.ndarray) -> list[int]:
    """At most `MOST_POINTS` of the finite points, the last one among them."""
    kept = np.flatnonzero(finite)
    if len(kept) > MOST_POINTS:
        kept = kept[np.unique(np.linspace(0, len(kept) - 1, MOST_POINTS).round().astype(int))]
    return [int(k) for k in kept]


def _label(name: str) -> str:
    return look_of(name, SCHEMES).label if name in SCHEMES else name


def _numbers(lines: Lines, x_label: str, y_label: str) -> TextTable:
    rows = [
        [_label(name), number(float(x[-1])), number(float(y[0]), 5), number(float(y[-1]), 5)]
        for name, (x, y) in lines.items()
    ]
    return TextTable(("curve", f"last {x_label}", f"first {y_label}", f"last {y_label}"), rows)


def _plot(lines: Lines, title: str, x_label: str, y_label: str, marks: list[float], log_y: bool) -> Any:
    import plotly.graph_objects as go

    count = len(lines)
    traces = []
    for i, (name, (x, y)) in enumerate(lines.items()):
        colour, dash, symbol = LINES[i % len(LINES)]
        keep = _thinned(np.isfinite(y))
        traces.append(
            go.Scatter(
                name=_label(name),
                x=[float(x[k]) for k in keep],
                y=[float(f"{y[k]:.6g}") for k in keep],
                mode="lines+markers" if len(keep) <= 30 else "lines",
                marker={"symbol": symbol, "size": 7},
                line={
                    "color": colour,
                    "width": _thickness(i, count),
                    "dash": ",".join(f"{d}px" for d in dash.split()) if dash and i else "solid",
                },
                hovertemplate=f"{x_label} %{{x}}<br>{y_label} %{{y:.5g}}",
            )
        )
    xaxis: dict[str, Any] = {"title": {"text": x_label}}
    if doubling := _doubling(lines):
        xaxis |= {"type": "log", "tickvals": doubling, "ticktext": [number(x) for x in doubling]}
    dashed = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "line": {"color": MIDDLE_INK, "dash": "dash"}}
    shapes = [{**dashed, "x0": mark, "x1": mark} for mark in marks]
    yaxis: dict[str, Any] = {"title": {"text": y_label}} | ({"type": "log"} if log_y else {})
    return figure(traces, title, shapes=shapes, xaxis=xaxis, yaxis=yaxis)
