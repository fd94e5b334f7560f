"""Change by change: the time of a step with each change, and what each change removed or added.

Bars begin at zero. The hatched end is what the change removed or added. A diamond is a published time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise

from recshard_lab.lab.charts import spec
from recshard_lab.lab.draw.theme import Look, as_sentence, ms_text, number
from recshard_lab.lab.draw.view import View, message_view
from recshard_lab.lab.views.registry import register_view
from recshard_lab.text_table import TextTable

LOOKS = {True: Look("simulated step", "#9cc4ee", "dots"), False: Look("measured step", "#9ad6ae", "plain")}
SAVED, ADDED = Look("removed by the change", "#eceff3", "falling"), Look("added by the change", "#f0a9b8", "cross")
PITCH, MOST = 34.0, 40  # pixels of a bar, bars


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
        changes: name of a change -> ms of a step with it and all before it. The first is the start.
        simulated: whether they were simulated, which the title then says.
        published: some of the same changes -> published ms.
        note: a sentence under the picture.
        width: of the static picture, in pixels.
    """
    if not changes:
        return message_view("waterfall", "Change by change", "No step to show: changes is empty.")
    wrong = [name for name, ms in changes.items() if not (math.isfinite(ms) and ms >= 0)]
    if wrong:
        words = f"The step with {wrong[0]!r} takes {changes[wrong[0]]} ms, which is not a time."
        return message_view("waterfall", "Change by change", words)
    others = {name: ms for name, ms in (published or {}).items() if name in changes}
    names, times = list(changes), list(changes.values())
    what = "simulated" if simulated else "measured"
    title = f"A step, change by change, {what}: {ms_text(times[0])} to {ms_text(times[-1])}"
    summary = _summary(names, times, others)
    rows = [[names[0], ms_text(times[0]), "", _published(others, names[0])]]
    for (_, before), (name, after) in pairwise(changes.items()):
        rows.append([name, ms_text(after), _apart(before, after), _published(others, name)])
    heads = ["change", f"step, {what}", "than before it", "published"]
    if len(names) > MOST:
        note = f"The first {MOST} of {len(names)} changes. {as_sentence(note)}".strip()
    shown = dict(list(changes.items())[:MOST])

    chart = spec.Chart(title, summary, ((_panel(shown, others, simulated, width),),), note)
    return View.of_chart("waterfall", chart, TextTable(heads, rows), width)


def _published(others: Mapping[str, float], name: str) -> str:
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


def _panel(changes: Mapping[str, float], others: Mapping[str, float], simulated: bool, width: int) -> spec.Panel:
    names, times, look = list(changes), [float(ms) for ms in changes.values()], LOOKS[simulated]
    steps = list(zip(names, [times[0], *times[:-1]], times, strict=True))
    inside = [
        (i, 0.0, min(before, ms), f"{name}: {ms_text(ms)}", ms_text(ms)) for i, (name, before, ms) in enumerate(steps)
    ]
    marks = spec.bars(look.label, look, inside, width=0.66, across=True)
    for other, sign in ((SAVED, 1), (ADDED, -1)):
        rows = [
            (i, min(before, ms), max(before, ms), f"{name}: {_apart(before, ms)}", "")
            for i, (name, before, ms) in enumerate(steps)
            if sign * (before - ms) > 0
        ]
        marks += spec.bars(other.label, other, rows, width=0.66, across=True)
    shown = {name: ms for name, ms in others.items() if name in changes}
    published = [
        (ms, names.index(name), f"{name}: {ms_text(ms)} published", f"{ms_text(ms)} published")
        for name, ms in shown.items()
    ]
    marks += spec.points("published", published, symbol="diamond", size=7.0)
    high = spec.room_for(
        [(ms, " " * 16 if shown else "") for ms in (*times, *shown.values())], 0.7 * width, inside=False
    )
    axis = spec.Axis("linear", 0.0, 1.03 * high, "ms per step", "ms")
    return spec.Panel(axis, spec.categories(names), tuple(marks), height=PITCH * len(names))
