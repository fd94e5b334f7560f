"""One change after another: how long a step takes with each, and what each took away.

Bars begin at zero. The hatched end is what the change took away, or added; a diamond is what somebody else published.
Whether the milliseconds were measured or simulated is written over them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from recshard_lab.lab.draw.plots import figure, marker
from recshard_lab.lab.draw.rank_columns import MARGIN
from recshard_lab.lab.draw.svg import Svg, fit, text_width
from recshard_lab.lab.draw.theme import LABEL_INK, Look, as_sentence, ms_text, number, ticks
from recshard_lab.lab.draw.view import View, message_view
from recshard_lab.lab.views.registry import register_view
from recshard_lab.text_table import TextTable

LOOKS = {True: Look("simulated step", "#9cc4ee", "dots"), False: Look("measured step", "#9ad6ae", "plain")}
SAVED, ADDED = Look("taken away", "#eceff3", "falling"), Look("added", "#f0a9b8", "cross")
THICK, GAP, MOST = 22.0, 12.0, 40


@register_view("Change by change", place=95)
def waterfall(
    changes: Mapping[str, float],
    *,
    simulated: bool = False,
    published: Mapping[str, float] | None = None,
    note: str = "",
    width: int = 860,
) -> View:
    """A step with one more change in each line.

    Args:
        changes: what was changed -> ms of a step with it and all before it; the first is where it began.
        simulated: nobody measured them, which the title then says.
        published: some of the same changes -> ms that somebody else published.
        note: a sentence under the picture.
        width: of the static picture, in pixels.
    """
    if not changes:
        return message_view("waterfall", "Change by change", "There is no step to show: changes is empty.")
    wrong = [name for name, ms in changes.items() if not (math.isfinite(ms) and ms >= 0)]
    if wrong:
        words = f"The step with {wrong[0]!r} takes {changes[wrong[0]]} ms, which is no length of time."
        return message_view("waterfall", "Change by change", words)
    others = {name: ms for name, ms in (published or {}).items() if name in changes}
    names, times = list(changes), list(changes.values())
    what = "simulated" if simulated else "measured"
    title = f"A step, change by change, {what}: {ms_text(times[0])} to {ms_text(times[-1])}"
    summary = _summary(names, times, others)
    rows = [[names[0], ms_text(times[0]), "", _told(others, names[0])]]
    for (_, before), (name, after) in pairwise(changes.items()):
        rows.append([name, ms_text(after), _apart(before, after), _told(others, name)])
    heads = ["change", f"step, {what}", "than before it", "published"]
    if len(names) > MOST:
        note = f"The first {MOST} of {len(names)} changes. {as_sentence(note)}".strip()
    shown = dict(list(changes.items())[:MOST])

    def draw(uid: str) -> Svg:
        return _draw(shown, others, simulated, title, summary, note, width, uid)

    def plot() -> Any:
        return _plot(changes, others, simulated, title)

    return View("waterfall", title, summary, TextTable(heads, rows), draw, plot)


def _told(others: Mapping[str, float], name: str) -> str:
    return ms_text(others[name]) if name in others else ""


def _apart(before: float, after: float) -> str:
    if before == after:
        return "the same"
    return f"{ms_text(abs(before - after))} {'less' if after < before else 'more'}"


def _summary(names: list[str], times: list[float], others: Mapping[str, float]) -> str:
    words = []
    if len(times) > 1 and times[-1] > 0:
        words.append(f"All together: {number(times[0] / times[-1])} times as fast.")
        best = max(range(1, len(times)), key=lambda i: times[i - 1] - times[i])
        words.append(f"Most came from {names[best]}: {_apart(times[best - 1], times[best])}.")
    if names[0] in others and names[-1] in others and others[names[-1]] > 0:
        first, last = others[names[0]], others[names[-1]]
        words.append(f"Published: {ms_text(first)} to {ms_text(last)}, {number(first / last)} times.")
    return " ".join(words) or f"{names[0]}: {ms_text(times[0])}."


def _draw(
    changes: Mapping[str, float],
    others: Mapping[str, float],
    simulated: bool,
    title: str,
    summary: str,
    note: str,
    width: int,
    uid: str,
) -> Svg:
    svg = Svg(width, 0, title, summary, uid)
    top = y = svg.head(title, summary, MARGIN) + 14
    left = MARGIN + min(240.0, max(text_width(name, 11) for name in changes)) + 10
    longest = max([*changes.values(), *others.values()]) or 1.0
    scale = (width - left - MARGIN - 60) / longest
    bottom = top + len(changes) * (THICK + GAP)
    for tick in ticks(0.0, longest):
        svg.line(left + tick * scale, top - 4, left + tick * scale, bottom - 4, 'stroke-opacity=".15"')
        words = "0" if not tick else ms_text(tick)
        svg.text(left + tick * scale, bottom + 10, words, anchor="middle", size=10, soft=True)
    svg.line(left, bottom - 4, width - MARGIN, bottom - 4, 'stroke-opacity=".6"')
    edge = f'stroke="{LABEL_INK}" stroke-width=".5"'
    before, used = None, [LOOKS[simulated]]
    for name, ms in changes.items():
        svg.text(left - 10, y + THICK / 2 + 4, fit([name], left - MARGIN - 10, 11), anchor="end")
        inside = min(ms, ms if before is None else before) * scale
        svg.rect(left, y, inside, THICK, svg.fill(LOOKS[simulated]), f"{name}: {ms_text(ms)}", edge)
        if before is not None and before != ms:
            look = SAVED if ms < before else ADDED
            used.append(look)
            low, high = sorted((before, ms))
            svg.rect(left + low * scale, y, (high - low) * scale, THICK, svg.fill(look),
                     f"{name}: {_apart(before, ms)}", edge)  # fmt: skip
        halo = f'stroke="{LOOKS[simulated].fill}" stroke-width="3" paint-order="stroke"'
        if inside > 60:
            svg.text(left + inside - 6, y + THICK / 2 + 4, ms_text(ms), anchor="end", ink=LABEL_INK, extra=halo)
        else:
            svg.text(left + max(ms, before or ms) * scale + 6, y + THICK / 2 + 4, ms_text(ms))
        if name in others:
            x, middle = left + others[name] * scale, y + THICK / 2
            svg.path(f"M{x:.1f} {middle - 7:.1f}l7 7l-7 7l-7 -7z", 'fill="currentColor"', f"published: {others[name]}")
            words = f"{ms_text(others[name])} published"
            fits = x + 12 + text_width(words, 10) < width - 4
            svg.text(x + 12 if fits else x - 12, middle + 4, words, size=10, anchor="start" if fits else "end")
        before = ms
        y += THICK + GAP
    end = svg.legend(left, bottom + 20, [(look, look.label) for look in dict.fromkeys(used)], width - left - MARGIN)
    if note:
        svg.text(MARGIN, end + 9, note, soft=True)
    svg.height = end + (18 if note else 2)
    return svg


def _plot(changes: Mapping[str, float], others: Mapping[str, float], simulated: bool, title: str) -> Any:
    import plotly.graph_objects as go

    names, look = list(changes), LOOKS[simulated]
    hover = "%{y}: %{x:.4g} ms<extra></extra>"
    traces = [
        go.Bar(
            name=look.label,
            orientation="h",
            y=names,
            x=list(changes.values()),
            marker=marker(look),
            hovertemplate=hover,
        )
    ]
    if others:
        spot = {"symbol": "diamond", "size": 12, "color": "#7a828c"}
        traces.append(
            go.Scatter(
                name="published", mode="markers", y=list(others), x=list(others.values()), marker=spot,
                hovertemplate=hover,
            )
        )  # fmt: skip
    return figure(
        traces,
        title,
        height=150 + 34 * len(names),
        yaxis={"categoryorder": "array", "categoryarray": names[::-1], "showgrid": False, "automargin": True},
        xaxis={"title": {"text": "ms a step"}, "showgrid": True, "gridcolor": "rgba(128,136,146,.25)"},
    )
