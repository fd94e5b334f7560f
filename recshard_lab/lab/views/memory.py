"""Memory: one stack of bytes by category for each rank, against its capacity.

Up to three stacks stand side by side for each rank:

    predicted  what the planner computes for the plan
    counted    the sizes of the tables and buffers that the ranks allocated
    measured   the peak in one step: the CUDA allocator's figure, on CPU all tensors that live

If a plan stores rows in host memory, a second picture below shows it with its own capacity. Ranks on CPU share the
host's memory. The reserve is a band below the capacity: a plan fits if its stack ends under the band.
"""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import Any

import numpy as np

from recshard_lab.lab.draw.plots import figure, marker, up_to
from recshard_lab.lab.draw.rank_columns import MARGIN, Columns, nodes_of
from recshard_lab.lab.draw.svg import Svg, fit
from recshard_lab.lab.draw.theme import LABEL_INK, MEMORY, MIDDLE_INK, WARNING, bytes_text, bytes_unit, look_of, number
from recshard_lab.lab.draw.view import View, message_view
from recshard_lab.lab.views.memory_tiers import Stacks, Tier, host_memory, own_memory, problem_of, words_on_sharing
from recshard_lab.lab.views.registry import register_view
from recshard_lab.planner.answers.text import ranks_word
from recshard_lab.text_table import TextTable

TALLEST = 210.0
FAR = 2.5  # a capacity beyond this many times the largest stack is written instead of drawn


@register_view("Memory", place=2)
def memory(
    estimate: Any,
    measured: Any = None,
    *,
    topology: Any = None,
    note: str = "",
    width: int = 860,
    extent: float = 0.0,
) -> View:
    """Bytes per rank and category against the capacity, in the ranks' own memory and in the host's.

    Args:
        estimate: has ``memory_categories`` (C names), ``memory_bytes`` ``[W, C]``, ``capacity_bytes`` and
            ``usable_bytes`` ``[W]``; where the plan keeps rows in the host's memory also ``host_bytes`` and
            ``host_weight_bytes`` ``[W]``, and ``host_room_bytes``.
        measured: what ranks reported, ranks in the same order: ``memory_categories``, ``memory_bytes`` ``[W, C]`` and
            ``host_memory_bytes`` ``[W, 2]`` for the stack "counted"; ``in_use``, one `RankMemory` per rank, for the
            stack "measured". Both ``host_memory_bytes`` and ``in_use`` may be missing.
        topology: for the names of the memories, and for the ranks of each node.
        note: a sentence under the picture.
        width: of the static picture, in pixels.
        extent: bytes of the stack that fills the picture, where several are to one scale; 0 for its own tallest.
    """
    tiers = [own_memory(estimate, measured, topology)]
    if tiers[0].stacks["predicted"][1].size == 0:
        return message_view("memory", "Memory", "The estimate has no ranks or no bytes.")
    host = host_memory(estimate, measured)
    tiers += [host] if host is not None else []
    for tier in tiers:
        if problem := problem_of(tier):
            return message_view("memory", "Memory", problem)
    title = f"Memory per rank, {' | '.join(tiers[0].stacks)}"
    summary = _summary(tiers)
    notes = [words for words in (words_on_sharing(topology), note) if words]
    nodes = nodes_of(len(tiers[0].capacity), getattr(topology, "local_world_size", None))

    def draw(uid: str) -> Svg:
        return _draw(tiers, title, summary, notes, nodes, width, max(most, extent), uid)

    def plot() -> Any:
        return _plot(tiers, title, max(most, extent))

    most = max(float(values.sum(axis=1).max()) for _, values in tiers[0].stacks.values())
    return View("memory", title, summary, _numbers(tiers), draw, plot, extent=most)


def _summary(tiers: list[Tier]) -> str:
    """Fits or not, and by how much on the rank where it is tightest."""
    told = [_told(tier, f" in {tier.name}" if len(tiers) > 1 else "") for tier in tiers]
    return " ".join(sorted(told, key=lambda words: not words.startswith("Does not fit")))


def _told(tier: Tier, where: str) -> str:
    used, capacity, usable = tier.stacks["predicted"][1].sum(axis=1), tier.capacity, tier.usable
    over = np.flatnonzero(used > usable)
    tight = int(np.argmax(used - usable)) if len(over) else int(np.argmax(used / np.maximum(usable, 1)))
    reserve = capacity[tight] - usable[tight]
    limit = f"{bytes_text(usable[tight])} usable"
    if reserve > 0:
        limit = f"{limit} of {bytes_text(capacity[tight])} ({number(100 * reserve / capacity[tight], 2)}% reserve)"
    if len(over):
        others = f"; {ranks_word(over.tolist())} need more than they have" if len(over) > 1 else ""
        return f"Does not fit: rank {tight} needs {bytes_text(used[tight])}{where}, it has {limit}{others}."
    share = number(100 * used[tight] / max(usable[tight], 1), 2)
    return f"Fits. Fullest{where}: rank {tight}, {bytes_text(used[tight])}, {share}% of {limit}."


def _draw(
    tiers: list[Tier],
    title: str,
    summary: str,
    notes: list[str],
    nodes: list[tuple[int, int, str]],
    width: int,
    most: float,
    uid: str,
) -> Svg:
    svg = Svg(width, 0, title, summary, uid)
    y = svg.head(title, summary, MARGIN, warn=summary.startswith("Does not fit"))
    for place, tier in enumerate(tiers):
        largest = max(float(values.sum(axis=1).max()) for _, values in tier.stacks.values())
        y = _panel(svg, tier, nodes, y, width, (most if place == 0 else largest) or 1.0, 1.0 if place == 0 else 0.55)
    used = _used([tier.stacks for tier in tiers])
    end = svg.legend(MARGIN, y, [(look_of(n, MEMORY), look_of(n, MEMORY).label) for n in used], width - 2 * MARGIN)
    for line in (part for words in notes for part in wrap(words, int((width - 2 * MARGIN) / 6.1))):
        svg.text(MARGIN, end + 9, line, soft=True)
        end += 15
    svg.height = end + (3 if notes else 2)
    return svg


def _panel(
    svg: Svg, tier: Tier, nodes: list[tuple[int, int, str]], y: float, width: int, most: float, height: float
) -> float:
    """The stacks of one memory; returns the y below them."""
    stacks, capacity, usable, tallest = tier.stacks, tier.capacity, tier.usable, TALLEST * height
    columns = Columns(len(capacity), width)
    lowest = float(capacity.min())
    drawn = 0 < lowest <= FAR * most
    scale = tallest / max(most, min(float(capacity.max()), FAR * most) if drawn else 0)
    key = y + (36 if tier.name else 16)
    if tier.name:
        svg.text(MARGIN, y + 18, tier.name[0].upper() + tier.name[1:], bold=True)
    floor = key + 26 + tallest + (22 if nodes else 0)
    columns.frame(svg, key + 22, nodes)
    each = columns.each / len(stacks) - (2 if len(stacks) > 1 and columns.legible else 0)
    for place, (kind, (names, values)) in enumerate(stacks.items()):
        if len(capacity) > 32:
            _skyline(svg, columns, names, values, scale, floor, place, each, kind)
            continue
        for rank, row in enumerate(values):
            left = columns.left(rank) + place * (columns.each / len(stacks))
            _column(svg, names, row, left, each, floor, scale, f"rank {rank}, {kind}")
            if columns.legible:
                whole = bytes_text(row.sum())
                size = 10.5 if each >= 30 else 8.5
                words = fit([whole, whole.replace(" ", ""), _short(row.sum())], each + 2, size)
                words = "" if words.endswith("…") else words
                top = floor - row.sum() * scale - 5
                svg.text(left + each / 2, top, words, anchor="middle", size=size, bold=row.sum() > usable[rank])
    svg.line(MARGIN - 4, floor + 0.5, columns.right + 4, floor + 0.5, 'stroke-opacity=".6"')
    if drawn:
        _capacity_lines(svg, columns, (capacity, usable), floor, scale, key, tallest)
    elif lowest > 0:
        words = f"↑ capacity {bytes_text(lowest)}, {number(lowest / most, 2)} times the tallest column"
        svg.text(MARGIN, key, words, soft=True)
    columns.label_ranks(svg, floor + 15)
    below = floor + 26 + (14 if columns.each < 44 else 0)
    if len(stacks) > 1 and columns.each >= 45 * len(stacks):
        for rank in range(len(capacity)):
            for place, kind in enumerate(stacks):
                middle = columns.left(rank) + place * columns.each / len(stacks) + each / 2
                svg.text(middle, floor + 29, kind, anchor="middle", size=10, soft=True)
        below += 14
    return below


def _short(value: float) -> str:
    """Bytes where there is little room: ``9.5G``."""
    size, unit = bytes_unit(value)
    return f"{number(value / size, 2)}{unit[0]}"


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
    svg: Svg,
    columns: Columns,
    limits: tuple[np.ndarray, np.ndarray],
    floor: float,
    scale: float,
    key: float,
    tallest: float,
) -> None:
    """Each rank's capacity as a dashed line with its reserve hanging below; one label where all are equal."""
    capacity, usable = limits
    extra = f'stroke-width="1.6" stroke-dasharray="6 3" style="stroke:{WARNING}"'
    same = capacity.max() == capacity.min() and usable.max() == usable.min()
    spans = [(MARGIN - 4.0, columns.right + 4)] if same else []
    spans = spans or [(columns.left(r) - 2, columns.left(r) + columns.each + 2) for r in range(len(capacity))]
    for (left, right), limit, below in zip(spans, capacity, usable, strict=False):
        y = floor - min(limit * scale, tallest + 12)
        band = min(limit * scale, tallest + 12) - below * scale
        if band > 0.5:
            hover = f"reserve: {bytes_text(limit - below)}"
            svg.rect(left, y, right - left, band, WARNING, hover, 'fill-opacity=".16"')
        svg.line(left, y, right, y, extra)
    words = f"capacity {bytes_text(capacity[0])}" if same else "capacity"
    words += ", shaded: reserve" if (usable < capacity).any() else ""
    svg.line(MARGIN, key - 4, MARGIN + 26, key - 4, extra)
    svg.text(MARGIN + 34, key, words)


def _used(tiers: Sequence[Stacks]) -> list[str]:
    found: dict[str, None] = {}
    for names, values in (stack for stacks in tiers for stack in stacks.values()):
        found.update(dict.fromkeys(name for i, name in enumerate(names) if values[:, i].any()))
    return [name for name in MEMORY if name in found] + [name for name in found if name not in MEMORY]


def _numbers(tiers: list[Tier]) -> TextTable:
    used = _used([tier.stacks for tier in tiers])
    named = len(tiers) > 1
    rows = []
    for tier in tiers:
        for rank in range(len(tier.usable)):
            for kind, (names, values) in tier.stacks.items():
                at = {name: values[rank, i] for i, name in enumerate(names)}
                cells = [bytes_text(at[name]) if name in at else "" for name in used]
                cells += [bytes_text(values[rank].sum()), bytes_text(tier.usable[rank])]
                rows.append([*([tier.name] if named else []), str(rank), kind, *cells])
    heads = ("rank", "", *(look_of(name, MEMORY).label for name in used), "total", "usable")
    return TextTable(("memory", *heads) if named else heads, rows)


def _plot(tiers: list[Tier], title: str, most: float) -> Any:
    """Grouped stacks. A second memory has separate axes below.

    Args:
        most: bytes at the top of the first axis, unless the usable capacity is near.
    """
    world_size = len(tiers[0].usable)
    ticks = list(range(0, world_size, max(1, world_size // 16)))
    ranks = {"tickvals": ticks, "ticktext": [f"rank {rank}" for rank in ticks]}
    size = {"tickformat": ".3~s", "ticksuffix": "B", "color": MIDDLE_INK}
    axes: dict[str, Any] = {
        "xaxis": ranks,
        "yaxis": {**up_to(_top(tiers[0], most)), "title": {"text": tiers[0].name or "bytes"}, **size},
    }
    shown: set[str] = set()
    traces = _traces(tiers[0], "", shown, most)
    if len(tiers) > 1:
        axes["yaxis"]["domain"] = [0.48, 1]
        axes["xaxis"] = {**ranks, "anchor": "y"}
        axes["xaxis2"] = {**ranks, "anchor": "y2", "linecolor": MIDDLE_INK, "showgrid": False}
        axes["yaxis2"] = {"domain": [0, 0.34], "title": {"text": tiers[1].name}, "showgrid": False, **size}
        traces += _traces(tiers[1], "2", shown, 0.0)
    return figure(traces, title, barmode="group", height=380 if len(tiers) == 1 else 560, **axes)


def _top(tier: Tier, most: float) -> float:
    """Bytes that the axis must show: the stacks, and the usable capacity where it is near."""
    usable = float(tier.usable.max())
    return max(most, usable) if tier.usable.min() <= FAR * most else most


def _traces(tier: Tier, axis: str, shown: set[str], most: float) -> list[Any]:
    import plotly.graph_objects as go

    ranks = list(range(len(tier.usable)))
    on = {"xaxis": f"x{axis}", "yaxis": f"y{axis}"}
    traces: list[Any] = []
    for place, (kind, (names, values)) in enumerate(tier.stacks.items()):
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
                    x=ranks,
                    y=[float(v) for v in values[:, i]],
                    base=[float(v) for v in values[:, :i].sum(axis=1)],
                    marker=marker(look),
                    hovertemplate=f"rank %{{x}}, {kind}<br>{look.label}: %{{y:.4s}}B<extra></extra>",
                    **on,
                )
            )
            shown.add(name)
    near = tier.usable.min() <= FAR * max(tier.stacks["predicted"][1].sum(axis=1).max(), most)
    traces.append(
        go.Scatter(
            name="usable capacity",
            legendgroup="usable",
            showlegend="usable" not in shown,
            x=ranks,
            y=[float(v) for v in tier.usable],
            mode="lines+markers" if len(ranks) > 1 else "markers",
            line={"color": WARNING, "dash": "dash"},
            marker={"symbol": "line-ew-open", "size": 14, "color": WARNING},
            hovertemplate="rank %{x}<br>usable %{y:.4s}B<extra></extra>",
            visible=True if near else "legendonly",
            **on,
        )
    )
    shown.add("usable")
    return traces
