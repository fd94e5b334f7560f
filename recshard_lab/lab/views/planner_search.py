"""The planner's search: every plan that it evaluated, as step time and memory, and in the order of evaluation.

The left panel shows each plan by the memory of its fullest rank and its step time; plans over the limit are crosses.
The right panel shows step times by the number of plans evaluated before, and the best so far. No plan that fits is
below the dashed lower bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from textwrap import wrap
from typing import TYPE_CHECKING

import numpy as np

from recshard_lab.lab.charts import spec
from recshard_lab.lab.draw.theme import SCHEMES, WARNING, as_sentence, bytes_text, counted, look_of, ms_text, number
from recshard_lab.lab.draw.view import View, message_view
from recshard_lab.lab.views.registry import register_view
from recshard_lab.text_table import TextTable

if TYPE_CHECKING:
    from recshard_lab.planner.search.trace import Candidate, SearchTrace

MOST_LINES = 60  # of the numbers
PLAIN, FRONTIER, CHOSEN = "#1f83d6", "#2b9a57", "#a763d1"
HEIGHT = 290.0  # pixels
FAR = 3.0  # times the spread of most plans; plans beyond are drawn at the edge


@register_view("Planner's search", place=10)
def planner_search(search: SearchTrace | None, *, note: str = "", width: int = 860) -> View:
    """Every plan that a planner evaluated: step time, memory of the fullest rank, and order of evaluation.

    Args:
        search: ``plan.search`` of a plan by an ``EmbeddingShardingPlanner(keep_search=True)``.
        note: a sentence under the picture.
        width: of the static picture, in pixels.

    >>> from recshard_lab.embedding.configs import EmbeddingBagConfig
    >>> from recshard_lab.planner import EmbeddingShardingPlanner
    >>> from recshard_lab.sharding import Topology
    >>> tables = [EmbeddingBagConfig(1000, 16, name, feature_names=[name]) for name in ("movies", "users")]
    >>> planner = EmbeddingShardingPlanner(Topology(2), keep_search=True)
    >>> plan = planner.plan_tables(tables)
    >>> planner_search(plan.search).problem
    ''
    """
    if search is None:
        words = "No search to show: no planner made this plan, or keep_search=True was not set."
        return message_view("planner_search", "Planner's search", words)
    seen = Seen.of(search)
    if not seen.drawn and not seen.alone:
        words = "The planner evaluated no plan."
        if search.candidates:
            words = f"None of {len(search.candidates):,} plans has a step and a memory that are numbers."
        return message_view("planner_search", "Planner's search", words)
    title = f"Planner's search: {counted(search.seen, 'plan')} evaluated"
    title += f", {ms_text(search.chosen.step_ms)} chosen" if search.chosen is not None else ", none fits"
    summary = _summary(search, seen)

    notes = []
    if not seen.cap_near:
        notes.append(f"A rank can use {bytes_text(seen.capacity)}, which is beyond the axis.")
    x, y = _axes(seen)
    hidden = [scheme for scheme, one in seen.alone.items() if one.step_ms > y.high or one.memory_bytes > x.high]
    if hidden:
        named = (f"{scheme_label(name)} ({ms_text(seen.alone[name].step_ms)})" for name in hidden)
        notes.append(f"Every table under one scheme, beyond the axes: {', '.join(named)}.")
    chart = spec.Chart(title, summary, (_row(seen),), " ".join([*notes, as_sentence(note)]), warn=seen.chosen is None)
    return View.of_chart("planner_search", chart, _numbers(seen), width)


def scheme_label(scheme: str) -> str:
    """A scheme in a word."""
    return look_of(scheme, SCHEMES).label.split(" (")[0]


@dataclass(frozen=True, eq=False)
class Seen:
    """What of a search can be drawn.

    Attributes:
        drawn: plans with finite numbers, in the order in which they were found.
        alone: the same of the single schemes.
        left_out: number of plans without finite numbers.
        bound: ms, None if unknown.
        capacity: usable bytes of a rank.
    """

    drawn: list[Candidate]
    alone: dict[str, Candidate]
    left_out: int
    chosen: Candidate | None
    frontier: list[Candidate]
    best: list[Candidate]
    bound: float | None
    capacity: float

    @classmethod
    def of(cls, search: SearchTrace) -> Seen:
        """Leaves out what is not a number."""
        drawn = [one for one in search.candidates if _drawable(one)]
        alone = {scheme: one for scheme, one in search.single_schemes.items() if _drawable(one)}
        left_out = len(search.candidates) + len(search.single_schemes) - len(drawn) - len(alone)
        chosen = search.chosen if search.chosen is not None and _drawable(search.chosen) else None
        bound = search.lower_bound
        bound = bound if bound is not None and isfinite(bound) and bound > 0 else None
        frontier, best = (list(filter(_drawable, some)) for some in (search.frontier(), search.best_so_far()))
        return cls(drawn, alone, left_out, chosen, frontier, best, bound, float(search.usable_bytes))

    @property
    def last(self) -> int:
        """The number of the last plan, at least 1."""
        return max([1, *(one.number for one in self.drawn)])

    @property
    def cap_near(self) -> bool:
        """Whether the cap is drawn, rather than written."""
        held = [one.memory_bytes for one in (*self.drawn, *self.alone.values())]
        return isfinite(self.capacity) and self.capacity <= 1.8 * max(held)

    def stairs(self) -> list[tuple[int, float]]:
        """Plans evaluated, and the best step of them."""
        found = [(one.number, one.step_ms) for one in self.best]
        return [*found, (max(one.number for one in self.drawn), found[-1][1])] if found else []

    def hover(self, one: Candidate, name: str = "") -> str:
        """The text of its tooltip."""
        lines = [name] if name else []
        if one.number >= 0:
            lines.append(f"no. {one.number:,} ({one.stage})")
        lines.append(f"{ms_text(one.step_ms)} a step, {bytes_text(one.memory_bytes)} on the fullest rank")
        lines += [] if one.fits else ["does not fit"]
        return "\n".join([*lines, *wrap(one.text, 60)])


def _summary(search: SearchTrace, seen: Seen) -> str:
    """Distance from the best plan, what is not drawn, and the step under one scheme alone."""
    words = []
    chosen, bound = search.chosen, search.lower_bound
    if chosen is not None and bound is not None and bound > 0 and np.isfinite([bound, chosen.step_ms]).all():
        far = max(0.0, chosen.step_ms / bound - 1)
        near = f"at most {number(100 * far, 2)}% longer than the best there is"
        words.append(f"The chosen plan is {near if far > 5e-5 else 'the best there is'}.")
        faster = [one for one in seen.drawn if one.fits and one.step_ms < 0.9999 * chosen.step_ms]
        if faster:
            best = min(faster, key=lambda one: one.step_ms)
            less = number(100 * (1 - best.step_ms / chosen.step_ms), 2)
            words.append(f"It is not the shortest here: no. {best.number:,} is {less}% shorter.")
    over = sum(not one.fits for one in seen.drawn)
    if search.every > 1:
        words.append(f"Drawn: {search.thinned}")
    if not search.candidates:
        words.append(f"The search found no plan that fits: each rank has {bytes_text(seen.capacity)} usable.")
    elif over:
        words.append(f"{over:,} {'plans do' if over > 1 else 'plan does'} not fit.")
    fitting = {scheme: one for scheme, one in seen.alone.items() if one.fits and not one.elsewhere}
    if fitting and chosen is not None:
        scheme = min(fitting, key=lambda name: fitting[name].step_ms)
        more = 100 * (fitting[scheme].step_ms / chosen.step_ms - 1) if chosen.step_ms > 0 else 0.0
        verdict = "no shorter" if abs(more) < 0.01 else f"{number(abs(more), 2)}% {'longer' if more > 0 else 'shorter'}"
        words.append(f"All tables under {scheme_label(scheme)}: {verdict}.")
    if seen.left_out:
        words.append(f"{seen.left_out:,} plans have no number and are not drawn.")
    return " ".join(words)


def _numbers(seen: Seen) -> TextTable:
    """The bound, the cap, the plans that have a name, and the best so far."""
    best, frontier = set(map(id, seen.best)), set(map(id, seen.frontier))
    rows: list[list[str]] = []
    if seen.bound is not None:
        rows.append(["lower bound", "", "", ms_text(seen.bound), "", "", ""])
    rows.append(["usable per rank", "", "", "", bytes_text(seen.capacity), "", ""])

    def line(name: str, one: Candidate) -> list[str]:
        marks = [word for word, among in (("best so far", best), ("frontier", frontier)) if id(one) in among]
        number_ = f"{one.number:,}" if one.number >= 0 else ""
        held = bytes_text(one.memory_bytes) + ("" if one.fits else ", does not fit")
        return [name, number_, one.stage, ms_text(one.step_ms), held, ", ".join(marks), one.text]

    if seen.chosen is not None:
        rows.append(line("chosen", seen.chosen))
    rows += [line(f"all {scheme_label(scheme)}", one) for scheme, one in seen.alone.items()]
    others = [one for one in seen.drawn if id(one) in best | frontier and one is not seen.chosen]
    left = len(others) - (MOST_LINES - len(rows))
    rows += [line("", one) for one in others[: MOST_LINES - len(rows)]]
    if left > 0:
        rows.append([f"and {left:,} more", "", "", "", "", "", "records() has all"])
    return TextTable(("plan", "no.", "found by", "step", "fullest rank", "", "tables under"), rows)


def _axes(seen: Seen) -> tuple[spec.Axis, spec.Axis]:
    """Memory and step time, up to `FAR` times the spread of most plans."""
    everything = [*seen.drawn, *seen.alone.values()]
    steps = np.array([one.step_ms for one in seen.drawn or everything])
    held = np.array([one.memory_bytes for one in seen.drawn or everything])
    low, low_x = min(one.step_ms for one in everything), min(one.memory_bytes for one in everything)
    low = low if seen.bound is None else min(low, seen.bound)
    chosen = seen.chosen.step_ms if seen.chosen is not None else low
    limit = low + FAR * max(float(np.quantile(steps, 0.9)) - low, chosen - low, 0.05 * low)
    limit_x = low_x + FAR * max(float(np.quantile(held, 0.9)) - low_x, 0.05 * low_x)
    high = min(limit, max(one.step_ms for one in everything))
    high_x = min(limit_x, max(one.memory_bytes for one in everything))
    high_x = max(high_x, 1.02 * seen.capacity) if seen.cap_near else high_x
    room, room_x = max(high - low, 0.04 * high, 1e-9), max(high_x - low_x, 0.1 * high_x, 1.0)
    x = spec.Axis(
        "linear", max(0.0, low_x - 0.08 * room_x), high_x + 0.1 * room_x, "memory of the fullest rank", "bytes"
    )
    return x, spec.Axis("linear", low - 0.16 * room, high + 0.1 * room, "ms per step", "ms")


def _row(seen: Seen) -> tuple[spec.Panel, ...]:
    """Plans by memory and step time; plans by the order in which they were found."""
    x, y = _axes(seen)
    left, right = list[spec.Mark](), list[spec.Mark]()
    if seen.cap_near:
        left.append(spec.Band("more than a rank can use", (seen.capacity, x.high)))
        left.append(spec.Rule(x=seen.capacity, words=f"{bytes_text(seen.capacity)} usable", colour=WARNING))
    if seen.bound is not None:
        for marks in (left, right):
            words = f"lower bound {ms_text(seen.bound)}" if marks is left else ""
            marks.append(spec.Rule(y=seen.bound, words=words, dash="8 3"))
    order = spec.Axis("linear", -0.02 * seen.last, 1.04 * seen.last, "plans evaluated")
    kinds = (("fits", True, "circle", PLAIN, 2.8), ("does not fit", False, "x", WARNING, 3.2))
    for name, fits, symbol, colour, size in kinds:
        some = [one for one in seen.drawn if one.fits is fits]
        left += _points(seen, f"{len(some):,} plans: {name}", some, x, y, symbol, colour, size)
        rows = [(one.number, min(one.step_ms, y.high), seen.hover(one), "") for one in some]
        right += spec.points("", rows, symbol=symbol, colour=colour, filled=not fits, size=1.8, legend=False)
    left += _frontier(seen, x, y)
    if len(seen.best) > 1:
        places, levels = zip(*seen.stairs(), strict=True)
        marks_of_best = tuple(map(float, places)), tuple(min(level, y.high) for level in levels)
        right.append(spec.Lines("best so far", *marks_of_best, CHOSEN, step="hv"))
    for scheme, one in seen.alone.items():
        name = scheme_label(scheme)
        if one.step_ms <= y.high and one.memory_bytes <= x.high:
            symbol, label = ("square", name) if one.fits else ("triangle-down", f"{name} (does not fit)")
            row = (one.memory_bytes, one.step_ms, seen.hover(one, f"every table under {name}"), label)
            left += spec.points("every table under one scheme", [row], symbol=symbol, filled=False, size=5.5)
    if seen.chosen is not None:
        one = seen.chosen
        hover, label = seen.hover(one, "chosen"), f"chosen {ms_text(one.step_ms)}"
        left += spec.points(
            "chosen", [(one.memory_bytes, one.step_ms, hover, label)], symbol="star", colour=CHOSEN, size=8.0
        )
        if one.number >= 0:
            right += spec.points(
                "chosen", [(one.number, one.step_ms, hover, "")], symbol="star", colour=CHOSEN, size=6.0
            )
    panel = spec.Panel(x, y, tuple(left), height=HEIGHT, share=0.7)
    return (panel, spec.Panel(order, y, tuple(right), height=HEIGHT, share=0.3)) if seen.drawn else (panel,)


def _points(
    seen: Seen, name: str, some: list[Candidate], x: spec.Axis, y: spec.Axis, symbol: str, colour: str, size: float
) -> list[spec.Mark]:
    """Plans within the axes, and at the edge those beyond, with another marker."""
    inside = [one for one in some if one.memory_bytes <= x.high and one.step_ms <= y.high]
    beyond = [one for one in some if one.memory_bytes > x.high or one.step_ms > y.high]
    marks: list[spec.Mark] = []
    for each, kind, marker in ((inside, name, symbol), (beyond, "beyond the axes", "triangle-up")):
        rows = [(min(one.memory_bytes, x.high), min(one.step_ms, y.high), seen.hover(one), "") for one in each]
        filled = kind != name or symbol == "x"
        marks += spec.points(kind, rows, symbol=marker, colour=colour, filled=filled, size=size)
    return marks


def _frontier(seen: Seen, x: spec.Axis, y: spec.Axis) -> list[spec.Mark]:
    line = [one for one in seen.frontier if one.memory_bytes <= x.high and one.step_ms <= y.high]
    if not line:
        return []
    at, level = tuple(one.memory_bytes for one in line), tuple(one.step_ms for one in line)
    hover = tuple(seen.hover(one, "on the Pareto frontier") for one in line)
    return [spec.Lines("Pareto frontier", at, level, FRONTIER, "4 3", "diamond", 1.4, True, "vh", hover)]


def _drawable(one: Candidate) -> bool:
    return isfinite(one.step_ms) and isfinite(one.memory_bytes)
