"""Number formats: bytes of the tables, change of the score and time of a call, side by side."""

from __future__ import annotations

import math
from dataclasses import dataclass

from recshard_lab.lab.charts import spec
from recshard_lab.lab.compare.formats import FormatComparison
from recshard_lab.lab.draw.theme import MISSING, Look, bytes_text, ms_text
from recshard_lab.lab.draw.view import View, message_view
from recshard_lab.lab.views.registry import register_view

TITLE = "Number formats of served tables"
STACKED = 520  # pixels below which the quantities are below each other


@dataclass(frozen=True)
class _Panel:
    """One quantity: its heading, look, unit, and a number and a text for each result. None if it is not known."""

    heading: str
    look: Look
    unit: spec.Unit
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

    names = [one.name for one in formats.results]
    row = tuple(_drawn(names, panel, width, len(panels)) for panel in panels)
    rows = (row,) if width >= STACKED else tuple((panel,) for panel in row)
    return View.of_chart("number_formats", spec.Chart(TITLE, summary, rows, note), formats.table, width)


def _panels(formats: FormatComparison) -> list[_Panel]:
    results, first = formats.results, formats.results[0]
    sizes = [float(one.table_bytes) for one in results]
    found = [
        _Panel(
            "bytes of the tables",
            Look("bytes", "#9cc4ee", "plain"),
            "bytes",
            _known(sizes),
            [bytes_text(x) for x in sizes],
        )
    ]
    if first.score is not None:
        changes = [math.nan if one.score is None else one.score - first.score for one in results]
        texts = [f"{first.score:.4f}", *(_change(x) for x in changes[1:])]
        found.append(
            _Panel(f"change of {formats.score_name}", Look("change", "#f6bd83", "rising"), "", _known(changes), texts)
        )
    times = [one.ms for one in results]
    found.append(
        _Panel("time of a call", Look("time", "#9ad6ae", "rows"), "ms", _known(times), [ms_text(x) for x in times])
    )
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
    words = f"{smallest.name} has {share:.0%} of the bytes of {first.name}." if math.isfinite(share) else ""
    fast = [one for one in others if math.isfinite(one.ms) and one.ms > 0]
    if fast and math.isfinite(first.ms):
        quickest = min(fast, key=lambda one: one.ms)
        words += f" A call with {quickest.name} takes {quickest.ms / first.ms:.0%} of the time." if first.ms > 0 else ""
    if first.score is not None:
        lost = [one for one in others if one.score is not None and math.isfinite(one.score - first.score)]
        if lost:
            worst = max(lost, key=lambda one: abs(one.score - first.score))  # type: ignore[operator]
            change = worst.score - first.score  # type: ignore[operator]
            words += f" The largest change of {formats.score_name} is {change:+.5f} ({worst.name})."
    return f"Measured, median of {formats.rounds} calls each.{' ' if words else ''}{words.strip()}"


def _drawn(names: list[str], panel: _Panel, width: int, count: int) -> spec.Panel:
    on = [i for i, value in enumerate(panel.values) if value is not None]
    values = [float(panel.values[i] or 0.0) for i in on]
    pixels = (width - 110) / count - 24
    high = spec.room_for(
        [(max(0.0, value), panel.texts[i]) for i, value in zip(on, values, strict=True)], pixels, inside=False
    )
    low = min([0.0, *values])
    high = max(high, -0.9 * low) if low < 0 else high
    rows = [
        (i, min(0.0, value), max(0.0, value), f"{names[i]}\n{panel.heading}: {panel.texts[i]}", panel.texts[i])
        for i, value in zip(on, values, strict=True)
    ]
    bars = spec.bars(panel.look.label, panel.look, rows, label="end", width=0.66, across=True, legend=False)
    missing = [spec.Text(0.02 * high, float(i), panel.texts[i], "start") for i in range(len(names)) if i not in on]
    zero = [spec.Rule(x=0.0, dash="1 0")] if low < 0 else []
    axis = spec.Axis("linear", 1.06 * low, high, "", panel.unit)
    return spec.Panel(axis, spec.categories(names), (*bars, *missing, *zero), panel.heading, 26.0 * len(names))
