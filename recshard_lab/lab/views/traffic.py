"""Traffic: bytes per step from every rank to every other, as numbers on a heat map; counted beside predicted."""

from __future__ import annotations

from typing import Any

import numpy as np

from recshard_lab.lab.columns import MARGIN
from recshard_lab.lab.plots import figure
from recshard_lab.lab.svg import Svg, text_width
from recshard_lab.lab.theme import LABEL_INK, bytes_text, bytes_unit, number
from recshard_lab.lab.view import Numbers, View, message_view
from recshard_lab.lab.views.registry import register_view

NUMBERED = 16  # ranks up to which every cell carries its number
MOST_CELLS = 32  # cells a side; beyond, neighbouring ranks are added up
PALE, DEEP = (232, 241, 250), (12, 74, 132)


@register_view("Traffic", place=4)
def traffic(estimate: Any, measured: Any = None, *, note: str = "", width: int = 860) -> View:
    """Who sends how much to whom in one step.

    Args:
        estimate: has ``traffic_bytes`` ``[W, W]``: row = sender, column = receiver, bytes per step.
        measured: has a ``traffic_bytes`` counted on the ranks; its numbers stand below the predicted ones.
        note: a sentence under the picture.
        width: of the static picture, in pixels.
    """
    sent = np.asarray(estimate.traffic_bytes, dtype=float)
    if sent.size == 0:
        return message_view("traffic", "Traffic", "There is no rank to show.")
    counted = None if measured is None else getattr(measured, "traffic_bytes", None)
    counted = None if counted is None else np.asarray(counted, dtype=float)
    if not np.isfinite(sent).all():
        source, target = np.argwhere(~np.isfinite(sent))[0]
        words = f"The predicted traffic from rank {source} to rank {target} is not a number."
        return message_view("traffic", "Traffic", words)
    if counted is not None and counted.shape != sent.shape:
        words = f"{len(counted)} ranks were counted, {len(sent)} predicted: not the same plan."
        return message_view("traffic", "Traffic", words)
    away = sent - np.diag(np.diag(sent))
    title = f"Traffic per step: {bytes_text(away.sum())} between {len(sent)} ranks"
    if away.any():
        source, target = np.unravel_index(int(away.argmax()), away.shape)
        busiest = int((away.sum(axis=1) + away.sum(axis=0)).argmax())
        summary = (
            f"Most goes from rank {source} to rank {target}: {bytes_text(away.max())}. Rank {busiest} sends "
            f"{bytes_text(away.sum(axis=1)[busiest])} and receives {bytes_text(away.sum(axis=0)[busiest])}."
        )
    else:
        summary = "Nothing crosses a rank's border."

    def draw(uid: str) -> Svg:
        return _draw(away, counted, title, summary, note, width, uid)

    return View("traffic", title, summary, _numbers(away, counted), draw, lambda: _plot(away, counted, title))


def blocked(matrix: np.ndarray, side: int) -> tuple[np.ndarray, int]:
    """Adds up neighbouring ranks until at most ``side`` cells remain; returns the matrix and the ranks per cell.

    >>> blocked(np.ones((4, 4)), 2)
    (array([[4., 4.],
           [4., 4.]]), 2)
    """
    ranks = len(matrix)
    group = -(-ranks // side)
    if group == 1:
        return matrix, 1
    starts = np.arange(0, ranks, group)
    return np.add.reduceat(np.add.reduceat(matrix, starts, axis=0), starts, axis=1), group


def _draw(
    away: np.ndarray, counted: np.ndarray | None, title: str, summary: str, note: str, width: int, uid: str
) -> Svg:
    cells, group = blocked(away, MOST_CELLS)
    other = None if counted is None else blocked(counted, MOST_CELLS)[0]
    side = len(cells)
    numbered = len(away) <= NUMBERED
    size, unit = bytes_unit(float(max(cells.max(), other.max() if other is not None else 0)))
    left = MARGIN + 76.0
    totals = 74 if numbered else 0
    across = min((width - left - MARGIN - totals) / side, 96 if numbered else 14)
    down = min(across, 40 if other is not None else 30) if numbered else across
    numbered = numbered and across >= 26
    svg = Svg(width, 0, title, summary, uid)
    top = svg.head(title, summary, MARGIN) + 44
    svg.text(left, top - 22, f"to rank →   (numbers in {unit})" if numbered else "to rank →", soft=True)
    svg.text(left - 10, top - 8, "from ↓", anchor="end", soft=True)
    most = float(cells.max()) or 1.0
    every = 1 if across >= 22 else 4 if across >= 8 else 8
    for i in range(side):
        if i % every == 0:
            first = str(i * group)
            svg.text(left + (i + 0.5) * across, top - 8, first, anchor="middle", size=10)
            svg.text(left - 10, top + (i + 0.5) * down + 4, f"rank {first}", anchor="end", size=10)
        for j in range(side):
            _cell(svg, cells, other, i, j, left, top, across, down, most, size, unit, group, numbered)
    bottom = top + side * down
    if numbered:
        _totals(svg, cells, left, top, across, down, size)
        bottom += down
    if not numbered:
        _key(svg, left, bottom + 12, bytes_text(most))
        bottom += 26
    words = "Struck out: what stays on its rank." if group == 1 else f"Each cell adds up {group} x {group} ranks."
    words += " Below: counted." if other is not None and numbered else ""
    svg.text(MARGIN, bottom + 16, f"{words} {note}".strip(), soft=True)
    svg.height = bottom + 26
    return svg


def _cell(
    svg: Svg,
    cells: np.ndarray,
    other: np.ndarray | None,
    i: int,
    j: int,
    left: float,
    top: float,
    across: float,
    down: float,
    most: float,
    size: float,
    unit: str,
    group: int,
    numbered: bool,
) -> None:
    x, y = left + j * across, top + i * down
    if i == j and group == 1:
        svg.rect(x, y, across - 1, down - 1, "none", extra='stroke="currentColor" stroke-opacity=".25"')
        svg.line(x, y + down - 1, x + across - 1, y, 'stroke-opacity=".25"')
        return
    share = cells[i, j] / most
    hover = f"rank {i * group} to rank {j * group}: {bytes_text(cells[i, j])}" if numbered else ""
    svg.rect(x, y, across - 1, down - 1, _colour(share), hover)
    if not numbered:
        return
    ink = _ink(share)
    words = number(cells[i, j] / size, 3)
    words = words if text_width(words, 10) <= across - 2 else number(cells[i, j] / size, 2)
    middle = x + (across - 1) / 2
    if other is None:
        svg.text(middle, y + down / 2 + 3.5, words, anchor="middle", size=10.5, ink=ink)
        return
    svg.text(middle, y + down / 2 - 2.5, words, anchor="middle", size=10.5, ink=ink)
    svg.text(middle, y + down / 2 + 10, number(other[i, j] / size, 3), anchor="middle", size=10.5, ink=ink, bold=True)


def _key(svg: Svg, left: float, y: float, most: str) -> None:
    """What the colours mean where cells have no numbers."""
    svg.text(left, y + 10, "0", anchor="start")
    for i in range(12):
        svg.rect(left + 14 + 12 * i, y, 12, 12, _colour(i / 11))
    svg.text(left + 164, y + 10, most)


def _colour(share: float) -> str:
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(PALE, DEEP, strict=True))
    return f"#{red:02x}{green:02x}{blue:02x}"


def _ink(share: float) -> str:
    """Dark or white, whichever stands out more (relative luminance of WCAG 2: both contrasts are equal at 0.18)."""
    channels = [(a + (b - a) * share) / 255 for a, b in zip(PALE, DEEP, strict=True)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return LABEL_INK if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.18 else "#fff"


def _totals(svg: Svg, cells: np.ndarray, left: float, top: float, across: float, down: float, size: float) -> None:
    """What each rank sends (right) and receives (below)."""
    side = len(cells)
    right = left + side * across + 8
    svg.text(right, top - 8, "sends", soft=True, size=10)
    svg.text(left - 10, top + (side + 0.5) * down + 4, "receives", anchor="end", soft=True, size=10)
    for i in range(side):
        svg.text(right, top + (i + 0.5) * down + 4, number(cells[i].sum() / size), size=10.5, bold=True)
        words = number(cells[:, i].sum() / size)
        svg.text(left + (i + 0.5) * across, top + (side + 0.5) * down + 4, words, anchor="middle", size=10.5, bold=True)


def _numbers(away: np.ndarray, counted: np.ndarray | None) -> Numbers:
    """The matrix where it is small, else what each rank sends and receives."""
    if len(away) <= 8:
        heads = ["from \\ to", *(f"rank {j}" for j in range(len(away)))]
        rows = [[f"rank {i}", *map(bytes_text, row)] for i, row in enumerate(away)]
        if counted is not None:
            rows += [[f"rank {i}, counted", *map(bytes_text, row)] for i, row in enumerate(counted)]
        return Numbers(heads, rows)
    heads = ["rank", "sends", "receives"]
    pairs = zip(away.sum(axis=1), away.sum(axis=0), strict=True)
    return Numbers(heads, [[str(i), bytes_text(a), bytes_text(b)] for i, (a, b) in enumerate(pairs)])


def _plot(away: np.ndarray, counted: np.ndarray | None, title: str) -> Any:
    import plotly.graph_objects as go

    cells, group = blocked(away, MOST_CELLS)
    size, unit = bytes_unit(float(cells.max()))
    labels = [f"rank {i * group}" for i in range(len(cells))]
    values = [[float(f"{v / size:.4g}") for v in row] for row in cells]
    heat = go.Heatmap(
        z=values,
        x=labels,
        y=labels,
        text=[[number(v) for v in row] for row in values] if len(away) <= NUMBERED else None,
        texttemplate="%{text}" if len(away) <= NUMBERED else None,
        colorscale=[[0, "rgb(232,241,250)"], [1, "rgb(12,74,132)"]],
        colorbar={"title": {"text": unit}, "outlinewidth": 0},
        hovertemplate="%{y} to %{x}: %{z} " + unit + "<extra></extra>",
        xgap=1,
        ygap=1,
    )
    return figure(
        [heat],
        title,
        height=170 + 26 * min(len(cells), 14),
        xaxis={"title": {"text": "to"}},
        yaxis={"autorange": "reversed", "showgrid": False, "title": {"text": "from"}},
    )
