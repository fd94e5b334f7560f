"""Memory: per rank a stack of what it holds, by category, against its capacity; measured beside predicted.

The reserve is no bytes in use: it hangs as a band below the capacity, and what fits must stay under the band.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from recshard_lab.lab.columns import MARGIN, Columns
from recshard_lab.lab.plots import figure, marker
from recshard_lab.lab.svg import Svg, fit
from recshard_lab.lab.theme import LABEL_INK, MEMORY, MIDDLE_INK, WARNING, bytes_text, look_of, number
from recshard_lab.lab.view import Numbers, View, message_view
from recshard_lab.lab.views.registry import register_view

TALLEST = 210.0
FAR = 2.5  # a capacity beyond this many times the largest stack is written instead of drawn


@register_view("Memory", place=2)
def memory(estimate: Any, measured: Any = None, *, note: str = "", width: int = 860, extent: float = 0.0) -> View:
    """Bytes per rank and category against the capacity.

    Args:
        estimate: has ``memory_categories`` (C names), ``memory_bytes`` ``[W, C]`` and ``capacity_bytes`` ``[W]``.
        measured: has ``memory_categories`` and ``memory_bytes`` of its own; drawn beside, ranks in the same order.
        note: a sentence under the picture.
        width: of the static picture, in pixels.
        extent: bytes of the stack that fills the picture, where several are to one scale; 0 for its own tallest.
    """
    stacks = {"predicted": _stack(estimate)}
    if measured is not None:
        stacks["measured"] = _stack(measured)
    capacity = np.asarray(estimate.capacity_bytes, dtype=float)
    predicted = stacks["predicted"][1]
    if predicted.size == 0:
        return message_view("memory", "Memory", "There is no rank and no byte to show.")
    usable = capacity - _reserve(estimate)
    for kind, (_, values) in stacks.items():
        if len(values) != len(predicted):
            words = f"{len(values)} ranks were measured, {len(predicted)} predicted: not the same plan."
            return message_view("memory", "Memory", words)
        good = np.isfinite(values).all(axis=1) & np.isfinite(usable)
        if not good.all():
            words = f"The {kind} memory of rank {int(np.argmin(good))} is not a number."
            return message_view("memory", "Memory", words)
    title = "Memory per rank, predicted" + (" | measured" if measured is not None else "")
    summary = _summary(predicted.sum(axis=1), capacity, usable)

    def draw(uid: str) -> Svg:
        return _draw(stacks, capacity, usable, title, summary, note, width, max(most, extent), uid)

    most = max(float(values.sum(axis=1).max()) for _, values in stacks.values())
    numbers = _numbers(stacks, usable)
    return View("memory", title, summary, numbers, draw, lambda: _plot(stacks, usable, title), extent=most)


Stacks = dict[str, tuple[Sequence[str], np.ndarray]]


def _stack(source: Any) -> tuple[Sequence[str], np.ndarray]:
    """Categories and bytes ``[W, C]`` in use, without the reserve."""
    values = np.asarray(source.memory_bytes, dtype=float)
    keep = [i for i, name in enumerate(source.memory_categories) if name != "reserve"]
    return [source.memory_categories[i] for i in keep], values[:, keep] if values.size else values


def _reserve(source: Any) -> np.ndarray | float:
    names = list(source.memory_categories)
    return np.asarray(source.memory_bytes, dtype=float)[:, names.index("reserve")] if "reserve" in names else 0.0


def _summary(used: np.ndarray, capacity: np.ndarray, usable: np.ndarray) -> str:
    """Fits or not, and by how much on the rank where it is tightest."""
    over = np.flatnonzero(used > usable)
    tight = int(np.argmax(used - usable)) if len(over) else int(np.argmax(used / np.maximum(usable, 1)))
    reserve = capacity[tight] - usable[tight]
    limit = f"{bytes_text(usable[tight])} usable"
    if reserve > 0:
        limit = f"{limit} of {bytes_text(capacity[tight])} ({number(100 * reserve / capacity[tight], 2)}% reserve)"
    if len(over):
        others = f"; ranks over their limit: {len(over)}" if len(over) > 1 else ""
        return f"Does not fit: rank {tight} needs {bytes_text(used[tight])}, it has {limit}{others}."
    share = number(100 * used[tight] / max(usable[tight], 1), 2)
    return f"Fits. Fullest: rank {tight}, {bytes_text(used[tight])}, {share}% of {limit}."


def _draw(
    stacks: Stacks,
    capacity: np.ndarray,
    usable: np.ndarray,
    title: str,
    summary: str,
    note: str,
    width: int,
    most: float,
    uid: str,
) -> Svg:
    columns, most = Columns(len(capacity), width), most or 1.0
    lowest = float(capacity.min())
    drawn = lowest <= FAR * most
    scale = TALLEST / max(most, min(float(capacity.max()), FAR * most) if drawn else 0)
    svg = Svg(width, 0, title, summary, uid)
    key = svg.head(title, summary, MARGIN, warn=summary.startswith("Does not fit")) + 16
    floor = key + 26 + TALLEST
    each = columns.each / len(stacks) - (2 if len(stacks) > 1 and columns.legible else 0)
    for place, (kind, (names, values)) in enumerate(stacks.items()):
        if len(capacity) > 32:
            _skyline(svg, columns, names, values, scale, floor, place, each, kind)
            continue
        for rank, row in enumerate(values):
            left = columns.left(rank) + place * (columns.each / len(stacks))
            _column(svg, names, row, left, each, floor, scale, f"rank {rank}, {kind}")
            if columns.legible:
                words = fit([bytes_text(row.sum()), bytes_text(row.sum()).replace(" ", "")], each + 6, 10.5)
                top = floor - row.sum() * scale - 5
                svg.text(left + each / 2, top, words, anchor="middle", size=10.5, bold=row.sum() > usable[rank])
    svg.line(MARGIN - 4, floor + 0.5, columns.right + 4, floor + 0.5, 'stroke-opacity=".6"')
    if drawn:
        _capacity_lines(svg, columns, capacity, usable, floor, scale, key)
    else:
        words = f"↑ capacity {bytes_text(lowest)}, {number(lowest / most, 2)} times the tallest column"
        svg.text(MARGIN, key, words, soft=True)
    columns.label_ranks(svg, floor + 15)
    below = floor + 26 + (14 if columns.each < 44 else 0)
    if len(stacks) > 1 and columns.each >= 90:
        for rank in range(len(capacity)):
            for place, kind in enumerate(stacks):
                middle = columns.left(rank) + place * columns.each / 2 + each / 2
                svg.text(middle, floor + 29, kind, anchor="middle", size=10, soft=True)
        below += 14
    used = _used(stacks)
    end = svg.legend(MARGIN, below, [(look_of(n, MEMORY), look_of(n, MEMORY).label) for n in used], width - 2 * MARGIN)
    if note:
        svg.text(MARGIN, end + 9, note, soft=True)
    svg.height = end + (18 if note else 2)
    return svg


def _column(
    svg: Svg, names: Sequence[str], row: np.ndarray, left: float, width: float, floor: float, scale: float, who: str
) -> None:
    y = floor
    for name, value in zip(names, row, strict=True):
        height = value * scale
        if height <= 0.05:
            continue
        y -= height
        look = look_of(name, MEMORY)
        hover = f"{who}\n{look.label}: {bytes_text(value)}"
        svg.rect(left, y, width, height, svg.fill(look), hover, f'stroke="{LABEL_INK}" stroke-width=".6"')
        if height >= 14 and width >= 60:
            words = fit([f"{look.label}, {bytes_text(value)}", bytes_text(value)], width - 6, 10)
            halo = f'stroke="{look.fill}" stroke-width="3" paint-order="stroke"'
            svg.text(left + 4, y + height / 2 + 3.6, words, size=10, ink=LABEL_INK, extra=halo)


def _skyline(
    svg: Svg,
    columns: Columns,
    names: Sequence[str],
    values: np.ndarray,
    scale: float,
    floor: float,
    place: int,
    each: float,
    kind: str,
) -> None:
    """Many ranks: one path per category instead of a rectangle per rank."""
    lower = np.zeros(len(values))
    for i, name in enumerate(names):
        upper = lower + values[:, i]
        pieces = []
        for rank in np.flatnonzero(values[:, i] * scale > 0.05):
            left = columns.left(int(rank)) + place * each
            bottom, top = floor - lower[rank] * scale, floor - upper[rank] * scale
            pieces.append(f"M{left:.1f} {bottom:.1f}V{top:.1f}h{each:.1f}V{bottom:.1f}z")
        look = look_of(name, MEMORY)
        largest = bytes_text(values[:, i].max(initial=0))
        if pieces:
            svg.path("".join(pieces), f'fill="{svg.fill(look)}"', f"{look.label}, {kind}: at most {largest} on a rank")
        lower = upper


def _capacity_lines(
    svg: Svg, columns: Columns, capacity: np.ndarray, usable: np.ndarray, floor: float, scale: float, key: float
) -> None:
    """Each rank's capacity as a dashed line with its reserve hanging below; one label where all are equal."""
    extra = f'stroke-width="1.6" stroke-dasharray="6 3" style="stroke:{WARNING}"'
    same = capacity.max() == capacity.min() and usable.max() == usable.min()
    spans = [(MARGIN - 4.0, columns.right + 4)] if same else []
    spans = spans or [(columns.left(r) - 2, columns.left(r) + columns.each + 2) for r in range(len(capacity))]
    for (left, right), limit, below in zip(spans, capacity, usable, strict=False):
        y = floor - min(limit * scale, TALLEST + 12)
        band = min(limit * scale, TALLEST + 12) - below * scale
        if band > 0.5:
            hover = f"reserve: {bytes_text(limit - below)}"
            svg.rect(left, y, right - left, band, WARNING, hover, 'fill-opacity=".16"')
        svg.line(left, y, right, y, extra)
    words = f"capacity {bytes_text(capacity[0])}" if same else "capacity"
    words += ", shaded: reserve" if (usable < capacity).any() else ""
    svg.line(MARGIN, key - 4, MARGIN + 26, key - 4, extra)
    svg.text(MARGIN + 34, key, words)


def _used(stacks: Stacks) -> list[str]:
    found: dict[str, None] = {}
    for names, values in stacks.values():
        found.update(dict.fromkeys(name for i, name in enumerate(names) if values[:, i].any()))
    return [name for name in MEMORY if name in found] + [name for name in found if name not in MEMORY]


def _numbers(stacks: Stacks, usable: np.ndarray) -> Numbers:
    used = _used(stacks)
    rows = []
    for rank in range(len(usable)):
        for kind, (names, values) in stacks.items():
            at = {name: values[rank, i] for i, name in enumerate(names)}
            cells = [bytes_text(at[name]) if name in at else "" for name in used]
            rows.append([str(rank), kind, *cells, bytes_text(values[rank].sum()), bytes_text(usable[rank])])
    return Numbers(("rank", "", *(look_of(name, MEMORY).label for name in used), "total", "usable"), rows)


def _plot(stacks: Stacks, usable: np.ndarray, title: str) -> Any:
    import plotly.graph_objects as go

    world_size = len(usable)
    traces: list[Any] = []
    shown: set[str] = set()
    for place, (kind, (names, values)) in enumerate(stacks.items()):
        for i, name in enumerate(names):
            if not values[:, i].any():
                continue
            look = look_of(name, MEMORY)
            traces.append(
                go.Bar(
                    name=look.label,
                    legendgroup=name,
                    showlegend=name not in shown,
                    offsetgroup=place,
                    alignmentgroup="ranks",
                    x=list(range(world_size)),
                    y=[float(v) for v in values[:, i]],
                    base=[float(v) for v in values[:, :i].sum(axis=1)],
                    marker=marker(look),
                    hovertemplate=f"rank %{{x}}, {kind}<br>{look.label}: %{{y:.4s}}B<extra></extra>",
                )
            )
            shown.add(name)
    traces.append(
        go.Scatter(
            name="usable capacity",
            x=list(range(world_size)),
            y=[float(v) for v in usable],
            mode="lines+markers" if world_size > 1 else "markers",
            line={"color": WARNING, "dash": "dash"},
            marker={"symbol": "line-ew-open", "size": 14, "color": WARNING},
            hovertemplate="rank %{x}<br>usable %{y:.4s}B<extra></extra>",
            visible=True if usable.min() <= FAR * stacks["predicted"][1].sum(axis=1).max() else "legendonly",
        )
    )
    ticks = list(range(0, world_size, max(1, world_size // 16)))
    return figure(
        traces,
        title,
        barmode="group",
        xaxis={"tickvals": ticks, "ticktext": [f"rank {rank}" for rank in ticks]},
        yaxis={"title": {"text": "bytes"}, "tickformat": ".3~s", "ticksuffix": "B", "color": MIDDLE_INK},
    )
