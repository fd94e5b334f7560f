"""Memory over time: bytes by category during one step of a rank, where the peak is, and what it consists of."""

from __future__ import annotations

import numpy as np

from recshard_lab.lab.draw.rank_columns import MARGIN
from recshard_lab.lab.draw.svg import Svg, fit
from recshard_lab.lab.draw.theme import (
    LABEL_INK,
    MEMORY,
    WARNING,
    bytes_text,
    bytes_unit,
    look_of,
    ms_text,
    number,
    ticks,
    with_notes,
)
from recshard_lab.lab.draw.view import View, message_view
from recshard_lab.lab.live.memory_history import MemoryHistory
from recshard_lab.lab.views.registry import register_view
from recshard_lab.text_table import TextTable

LEFT, HEIGHT, MOST_POINTS = 62.0, 210.0, 300
_SOURCES = {
    "counted": "Counted: the tensors that operators allocate on CPU, and the model's own.",
    "allocator": "From the history of torch's CUDA allocator.",
}


@register_view("Memory over time", place=21)
def memory_over_time(memory_history: MemoryHistory, *, note: str = "", width: int = 860) -> View:
    """Device memory of one rank during a step, by category, with its peak.

    Args:
        memory_history: of one rank, as `lab.record_memory` returns it.
        note: a sentence under the summary.
        width: of the picture, in pixels.
    """
    history, title = memory_history, f"Memory over time, rank {memory_history.rank}"
    if not len(history.ms) or not history.total.any():
        return message_view("memory_over_time", title, "No byte was recorded during the step.")
    peak_ms, peak = history.peak
    start = int(history.total[0])
    summary = f"Peak {bytes_text(peak)} at {ms_text(peak_ms)}: {bytes_text(start)} before the step and "
    summary += f"{bytes_text(peak - start)} more."
    if history.capacity:
        share = f"{number(100 * peak / history.capacity, 2)}% of {bytes_text(history.capacity)}"
        summary += f" That is {share}." if peak <= history.capacity else f" It exceeds {bytes_text(history.capacity)}."
    summary = with_notes(summary, [_SOURCES.get(history.source, "").removesuffix("."), note.removesuffix(".")])
    numbers = TextTable(
        ("category", "at the start", "at the peak", "at the end"),
        [
            [look_of(name, MEMORY).label, *(bytes_text(int(values[n])) for n in (0, history.peak_index, -1))]
            for name, values in history.size.items()
        ],
    )
    return View(
        "memory_over_time",
        title,
        summary,
        numbers,
        lambda uid: _draw(history, title, summary, width, uid),
    )


def _points(history: MemoryHistory) -> np.ndarray:
    """Indices of the points that are drawn: of each span of time the fullest, and both ends."""
    count = len(history.ms)
    if count <= MOST_POINTS:
        return np.arange(count)
    spans = np.array_split(np.arange(count), MOST_POINTS)
    fullest = [span[int(np.argmax(history.total[span]))] for span in spans]
    return np.unique([0, *fullest, count - 1])


def _draw(history: MemoryHistory, title: str, summary: str, width: int, uid: str) -> Svg:
    svg = Svg(width, 0, title, summary, uid)
    peak_ms, peak = history.peak
    top = svg.head(title, summary, MARGIN, warn=bool(history.capacity and peak > history.capacity)) + 26
    wide = width >= 700
    right = width - MARGIN - (290 if wide else 8)
    end = float(history.ms[-1]) or 1.0
    most = 1.06 * float(history.total.max())
    bottom = top + HEIGHT

    def x_of(ms: float) -> float:
        return LEFT + (right - LEFT) * ms / end

    def y_of(size: float) -> float:
        return bottom - HEIGHT * size / most

    places = _points(history)
    xs = [x_of(float(history.ms[place])) for place in places]
    below = np.zeros(len(places))
    for name, values in history.size.items():
        above = below + values[places]
        if values[places].any():
            upper = _stairs(xs, [y_of(v) for v in above])
            lower = _stairs(xs, [y_of(v) for v in below])[::-1]
            d = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in [*upper, *lower]) + "Z"
            look = look_of(name, MEMORY)
            svg.path(d, f'fill="{svg.fill(look)}" stroke="{LABEL_INK}" stroke-width=".4"', look.label)
        below = above
    unit, unit_name = bytes_unit(most)
    for tick in ticks(0, most / unit):
        y = y_of(tick * unit)
        svg.line(LEFT - 4, y, LEFT, y)
        svg.text(LEFT - 7, y + 4, number(tick), anchor="end", size=10)
    svg.text(MARGIN, top - 12, unit_name, size=10)
    for tick in ticks(0, end):
        svg.line(x_of(tick), bottom, x_of(tick), bottom + 4)
        svg.text(x_of(tick), bottom + 16, number(tick), anchor="middle", size=10)
    svg.text(right, bottom + 30, "ms since the start of the step", anchor="end", size=10)
    svg.path(f"M{LEFT} {top}V{bottom}H{right}", 'fill="none" stroke="currentColor"')
    if history.capacity and history.capacity <= most:
        y = y_of(history.capacity)
        svg.line(LEFT, y, right, y, f'stroke-width="2" stroke-dasharray="6 3" style="stroke:{WARNING}"')
        svg.text(LEFT + 4, y - 4, f"capacity {bytes_text(history.capacity)}", size=10)
    x = x_of(peak_ms)
    svg.line(x, top - 4, x, bottom, 'stroke-dasharray="3 3" stroke-width="1.4"')
    svg.path(f"M{x:.1f} {y_of(peak) - 2:.1f}l-5 -8h10z", 'fill="currentColor"')
    anchor = "start" if x < (LEFT + right) / 2 else "end"
    svg.text(x, top - 12, f"peak {bytes_text(peak)}", anchor=anchor, bold=True)
    left, y = (right + 22, top - 12) if wide else (MARGIN, bottom + 52)
    y = _at_peak(svg, history, left, y, width - MARGIN - left)
    svg.height = max(bottom + 38, y + 4)
    return svg


def _stairs(xs: list[float], ys: list[float]) -> list[tuple[float, float]]:
    """A line that keeps its height until the next point."""
    points: list[tuple[float, float]] = []
    for place, (x, y) in enumerate(zip(xs, ys, strict=True)):
        if place:
            points.append((x, points[-1][1]))
        points.append((x, y))
    return points


def _at_peak(svg: Svg, history: MemoryHistory, x: float, y: float, width: float) -> float:
    """What the peak consists of, and the largest allocations of the step in it."""
    svg.text(x, y, "At the peak", bold=True)
    for name, size in sorted(history.at_peak.items(), key=lambda pair: -pair[1]):
        if size > 0:
            y += 18
            look = look_of(name, MEMORY)
            svg.rect(x, y - 9, 16, 11, svg.fill(look), extra='stroke="currentColor" stroke-opacity=".5"')
            svg.text(x + 22, y, look.label)
            svg.text(x + width, y, bytes_text(size), anchor="end")
    if history.blocks:
        y += 26
        svg.text(x, y, "Largest allocations of the step in it", bold=True)
    for _, size, where in history.blocks:
        y += 16
        svg.text(x, y, fit([where], width - 66, 10), size=10)
        svg.text(x + width, y, bytes_text(size), anchor="end", size=10)
    return y + 8
