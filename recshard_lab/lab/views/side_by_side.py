"""Side by side: the step and the memory of every plan of a comparison as bars on one scale, the best marked."""

from __future__ import annotations

from typing import Any

import numpy as np

from recshard_lab.lab.charts import spec
from recshard_lab.lab.draw.theme import (
    SCHEMES,
    WARNING,
    Look,
    as_sentence,
    bytes_text,
    counted,
    look_of,
    ms_text,
    number,
)
from recshard_lab.lab.draw.view import View, message_view
from recshard_lab.lab.views.registry import register_view

TITLE = "Side by side"
MOST = 24  # plans drawn one by one
PLAIN = Look("", "#c9ced6", "plain")
PITCH = 28.0  # pixels of a plan
NEAR = 1.5  # a limit within so many times the largest memory is drawn


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
        words = "; ".join(f"{name}: {shown.problem}" for name, shown in answers.items()) or "No plan to show."
        return message_view("side_by_side", TITLE, words)
    for name, each in drawn.items():
        if not all(np.isfinite(value) for value in each.values()):
            return message_view("side_by_side", TITLE, f"The prediction of {name!r} is not a number.")
    first = next(answers[name] for name in drawn)
    counts = ((len(answers), "plan"), (len(comparison.tables), "table"), (first.topology.world_size, "rank"))
    title = "{}, {} on {}".format(*(counted(count, noun) for count, noun in counts))
    summary = _summary(comparison, drawn)

    chart = spec.Chart(title, summary, (_row(comparison, drawn, width),), _note(comparison, drawn, note))
    return View.of_chart("side_by_side", chart, comparison.numbers, width)


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


def _row(comparison: Any, drawn: dict[str, dict[str, float]], width: int) -> tuple[spec.Panel, ...]:
    """Step time and memory of each plan; the best of each has a star."""
    names = list(comparison.answers)[:MOST]
    labels = spec.categories([_label(name) for name in names])
    usable = float(next(comparison.answers[name] for name in drawn).topology.free_memory_bytes())
    pixels = (width - min(0.36 * width, max(len(name) for name in labels.categories) * 6.6) - 60) / 2
    made = []
    for quantity, title, unit, text in (
        ("step_ms", "ms per step", "ms", ms_text),
        ("memory_bytes", "Memory of the fullest rank", "bytes", bytes_text),
    ):
        best, marks = comparison.best[quantity], list[spec.Mark]()
        ends = []
        for place, name in enumerate(names):
            if name not in drawn:
                words = "✗ no plan" if quantity == "step_ms" else ""
                marks += [spec.Text(0.0, float(place), words, "start")] if words else []
                continue
            value = float(drawn[name][quantity])
            words = text(value) + " ★" * (name in best)
            words += " ✗" * (quantity == "memory_bytes" and not comparison.answers[name].fits)
            ends.append((value, words))
            row = (place, 0.0, value, f"{_label(name)}\n{title}: {text(value)}", words)
            style = {"label": "auto", "width": 0.66, "across": True, "legend": False}
            marks += spec.bars(_label(name), _look(name), [row], **style)
        near = quantity == "memory_bytes" and usable <= NEAR * max(value for value, _ in ends)
        high = max(1.02 * usable if near else 0.0, spec.room_for(ends, pixels))
        if near:
            marks.append(spec.Rule(x=usable, words=f"{bytes_text(usable)} usable", colour=WARNING))
        axis = spec.Axis("linear", 0.0, 1.02 * high, "", unit)  # type: ignore[arg-type]
        made.append(spec.Panel(axis, labels, tuple(marks), title, PITCH * len(names)))
    return tuple(made)


def _note(comparison: Any, drawn: dict[str, dict[str, float]], note: str) -> str:
    usable = float(next(comparison.answers[name] for name in drawn).topology.free_memory_bytes())
    words = ["★: the best."]
    if not all(shown.fits for shown in comparison.answers.values()):
        words.append("✗: does not fit.")
    if usable > NEAR * max(each["memory_bytes"] for each in drawn.values()):
        words.append(f"A rank can use {bytes_text(usable)}.")
    if len(comparison.answers) > MOST:
        words.append(f"{len(comparison.answers) - MOST} more plans are in the numbers.")
    return " ".join([*words, as_sentence(note)]).strip()
