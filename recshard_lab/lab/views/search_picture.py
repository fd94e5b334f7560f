"""The static picture of a planner's search, and what goes where in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from textwrap import wrap
from typing import TYPE_CHECKING

import numpy as np

from recshard_lab.lab.draw.axes import Axis, Labels
from recshard_lab.lab.draw.rank_columns import MARGIN
from recshard_lab.lab.draw.svg import Svg, text_width
from recshard_lab.lab.draw.theme import SCHEMES, WARNING, bytes_text, bytes_unit, look_of, ms_text, number, ticks

if TYPE_CHECKING:
    from recshard_lab.planner.search.trace import Candidate, SearchTrace

PLAIN, FRONTIER, CHOSEN = "#1f83d6", "#2b9a57", "#a763d1"
LEFT, HEIGHT, GAP = 76.0, 280.0, 34.0
FAR = 3.0  # times the spread of most plans; what takes longer stands in a strip of its own
MOST = 400  # marks with a tooltip each; beyond, all of one kind are one shape


def scheme_label(scheme: str) -> str:
    """A scheme in a word."""
    return look_of(scheme, SCHEMES).label.split(" (")[0]


@dataclass(frozen=True, eq=False)
class Seen:
    """What of a search can be drawn.

    Attributes:
        drawn: plans whose numbers are numbers, in the order in which they were found.
        alone: the same of the single schemes.
        left_out: how many are not.
        bound: ms, None where there is none.
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
        """Leaves out what is no number."""
        drawn = [one for one in search.candidates if _drawable(one)]
        alone = {scheme: one for scheme, one in search.single_schemes.items() if _drawable(one)}
        left_out = len(search.candidates) + len(search.single_schemes) - len(drawn) - len(alone)
        chosen = search.chosen if search.chosen is not None and _drawable(search.chosen) else None
        bound = search.lower_bound
        bound = bound if bound is not None and isfinite(bound) and bound > 0 else None
        frontier, best = (list(filter(_drawable, some)) for some in (search.frontier(), search.best_so_far()))
        return cls(drawn, alone, left_out, chosen, frontier, best, bound, float(search.usable_bytes))

    @property
    def cap_near(self) -> bool:
        """Whether the cap is drawn, rather than written."""
        held = [one.memory_bytes for one in (*self.drawn, *self.alone.values())]
        return isfinite(self.capacity) and self.capacity <= 1.8 * max(held)

    def stairs(self) -> list[tuple[int, float]]:
        """Plans looked at, and the best step of them."""
        found = [(one.number, one.step_ms) for one in self.best]
        return [*found, (max(one.number for one in self.drawn), found[-1][1])] if found else []

    def hover(self, one: Candidate, name: str = "") -> str:
        """What there is to say of a plan."""
        lines = [name] if name else []
        if one.number >= 0:
            lines.append(f"no. {one.number:,} ({one.stage})")
        lines.append(f"{ms_text(one.step_ms)} a step, {bytes_text(one.memory_bytes)} on the fullest rank")
        lines += [] if one.fits else ["does not fit"]
        return "\n".join([*lines, *wrap(one.text, 60)])


def draw_search(seen: Seen, title: str, summary: str, note: str, width: int, uid: str) -> Svg:
    """The picture."""
    svg = Svg(width, 0, title, summary, uid)
    top = svg.head(title, summary, MARGIN, warn=seen.chosen is None) + 30
    bottom = top + HEIGHT
    right = width - MARGIN - 4.0
    middle = LEFT + (right - LEFT - GAP) * (0.7 if seen.drawn else 1.0)
    x, y = _axes(seen, LEFT, middle, top, bottom)
    order = Axis(0.0, max([one.number for one in seen.drawn] or [1]) or 1.0, middle + GAP, right)
    labels = Labels((LEFT + 2, top + 1, middle - 2, bottom - 1))
    _frame(svg, seen, x, y, order if seen.drawn else None, labels)
    for column, line in {(round(x.at(c.memory_bytes) / 8), round(y.at(c.step_ms) / 8)) for c in seen.drawn}:
        labels.block(8 * column - 4, 8 * line - 4, 8 * column + 4, 8 * line + 4)
    marks = _Marks(svg, seen)
    marks.crowd([(x.at(one.memory_bytes), y.at(one.step_ms), one) for one in seen.drawn])
    marks.crowd([(order.at(one.number), y.at(one.step_ms), one) for one in seen.drawn], small=True)
    _frontier(svg, seen, x, y)
    if seen.best:
        stairs = [(order.at(at), y.at(ms)) for at, ms in seen.stairs()]
        _steps(svg, stairs, f'stroke="{CHOSEN}" stroke-width="2"')
    spots = [(scheme, x.at(one.memory_bytes), y.at(one.step_ms), one) for scheme, one in seen.alone.items()]
    for _, at, level, one in spots:
        marks.alone(at, level, one)
        labels.block(at - 6, level - 6, at + 6, level + 6)
    if seen.chosen is not None:
        spot = x.at(seen.chosen.memory_bytes), y.at(seen.chosen.step_ms)
        marks.chosen(*spot)
        marks.chosen(order.at(seen.chosen.number), spot[1])
        labels.block(spot[0] - 8, spot[1] - 8, spot[0] + 8, spot[1] + 8)
        _label(svg, labels, *spot, f"chosen {ms_text(seen.chosen.step_ms)}", bold=True)
    beyond = []
    for scheme, at, level, one in sorted(spots, key=lambda spot: spot[2]):
        words = scheme_label(scheme) + (f" {ms_text(one.step_ms)}" if one.step_ms > y.high else "")
        if not _label(svg, labels, at, level, words):
            beyond.append(f"{scheme_label(scheme)}: {ms_text(one.step_ms)}, {bytes_text(one.memory_bytes)}")
    end = _key(svg, seen, bottom + 44, width)
    words = " ".join([f"No room for the names of {', '.join(beyond)}." if beyond else "", note]).strip()
    if words:
        for said in wrap(words, int((width - 2 * MARGIN) / 5.9)):
            svg.text(MARGIN, end + 10, said, soft=True)
            end += 16
    svg.height = end + 6
    return svg


def _axes(seen: Seen, left: float, right: float, top: float, bottom: float) -> tuple[Axis, Axis]:
    everything = [*seen.drawn, *seen.alone.values()]
    steps = np.array([one.step_ms for one in seen.drawn or everything])
    held = np.array([one.memory_bytes for one in seen.drawn or everything])
    low, low_x = float(steps.min()), float(held.min())
    if seen.bound is not None:
        low = min(low, seen.bound)
    low, low_x = min([low, *(c.step_ms for c in everything)]), min([low_x, *(c.memory_bytes for c in everything)])
    most, most_x = float(max(c.step_ms for c in everything)), float(max(c.memory_bytes for c in everything))
    chosen = seen.chosen.step_ms if seen.chosen is not None else low
    limit = low + FAR * max(float(np.quantile(steps, 0.9)) - low, chosen - low, 0.05 * low)
    limit_x = low_x + FAR * max(float(np.quantile(held, 0.9)) - low_x, 0.05 * low_x)
    if seen.cap_near:
        limit_x = max(limit_x, 1.02 * seen.capacity)
    cut, cut_x = most > limit, most_x > limit_x
    high, high_x = (limit if cut else most), (limit_x if cut_x else most_x)
    if seen.cap_near:
        high_x = max(high_x, seen.capacity)
    room, room_x = max(high - low, 0.04 * high, 1e-9), max(high_x - low_x, 0.1 * high_x, 1.0)
    x = Axis(max(0.0, low_x - 0.08 * room_x), high_x + 0.06 * room_x, left, right, cut_x)
    return x, Axis(low - 0.13 * room, high + 0.08 * room, bottom, top, cut)


def _frame(svg: Svg, seen: Seen, x: Axis, y: Axis, order: Axis | None, labels: Labels) -> None:
    """Axes, bound and cap."""
    top, bottom = y.end, y.start
    if seen.cap_near:
        at = x.at(seen.capacity)
        svg.rect(at, top, x.end - at, bottom - top, WARNING, extra='fill-opacity=".07"')
    spans = [(x.start, x.end), *([(order.start, order.end)] if order is not None else [])]
    for left, right in spans:
        for tick in ticks(y.low, y.high):
            svg.line(left, y.at(tick), right, y.at(tick), 'stroke-opacity=".13"')
        svg.line(left, bottom, right, bottom, 'stroke-opacity=".6"')
        svg.line(left, top, left, bottom, 'stroke-opacity=".6"')
        if y.beyond:
            svg.line(left, y.beyond_from, right, y.beyond_from, 'stroke-opacity=".5" stroke-dasharray="1 3"')
    for tick in ticks(y.low, y.high):
        svg.text(x.start - 7, y.at(tick) + 4, number(tick, 4), anchor="end", size=10, soft=True)
    svg.text(MARGIN, top - 9, "ms a step", size=10.5, soft=True)
    if y.beyond:
        svg.text(x.start - 7, (y.beyond_from + y.end) / 2 + 4, "longer", anchor="end", size=10, soft=True)
    unit, name = bytes_unit(x.high)
    shown = [tick * unit for tick in ticks(x.low / unit, x.high / unit)]
    every = 1 + int(len(shown) * 44 / max(1.0, x.end - x.start))
    room = x.end - (text_width("more", 10) + 4 if x.beyond else 0)
    for tick in shown[::every]:
        if x.at(tick) + text_width(number(tick / unit, 4), 10) / 2 > room:
            continue  # the word at the end stands there
        svg.text(x.at(tick), bottom + 15, number(tick / unit, 4), anchor="middle", size=10, soft=True)
    if x.beyond:
        svg.line(x.beyond_from, top, x.beyond_from, bottom, 'stroke-opacity=".5" stroke-dasharray="1 3"')
        svg.text(x.end, bottom + 15, "more", anchor="end", size=10, soft=True)
    svg.text(
        (x.start + x.end) / 2,
        bottom + 30,
        f"memory of the fullest rank, {name}",
        anchor="middle",
        soft=True,
    )
    if order is not None:
        middle = (order.start + order.end) / 2
        svg.text(order.start, bottom + 15, "0", anchor="middle", size=10, soft=True)
        svg.text(order.end, bottom + 15, f"{order.high:,.0f}", anchor="end", size=10, soft=True)
        svg.text(middle, bottom + 30, "plans looked at", anchor="middle", soft=True)
    _cap(svg, seen, x, (top, bottom), labels)
    if seen.bound is not None:
        level = y.at(seen.bound)
        for left, right in spans:
            svg.line(left, level, right, level, 'stroke-width="1.6" stroke-dasharray="8 3"')
        words = f"lower bound {ms_text(seen.bound)}: no plan that fits is shorter"
        if text_width(words, 10) > x.end - x.start - 12:
            words = words.split(":")[0]
        svg.text(x.start + 6, level + 13, words, size=10)
        labels.block(x.start, level - 3, x.end, level + 3)
        labels.block(x.start, level - 2, x.start + 6 + text_width(words, 10), level + 16)


def _cap(svg: Svg, seen: Seen, x: Axis, span: tuple[float, float], labels: Labels) -> None:
    top, bottom = span
    words = f"{bytes_text(seen.capacity)} usable"
    if not seen.cap_near:
        svg.text(x.end, top - 9, f"{words} →", anchor="end", size=10.5)
        return
    at = x.at(seen.capacity)
    labels.block(at - 2, top, at + 2, bottom)
    svg.line(at, top - 4, at, bottom, f'stroke-width="1.6" stroke-dasharray="6 3" style="stroke:{WARNING}"')
    half = text_width(words, 10.5) / 2
    svg.text(min(max(at, x.start + 64 + half), x.end - half), top - 9, words, anchor="middle", size=10.5)


def _frontier(svg: Svg, seen: Seen, x: Axis, y: Axis) -> None:
    spots = [(x.at(one.memory_bytes), y.at(one.step_ms)) for one in seen.frontier]
    _steps(
        svg,
        [(level, at) for at, level in spots],
        f'stroke="{FRONTIER}" stroke-width="1.4" stroke-dasharray="4 3"',
        True,
    )
    for (at, level), one in zip(spots, seen.frontier, strict=True):
        d = f"M{at:.1f} {level - 5:.1f}l5 5l-5 5l-5 -5z"
        svg.path(d, f'fill="{FRONTIER}" stroke="{FRONTIER}"', seen.hover(one, "on the Pareto frontier"))


def _steps(svg: Svg, spots: Sequence[tuple[float, float]], extra: str, turned: bool = False) -> None:
    """A staircase: along first, then across."""
    if len(spots) < 2:
        return
    corners = [spots[0]]
    for (_, level), there in pairwise(spots):
        corners += [(there[0], level), there]
    points = "L".join(f"{b:.1f} {a:.1f}" if turned else f"{a:.1f} {b:.1f}" for a, b in corners)
    svg.path(f"M{points}", f'fill="none" {extra}')


@dataclass
class _Marks:
    """Draws plans."""

    svg: Svg
    seen: Seen

    def crowd(self, spots: Iterable[tuple[float, float, Candidate]], small: bool = False) -> None:
        """All plans, one mark a place."""
        places: dict[tuple[int, int, bool], tuple[float, float, Candidate]] = {}
        for at, level, one in spots:
            places.setdefault((round(2 * at), round(2 * level), one.fits), (at, level, one))
        r = 1.6 if small else 2.8
        for fits in (True, False):
            some = [place for key, place in places.items() if key[2] is fits]
            ink = f'fill="none" stroke="{WARNING}" stroke-width="1.4"'
            if fits:
                ink = f'fill="{PLAIN}" fill-opacity=".25" stroke="{PLAIN}" stroke-width="{0.7 if small else 1}"'
            shapes = [_circle(at, level, r) if fits else _cross(at, level, r) for at, level, _ in some]
            if small or len(places) > MOST:
                if shapes:
                    self.svg.path("".join(shapes), ink)
                continue
            for shape, (_, _, one) in zip(shapes, some, strict=True):
                self.svg.path(shape, f'{ink} pointer-events="all"', self.seen.hover(one))

    def alone(self, at: float, level: float, one: Candidate) -> None:
        """A plan of a single scheme."""
        d = f"M{at - 5:.1f} {level - 5:.1f}h10v10h-10z" + ("" if one.fits else _cross(at, level, 5))
        ink = 'fill="none" stroke="currentColor" stroke-width="1.5" pointer-events="all"'
        name = f"every table under {scheme_label(next(iter(one.schemes)))}"
        self.svg.path(d, ink, self.seen.hover(one, name))

    def chosen(self, at: float, level: float) -> None:
        """The plan chosen."""
        assert self.seen.chosen is not None
        ink = f'fill="{CHOSEN}" stroke="currentColor" stroke-width=".8"'
        self.svg.path(_star(at, level, 8.0), ink, self.seen.hover(self.seen.chosen, "chosen"))


def _label(svg: Svg, labels: Labels, at: float, level: float, words: str, bold: bool = False) -> bool:
    """Words beside a mark, with a line to it where they stand further off; whether there was room."""
    spot = labels.place(at, level, words, 11 if bold else 10.5)
    if spot is None:
        return False
    left, base = spot
    right, middle = left + text_width(words, 10.5), base - 4
    if abs(middle - level) > 12:
        near = min(max(at, left), right)
        edge = middle + (7 if level > middle else -7)
        svg.line(at, level + (6 if edge > level else -6), near, edge, 'stroke-opacity=".5" stroke-width=".8"')
    svg.text(left, base, words, size=11 if bold else 10.5, bold=bold)
    return True


def _key(svg: Svg, seen: Seen, y: float, width: float) -> float:
    """What the marks mean; returns the y below."""
    over = [one for one in seen.drawn if not one.fits]
    plain = f'fill="{PLAIN}" fill-opacity=".25" stroke="{PLAIN}"'
    entries = [(_circle(6, -4, 2.8), plain, f"{len(seen.drawn) - len(over):,} plans that fit")] if seen.drawn else []
    if over:
        cross = _cross(6, -4, 3.2), f'fill="none" stroke="{WARNING}" stroke-width="1.6"'
        entries.append((*cross, f"{len(over):,} that do not"))
    if seen.frontier:
        entries.append(("M6 -9l5 5l-5 5l-5 -5z", f'fill="{FRONTIER}"', "Pareto frontier"))
    if seen.chosen is not None:
        entries.append((_star(6, -4, 7), f'fill="{CHOSEN}" stroke="currentColor" stroke-width=".8"', "chosen"))
    if len(seen.best) > 1:
        entries.append(("M-1 -8h7v7h7", f'fill="none" stroke="{CHOSEN}" stroke-width="2"', "best so far"))
    if seen.alone:
        square = "M1 -9h10v10h-10z", 'fill="none" stroke="currentColor" stroke-width="1.5"'
        entries.append((*square, "every table under one scheme (crossed: does not fit)"))
    x = float(MARGIN)
    for shape, ink, words in entries:
        room = 22 + text_width(words, 11) + 14
        if x > MARGIN and x + room > width - MARGIN:
            x, y = float(MARGIN), y + 19
        svg.raw(f'<g transform="translate({x:.1f} {y:.1f})"><path d="{shape}" {ink}/></g>')
        svg.text(x + 20, y, words)
        x += room
    return y + 8


def _circle(x: float, y: float, r: float) -> str:
    return f"M{x - r:.1f} {y:.1f}a{r} {r} 0 1 0 {2 * r:.1f} 0a{r} {r} 0 1 0 {-2 * r:.1f} 0z"


def _cross(x: float, y: float, r: float) -> str:
    return f"M{x - r:.1f} {y - r:.1f}l{2 * r:.1f} {2 * r:.1f}m0 {-2 * r:.1f}l{-2 * r:.1f} {2 * r:.1f}"


def _star(x: float, y: float, r: float) -> str:
    turns = np.arange(10) * np.pi / 5 - np.pi / 2
    radii = np.where(np.arange(10) % 2, 0.45 * r, r)
    return (
        "M"
        + "L".join(f"{x + n * np.cos(a):.1f} {y + n * np.sin(a):.1f}" for n, a in zip(radii, turns, strict=True))
        + "z"
    )


def _drawable(one: Candidate) -> bool:
    return isfinite(one.step_ms) and isfinite(one.memory_bytes)
