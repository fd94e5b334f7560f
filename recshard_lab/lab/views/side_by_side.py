"""Side by side: the step and the memory of every plan of a comparison as bars on one scale, the best marked."""

from __future__ import annotations

from typing import Any

import numpy as np

from recshard_lab.lab.draw.plots import figure, marker
from recshard_lab.lab.draw.rank_columns import MARGIN
from recshard_lab.lab.draw.svg import Svg, fit, text_width
from recshard_lab.lab.draw.theme import (
    LABEL_INK,
    SCHEMES,
    SPARE,
    WARNING,
    Look,
    as_sentence,
    bytes_text,
    look_of,
    ms_text,
    number,
)
from recshard_lab.lab.draw.view import View, message_view
from recshard_lab.lab.views.registry import register_view

TITLE = "Side by side"
MOST = 24  # plans drawn one by one
PLAIN = Look("", "#c9ced6", "plain")
NAMES, BALANCE, PITCH, THICK = 182.0, 92.0, 27.0, 17.0
BEST = " ★ best"
NARROW = 700  # pixels: below, the best has a star alone, which the line under the picture explains


@register_view(TITLE, place=12)
def side_by_side(comparison: Any, *, note: str = "", width: int = 860) -> View:
    """Step and memory of several plans.

    Args:
        comparison: a `PlanComparison`, as `compare_plans` gives it; a plan named after a scheme is drawn in its look.
        note: a sentence under the picture.
        width: of the static picture, in pixels.
    """
    answers, values = comparison.answers, comparison.values
    drawn = {name: values[name] for name in answers if name in values}
    if not drawn:
        words = "; ".join(f"{name}: {shown.problem}" for name, shown in answers.items()) or "There is no plan to show."
        return message_view("side_by_side", TITLE, words)
    for name, each in drawn.items():
        if not all(np.isfinite(value) for value in each.values()):
            return message_view("side_by_side", TITLE, f"The prediction of {name!r} is not a number.")
    first = next(answers[name] for name in drawn)
    counts = ((len(answers), "plan"), (len(comparison.tables), "table"), (first.topology.world_size, "rank"))
    title = "{}, {} on {}".format(*(f"{count:,} {noun}{'s' * (count != 1)}" for count, noun in counts))
    summary = _summary(comparison, drawn)

    def draw(uid: str) -> Svg:
        return _draw(comparison, drawn, title, summary, note, width, uid)

    def plot() -> Any:
        return _plot(comparison, drawn, title)

    return View("side_by_side", title, summary, comparison.numbers, draw, plot)


def _summary(comparison: Any, drawn: dict[str, dict[str, float]]) -> str:
    fit_ones = [name for name in drawn if comparison.answers[name].fits]
    none = [name for name in comparison.answers if name not in fit_ones]
    if not fit_ones:
        return "None of them fits."
    best = min(fit_ones, key=lambda name: drawn[name]["step_ms"])
    worst = max(fit_ones, key=lambda name: drawn[name]["step_ms"])
    words = f"Fastest: {_label(best)}, {ms_text(drawn[best]['step_ms'])} a step"
    if worst != best and drawn[best]["step_ms"] > 0:
        ratio = drawn[worst]["step_ms"] / drawn[best]["step_ms"]
        words += f"; slowest that fits: {_label(worst)}, {number(ratio)} times as long"
    return f"{words}." + (f" Does not fit: {', '.join(map(_label, none))}." if none else "")


def _label(name: str) -> str:
    return look_of(name, SCHEMES).label if name in SCHEMES else name


def _look(name: str) -> Look:
    return look_of(name, SCHEMES) if name in SCHEMES else PLAIN


def _draw(
    comparison: Any, drawn: dict[str, dict[str, float]], title: str, summary: str, note: str, width: int, uid: str
) -> Svg:
    svg = Svg(width, 0, title, summary, uid)
    top = svg.head(title, summary, MARGIN) + 22
    narrow = width < NARROW
    names = 124.0 if narrow else NAMES
    first = MARGIN + names
    room = width - first - MARGIN - BALANCE
    step_wide, left = 0.5 * room - 7, first + 0.5 * room + 7
    usable = max(_usable(comparison.answers[name]) for name in drawn)
    largest = max(max(each["memory_bytes"] for each in drawn.values()), 1.0)
    capped = usable <= 2.5 * largest
    shown_names = [name for name in list(comparison.answers)[:MOST] if name in drawn]
    told = {name: _told(comparison, name, drawn[name], BEST[:2] if narrow else BEST) for name in shown_names}
    steps = [(drawn[name]["step_ms"], told[name][0]) for name in shown_names]
    held = [(drawn[name]["memory_bytes"], told[name][1]) for name in shown_names]
    step_scale, scale = _scale(steps, step_wide), _scale(held, step_wide, usable if capped else 0.0)
    for x, words in ((first, "step, predicted"), (left, "fullest rank")):
        svg.text(x, top - 7, words, soft=True)
    svg.text(width - MARGIN, top - 7, "busiest / mean", soft=True, anchor="end")
    y = top
    for name in list(comparison.answers)[:MOST]:
        svg.text(
            first - 8,
            y + 12.5,
            fit([_label(name), _label(name).split(" (")[0]], names - 8, 11),
            anchor="end",
            bold=name not in SCHEMES,
        )
        shown, best = comparison.answers[name], comparison.best
        if name not in drawn:
            svg.text(first, y + 12.5, "✗ no plan: " + fit([shown.problem], room - 80, 11), soft=True)
            y += PITCH
            continue
        each = drawn[name]
        _bar(svg, name, first, y, each["step_ms"] * step_scale, told[name][0], name in best["step_ms"])
        line = usable * scale if capped else 0.0
        _bar(svg, name, left, y, each["memory_bytes"] * scale, told[name][1], name in best["memory_bytes"], line)
        svg.text(width - MARGIN, y + 12.5, f"{each['imbalance']:.2f} x", anchor="end")
        y += PITCH
    if capped:
        x = left + usable * scale
        svg.line(x, top - 3, x, y - 4, f'stroke-width="1.6" stroke-dasharray="6 3" style="stroke:{WARNING}"')
    words = f"Dashed: {bytes_text(usable)} that a rank can use." if capped else f"A rank can use {bytes_text(usable)}."
    words += " ★: best of its column." if narrow else ""
    words += "" if all(shown.fits for shown in comparison.answers.values()) else " ✗: does not fit."
    if len(comparison.answers) > MOST:
        words += f" {len(comparison.answers) - MOST} more plans are in the numbers."
    svg.text(MARGIN, y + 10, f"{words} {as_sentence(note)}".strip(), soft=True)
    svg.height = y + 20
    return svg


def _told(comparison: Any, name: str, each: dict[str, float], star: str) -> tuple[str, str]:
    """The words at a plan's two bars; `star` marks the best."""
    best = comparison.best
    step = ms_text(each["step_ms"]) + star * (name in best["step_ms"])
    memory = bytes_text(each["memory_bytes"]) + ("" if comparison.answers[name].fits else " ✗")
    return step, memory + star * (name in best["memory_bytes"])


def _needs(words: str) -> float:
    """Pixels that the words of a bar take, with some room around them."""
    return text_width(words, 11) + 8


def _scale(bars: list[tuple[float, str]], room: float, line: float = 0.0) -> float:
    """Pixels of one unit, so that every bar and its words end within the room.

    Args:
        bars: value and words of each bar.
        line: a value at which a line crosses the bars, which is to be seen too; 0 for none.
    """
    scale = room / (max([value for value, _ in bars] + [line]) or 1.0)
    return min([scale, *(least for value, words in bars if (least := _least(value, words, room, scale, line)))])


def _least(value: float, words: str, room: float, scale: float, line: float) -> float:
    """The scale at which a bar's words end within the room; 0 where they do at `scale`."""
    needs = _needs(words)
    if _place(value * scale, words, line * scale) + needs <= room + 8:
        return 0.0
    return (room - needs - 5) / max(value, line if line * scale < value * scale + needs else value)


def _place(long: float, words: str, line: float) -> float:
    """Pixels from the left end of a bar to its words: in it, else behind it, and behind a line that crosses them."""
    needs = _needs(words)
    inside = line + 4 if line and line < needs else 5.0
    if long >= needs + inside - 5:
        return inside
    behind = long + 5
    return line + 5 if line and behind - 2 < line < behind + needs else behind


def _usable(shown: Any) -> float:
    """Bytes that a plan may take of a rank: the capacity without the reserve."""
    return float(shown.topology.free_memory_bytes())


def _bar(svg: Svg, name: str, left: float, y: float, long: float, words: str, best: bool, line: float = 0.0) -> None:
    """A bar with its words inside where there is room, else behind it and behind the line that would cross them.

    Args:
        long: length of the bar in pixels.
        line: how far from `left` a line crosses the bars; 0 for none.
    """
    look = _look(name)
    outline = f'stroke="{LABEL_INK}" stroke-width=".6"'
    svg.rect(left, y, max(long, 0.5), THICK, svg.fill(look), f"{_label(name)}: {words}", outline)
    place = _place(long, words, line)
    if place < long:
        halo = f'stroke="{look.fill}" stroke-width="3" paint-order="stroke"'
        svg.text(left + place, y + 12.5, words, ink=LABEL_INK, bold=best, extra=halo)
    else:
        svg.text(left + place, y + 12.5, words, bold=best)


def _plot(comparison: Any, drawn: dict[str, dict[str, float]], title: str) -> Any:
    import plotly.graph_objects as go

    labels = [_label(name) for name in drawn]
    bars = [
        go.Bar(
            name=head,
            orientation="h",
            y=labels,
            x=[each[row] for each in drawn.values()],
            marker=marker(look),
            xaxis=axis,
            hovertemplate="%{y}: %{x:.4s}" + unit + "<extra></extra>",
        )
        for row, head, unit, look, axis in (
            ("step_ms", "step", " ms", Look("step", *SPARE[0]), "x"),
            ("memory_bytes", "fullest rank", "B", Look("fullest rank", *SPARE[1]), "x2"),
        )
    ]
    return figure(
        bars,
        title,
        height=170 + 32 * len(labels),
        yaxis={"autorange": "reversed", "showgrid": False},
        xaxis={"title": {"text": "ms a step"}, "domain": [0, 0.48], "rangemode": "tozero"},
        xaxis2={"title": {"text": "bytes of the fullest rank"}, "domain": [0.52, 1], "rangemode": "tozero"},
    )
