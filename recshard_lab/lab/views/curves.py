"""Curves: one loss curve per scheme, which coincide: a plan changes nothing that is learned.

Curves that coincide are drawn from broad to narrow, so that each one can be seen under the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from recshard_lab.lab.charts import spec
from recshard_lab.lab.draw.theme import LINES, SCHEMES, look_of, number
from recshard_lab.lab.draw.view import View, message_view
from recshard_lab.lab.views.registry import register_view
from recshard_lab.text_table import TextTable

MOST_POINTS = 240  # per curve
WHOLE = 8  # whole numbers that all have a tick
FEW_POINTS = 30  # up to which each has a marker

Curve = Sequence[float] | tuple[Sequence[float], Sequence[float]]


@register_view("Loss curves", place=5)
def curves(
    losses: Mapping[str, Curve],
    *,
    x_label: str = "step",
    y_label: str = "loss",
    summary: str = "",
    marks: Sequence[float] = (),
    log_x: bool = False,
    log_y: bool = False,
    note: str = "",
    width: int = 860,
) -> View:
    """Curves by name on one pair of axes.

    x values that double from one point to the next, such as numbers of GPUs, are on a logarithmic axis to base 2.

    Args:
        losses: name (a scheme's) -> values, or ``(x, values)``.
        x_label, y_label: what the axes show.
        summary: the caption. Default: how far apart the curves are; of one curve, where it begins and ends.
        marks: x at which a dashed line is drawn, for the note to explain.
        log_x, log_y: a logarithmic axis, if all its values are positive. Use both for values that span decades.
        note: a sentence under the picture: where the data come from.
        width: of the static picture, in pixels.
    """
    lines = {name: _points(curve) for name, curve in losses.items()}
    empty = [name for name, (_, y) in lines.items() if len(y) == 0]
    if not lines or empty:
        what = f"The curve {empty[0]!r} has no points." if empty else "No curve to show."
        return message_view("curves", "Loss curves", what)
    ends = [f"{_label(name)}: {y_label} became {y[~np.isfinite(y)][0]} at {x_label} {number(x[~np.isfinite(y)][0])}"
            for name, (x, y) in lines.items() if not np.isfinite(y).all()]  # fmt: skip
    if all(not np.isfinite(y).any() for _, y in lines.values()):
        return message_view("curves", "Loss curves", ". ".join(ends) + ".")
    title = f"{y_label[:1].upper()}{y_label[1:]} by {x_label}" + (f", {len(lines)} curves" if len(lines) > 1 else "")
    summary = ". ".join(ends) + "." if ends else summary or _caption(lines, x_label, y_label)
    chart = spec.Chart(title, summary, ((_panel(lines, x_label, y_label, marks, log_x, log_y),),), note)
    return View.of_chart("curves", chart, _numbers(lines, x_label, y_label), width)


Lines = dict[str, tuple[np.ndarray, np.ndarray]]


def _points(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    if isinstance(curve, tuple) and len(curve) == 2 and np.ndim(curve[0]) == 1:
        x, y = np.asarray(curve[0], dtype=float), np.asarray(curve[1], dtype=float)
        if len(x) != len(y):
            raise ValueError(f"a curve has {len(x)} x values and {len(y)} y values: give as many of both")
        return x, y
    y = np.asarray(curve, dtype=float)
    return np.arange(1.0, len(y) + 1), y


def _caption(lines: Lines, x_label: str, y_label: str) -> str:
    """How far apart the curves are where they share their x; of one curve its ends and its extremes."""
    first, *others = lines.values()
    if not others:
        return _course(*first, x_label, y_label)
    if any(len(x) != len(first[0]) or (x != first[0]).any() for x, _ in others):
        ends = [f"{_label(name)} {number(float(y[-1]), 4)}" for name, (_, y) in lines.items()]
        return f"Last {y_label} of each curve: {', '.join(ends)}."
    stacked = np.stack([y for _, y in lines.values()])
    apart = float((stacked.max(axis=0) - stacked.min(axis=0)).max())
    if apart == 0:
        return f"All {len(lines)} curves are equal, bit for bit."
    relative = apart / (float(np.abs(stacked).max()) or 1.0)
    return f"Largest distance between any two curves: {apart:.2g} ({relative:.1g} of the largest {y_label})."


def _course(x: np.ndarray, y: np.ndarray, x_label: str, y_label: str) -> str:
    """Where one curve begins and ends, and its lowest and highest point where they are elsewhere."""

    def at(i: int) -> str:
        return f"{number(float(y[i]), 4)} at {x_label} {number(float(x[i]), 4)}"

    words = f"The {y_label} is {at(0)}" + (f" and {at(len(y) - 1)}." if len(y) > 1 else ".")
    for name, i in (("lowest", int(y.argmin())), ("highest", int(y.argmax()))):
        words += f" The {name} value is {at(i)}." if y[i] not in (y[0], y[-1]) else ""
    return words


def _doubling(lines: Lines) -> list[float]:
    """The x values if each is twice the one before, with at least two doublings; else none."""
    xs = np.unique(np.concatenate([x for x, _ in lines.values()]))
    whole = len(xs) >= 3 and xs[0] > 0 and np.allclose(np.diff(np.log2(xs)).round(), np.diff(np.log2(xs)), atol=1e-9)
    return [float(x) for x in xs] if whole and len(xs) <= FEW_POINTS and xs[-1] >= 8 * xs[0] else []


def _panel(lines: Lines, x_label: str, y_label: str, marks: Sequence[float], log_x: bool, log_y: bool) -> spec.Panel:
    xs = np.concatenate([x for x, _ in lines.values()])
    ys = np.concatenate([y[np.isfinite(y)] for _, y in lines.values()])
    doubling = _doubling(lines)
    if doubling:
        x_axis = spec.log(xs.tolist(), x_label, base=2, ticks=doubling)
    elif log_x and (xs > 0).all():
        x_axis = spec.log(xs.tolist(), x_label)
    else:
        x_axis = spec.linear([*xs.tolist(), *marks], x_label, zero=False, pad=0.02)
        whole = np.unique(xs)
        if len(whole) <= WHOLE and (whole == whole.round()).all():
            x_axis = replace(x_axis, ticks=tuple(whole.tolist()))
    log_y = log_y and bool((ys > 0).all())
    y_axis = spec.log(ys.tolist(), y_label) if log_y else spec.linear(ys.tolist(), y_label, zero=False, pad=0.06)
    rules = [spec.Rule(x=mark, dash="4 3") for mark in marks if x_axis.low <= mark <= x_axis.high]
    return spec.Panel(x_axis, y_axis, (*rules, *(_line(i, len(lines), *one) for i, one in enumerate(lines.items()))))


def _line(place: int, count: int, name: str, points: tuple[np.ndarray, np.ndarray]) -> spec.Lines:
    colour, dash, symbol = LINES[place % len(LINES)]
    keep = _thinned(np.isfinite(points[1]))
    x, y = (tuple(values[keep].tolist()) for values in points)
    markers, width = len(keep) <= FEW_POINTS, _thickness(place, count)
    return spec.Lines(_label(name), x, y, colour, dash if place else "", symbol, width, markers)


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
