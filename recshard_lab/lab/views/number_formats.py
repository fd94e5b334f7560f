"""Number formats: bytes of the tables, change of the score and time of a call, side by side."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from recshard_lab.lab.compare.formats import FormatComparison, FormatResult
from recshard_lab.lab.draw.plots import figure, marker
from recshard_lab.lab.draw.rank_columns import MARGIN
from recshard_lab.lab.draw.svg import Svg, fit
from recshard_lab.lab.draw.theme import LABEL_INK, MISSING, Look, bytes_text, ms_text
from recshard_lab.lab.draw.view import View, message_view
from recshard_lab.lab.views.registry import register_view

TITLE = "Number formats of served tables"
_BAR, _ROW, _GAP, _NAME = 15.0, 23.0, 22.0, 62.0
_EDGE = f'stroke="{LABEL_INK}" stroke-width=".5"'


@dataclass(frozen=True)
class _Panel:
    """One quantity: its heading, look, and a number and a text for each result. None if it is not known."""

    heading: str
    look: Look
    values: list[float | None]
    texts: list[str]


@register_view(TITLE, place=97)
def number_formats(formats: FormatComparison, *, note: str = "", width: int = 640) -> View:
    """Bars of the bytes of the tables, the change of the score and the time of a call, for each number format.

    Args:
        formats: what `compare_formats` returned.
        note: a sentence under the picture.
        width: of the static picture, in pixels.
    """
    results = formats.results
    if len(results) < 2:
        return message_view("number_formats", TITLE, "The comparison has no number format beside the trained model.")
    panels = _panels(formats)
    summary = _summary(formats)

    def draw(uid: str) -> Svg:
        return _draw(results, panels, summary, note, width, uid)

    def plot() -> Any:
        return _plot(results, panels)

    return View("number_formats", TITLE, summary, formats.table, draw, plot)


def _panels(formats: FormatComparison) -> list[_Panel]:
    results, first = formats.results, formats.results[0]
    sizes = [float(one.table_bytes) for one in results]
    found = [
        _Panel("bytes of the tables", Look("bytes", "#9cc4ee", "plain"), _known(sizes), [bytes_text(x) for x in sizes])
    ]
    if first.score is not None:
        changes = [math.nan if one.score is None else one.score - first.score for one in results]
        texts = [f"{first.score:.4f}", *(_change(x) for x in changes[1:])]
        found.append(
            _Panel(f"change of {formats.score_name}", Look("change", "#f6bd83", "rising"), _known(changes), texts)
        )
    times = [one.ms for one in results]
    found.append(_Panel("time of a call", Look("time", "#9ad6ae", "rows"), _known(times), [ms_text(x) for x in times]))
    return found


def _change(value: float) -> str:
    if not math.isfinite(value):
        return MISSING
    return f"{value:+.5f}" if abs(value) >= 5e-6 else "0.00000"


def _known(values: list[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]


def _summary(formats: FormatComparison) -> str:
    first, *others = formats.results
    smallest = min(others, key=lambda one: one.table_bytes)
    share = smallest.table_bytes / first.table_bytes if first.table_bytes else math.nan
    told = f"{smallest.name} has {share:.0%} of the bytes of {first.name}." if math.isfinite(share) else ""
    fast = [one for one in others if math.isfinite(one.ms) and one.ms > 0]
    if fast and math.isfinite(first.ms):
        quickest = min(fast, key=lambda one: one.ms)
        told += f" A call with {quickest.name} takes {quickest.ms / first.ms:.0%} of the time." if first.ms > 0 else ""
    if first.score is not None:
        lost = [one for one in others if one.score is not None and math.isfinite(one.score - first.score)]
        if lost:
            worst = max(lost, key=lambda one: abs(one.score - first.score))  # type: ignore[operator]
            change = worst.score - first.score  # type: ignore[operator]
            told += f" The largest change of {formats.score_name} is {change:+.5f} ({worst.name})."
    return f"Measured, median of {formats.rounds} calls each.{' ' if told else ''}{told.strip()}"


def _draw(
    results: tuple[FormatResult, ...], panels: list[_Panel], summary: str, note: str, width: int, uid: str
) -> Svg:
    svg = Svg(width, 0, TITLE, summary, uid)
    top = svg.head(TITLE, summary, MARGIN) + 16
    room = (width - 2 * MARGIN - _NAME - _GAP * (len(panels) - 1)) / len(panels)
    for number, one in enumerate(results):
        svg.text(MARGIN, top + 30 + number * _ROW, fit([one.name], _NAME - 6, 11), bold=True)
    for at, panel in enumerate(panels):
        left = MARGIN + _NAME + at * (room + _GAP)
        svg.text(left, top + 8, fit([panel.heading], room, 11), bold=True)
        _bars(svg, panel, left, top + 18, room)
    y = top + 22 + len(results) * _ROW
    if note:
        y += 14
        svg.text(MARGIN, y, fit([note], width - 2 * MARGIN, 11), soft=True)
    svg.height = y + 10
    return svg


def _bars(svg: Svg, panel: _Panel, left: float, top: float, room: float) -> None:
    """Bars from zero; negative ones to the left of it. The text is behind the bar, or beside the axis."""
    words = 62.0
    low = min(0.0, *(value for value in panel.values if value is not None), 0.0)
    high = max(0.0, *(value for value in panel.values if value is not None), 0.0)
    scale = max(room - words, 10.0) / ((high - low) or 1.0)
    zero = left - low * scale
    svg.line(zero, top, zero, top + _ROW * len(panel.values) - 4, 'stroke-opacity=".6"')
    for number, (value, text) in enumerate(zip(panel.values, panel.texts, strict=True)):
        y = top + number * _ROW
        size = 0.0 if value is None else value
        start, end = sorted((zero, zero + size * scale))
        if end > start:
            svg.rect(start, y, end - start, _BAR, svg.fill(panel.look), f"{panel.heading}: {text}", _EDGE)
        svg.text(max(end, zero) + 5, y + 11.5, text)


def _plot(results: tuple[FormatResult, ...], panels: list[_Panel]) -> Any:
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    names = [one.name for one in results]
    made = make_subplots(1, len(panels), shared_yaxes=True, subplot_titles=[panel.heading for panel in panels])
    plain = figure([], TITLE, height=140 + 34 * len(results))
    made.update_layout(plain.layout)
    for column, panel in enumerate(panels, start=1):
        bars = go.Bar(
            x=panel.values,
            y=names,
            orientation="h",
            text=panel.texts,
            hovertemplate="%{y}: %{text}<extra></extra>",
            marker=marker(panel.look),
            name=panel.heading,
            showlegend=False,
        )
        made.add_trace(bars, row=1, col=column)
    made.update_yaxes(autorange="reversed")
    return made
