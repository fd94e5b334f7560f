"""A chart as SVG: readable with no script, in print and by a screen reader, in a light and a dark page.

Each panel and each series is a group whose ``data-`` attributes hold its axes and values, so that a program can read
the picture back.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from textwrap import wrap

from recshard_lab.lab.charts.spec import (
    Area,
    Axis,
    Band,
    Bars,
    Chart,
    Lines,
    Mark,
    Panel,
    Points,
    Rule,
    Span,
    Text,
)
from recshard_lab.lab.charts.symbols import outline
from recshard_lab.lab.draw.svg import Svg, fit, text_width
from recshard_lab.lab.draw.theme import LABEL_INK, as_sentence

MARGIN = 14.0
MOST_BARS, MOST_POINTS = 80, 400  # of a series up to which each has a tooltip; beyond, they are one shape
EDGE = f'stroke="{LABEL_INK}" stroke-width=".6"'


def draw_chart(chart: Chart, width: float, uid: str = "") -> Svg:
    """The picture.

    Args:
        chart: what is drawn.
        width: in pixels.
        uid: unique among the pictures of a page.

    >>> from recshard_lab.lab.charts.spec import linear
    >>> panel = Panel(linear([1, 2]), linear([5, 7]), (Lines("loss", (1, 2), (7, 5)),))
    >>> draw_chart(Chart("Loss", "The loss falls to 5.", ((panel,),)), 400).width
    400
    """
    svg = Svg(width, 0, chart.title, chart.caption, uid)
    y = svg.head(chart.title, chart.caption, MARGIN, chart.warn) + 6
    lefts = _lefts(chart, width)
    number = 0
    for row, panels in enumerate(chart.rows):
        frames = _frames(panels, lefts[row], width, y)
        bottom = y
        for place, (panel, frame) in enumerate(zip(panels, frames, strict=True)):
            shared = place > 0 and panel.y == panels[place - 1].y
            bottom = max(bottom, _Drawn(svg, panel, frame, not shared, place == 0).draw(number))
            number += 1
        y = bottom + 8
    y = _legend(svg, chart, y, width)
    for line in wrap(as_sentence(chart.note), int((width - 2 * MARGIN) / 6.1)):
        svg.text(MARGIN, y + 9, line, soft=True)
        y += 15
    svg.height = y + 4
    return svg


@dataclass(frozen=True)
class Frame:
    """Where the plot of a panel is, in pixels."""

    left: float
    top: float
    right: float
    bottom: float


def _lefts(chart: Chart, width: float) -> list[float]:
    """Left end of each row's first plot; rows whose first panels have equal x axes begin alike."""
    own = [_label_width(panels[0].y, width) for panels in chart.rows]
    return [
        MARGIN + max(wide for wide, other in zip(own, chart.rows, strict=True) if other[0].x == panels[0].x)
        for panels in chart.rows
    ]


def _label_width(axis: Axis, width: float) -> float:
    size = 11 if axis.kind == "category" else 10
    return min(0.36 * width, 8 + max((text_width(words, size) for _, words in axis.marks()), default=0.0))


def _frames(panels: Sequence[Panel], left: float, width: float, y: float) -> list[Frame]:
    """Of the panels of a row, beside each other."""
    before = [left - MARGIN]
    for last, panel in itertools.pairwise(panels):
        before.append(18.0 if panel.y == last.y else 18.0 + _label_width(panel.y, width / len(panels)))
    room = width - 2 * MARGIN - 6 - sum(before)
    high = max(_head(panel, panel.share / sum(p.share for p in panels) * room) for panel in panels)
    frames, x = [], MARGIN
    for gap, panel in zip(before, panels, strict=True):
        wide = room * panel.share / sum(each.share for each in panels)
        frames.append(Frame(x + gap, y + high, x + gap + wide, y + high + panel.height))
        x += gap + wide
    return frames


def _head(panel: Panel, wide: float) -> float:
    """Pixels over a plot for its title, the name of its y axis, and brackets."""
    high = 16.0 * len(_title(panel, wide)) + (6 if panel.title else 4)
    high += 18 if panel.y.label else 0
    high += 18 if any(isinstance(mark, Span) for mark in panel.marks) else 0
    return high + (
        13 if any(isinstance(mark, Rule) and mark.x is not None and mark.words for mark in panel.marks) else 0
    )


def _title(panel: Panel, wide: float) -> list[str]:
    return wrap(panel.title, max(8, int(wide / 6.8))) if panel.title else []


@dataclass
class _Drawn:
    """One panel while it is drawn."""

    svg: Svg
    panel: Panel
    frame: Frame
    named: bool  # whether the values of the y axis are written
    first: bool  # of its row
    taken: list[tuple[float, float, float, float]] = field(default_factory=list)

    def x(self, value: float) -> float:
        return self.frame.left + self.panel.x.share(value) * (self.frame.right - self.frame.left)

    def y(self, value: float) -> float:
        share = self.panel.y.share(value)
        share = share if self.panel.y.kind == "category" else 1 - share
        return self.frame.top + share * (self.frame.bottom - self.frame.top)

    def draw(self, number: int) -> float:
        """Draws it; returns the y below."""
        axes = " ".join(
            f'data-{name}-kind="{axis.kind}" data-{name}-range="{axis.low:.6g} {axis.high:.6g}" '
            f'data-{name}-pixels="{ends[0]:.2f} {ends[1]:.2f}" data-{name}-label="{escape(axis.label, quote=True)}"'
            for name, axis, ends in (
                ("x", self.panel.x, (self.frame.left, self.frame.right)),
                ("y", self.panel.y, (self.y(self.panel.y.low), self.y(self.panel.y.high))),
            )
        )
        title = escape(self.panel.title, quote=True)
        self.svg.raw(f'<g data-panel="{number}" data-title="{title}" {axes}>')
        frame, wide = self.frame, self.frame.right - self.frame.left
        top = frame.top - _head(self.panel, wide)
        for line in _title(self.panel, wide):
            top += 16
            self.svg.text(MARGIN if self.first else frame.left, top - 3, line, bold=True)
        top += 6 if self.panel.title else 4
        if self.panel.y.label and self.named:
            self.svg.text(MARGIN if self.first else frame.left, top + 8, self.panel.y.label, size=10, soft=True)
        for mark in self.panel.marks:
            if isinstance(mark, Band):
                self._band(mark)
        self._grid_y()
        bottom = self._grid_x()
        for mark in self.panel.marks:
            self._mark(mark)
        self.svg.raw("</g>")
        return bottom

    def _grid_y(self) -> None:
        axis, frame = self.panel.y, self.frame
        if axis.kind == "category":
            pitch = (frame.bottom - frame.top) / max(1, len(axis.categories))
            for value, words in axis.marks() if self.named else []:
                if pitch >= 9:
                    size = 11 if pitch >= 14 else 9
                    shown = fit([words], frame.left - MARGIN - 4, size)
                    bold = words.startswith("▸")
                    self.svg.text(frame.left - 7, self.y(value) + 4, shown, anchor="end", size=size, bold=bold)
            self.svg.line(frame.left, frame.top, frame.left, frame.bottom, 'stroke-opacity=".4"')
            return
        marks = [(value, words) for value, words in axis.marks() if axis.low <= value <= axis.high]
        every = 1 + int(len(marks) * 14 / max(1.0, frame.bottom - frame.top))
        for value, words in marks[::every]:
            level = self.y(value)
            self.svg.line(frame.left, level, frame.right, level, 'stroke-opacity=".15"')
            if self.named:
                self.svg.text(frame.left - 6, level + 3.6, words, anchor="end", size=10, soft=True)

    def _grid_x(self) -> float:
        """Ticks, their texts and the axis' name; returns the y below."""
        axis, frame = self.panel.x, self.frame
        marks = [(value, words) for value, words in axis.marks() if axis.low <= value <= axis.high]
        widest = max((text_width(words, 10) for _, words in marks), default=0.0) + 6
        gaps = [abs(self.x(b[0]) - self.x(a[0])) for a, b in itertools.pairwise(marks)]
        every = 1
        while gaps and min(gaps) * every < widest and every < len(marks):
            every += 1 if every < 4 else every
        if axis.kind == "category":
            self.svg.line(frame.left, frame.bottom, frame.right, frame.bottom, 'stroke-opacity=".6"')
        else:
            self.svg.line(frame.left, frame.bottom, frame.right, frame.bottom, 'stroke-opacity=".6"')
            if self.panel.y.kind == "category":
                for value, _ in marks:
                    self.svg.line(self.x(value), frame.top, self.x(value), frame.bottom, 'stroke-opacity=".15"')
        for value, words in marks[::every]:
            at = self.x(value)
            half = text_width(words, 10) / 2
            at = min(at, self.svg.width - 4 - half)
            bold = words.startswith("▸")
            self.svg.text(at, frame.bottom + 14, words, anchor="middle", size=10, soft=not bold, bold=bold)
        bottom = frame.bottom + (18 if marks else 4)
        if axis.label:
            anchor, at = ("end", frame.right) if axis.kind != "category" else ("middle", (frame.left + frame.right) / 2)
            for line in wrap(axis.label, max(6, int((frame.right - frame.left) / 6.2))):
                self.svg.text(at, bottom + 9, line, anchor=anchor, size=10.5, soft=True)
                bottom += 13
        return bottom

    def _mark(self, mark: Mark) -> None:
        match mark:
            case Bars():
                self._series(mark, self._bars, at=mark.at, start=mark.start, end=mark.end)
            case Lines():
                self._series(mark, self._line, x=mark.x, y=mark.y)
            case Points():
                self._series(mark, self._points, x=mark.x, y=mark.y)
            case Area():
                self._series(mark, self._area, x=mark.x, low=mark.low, high=mark.high)
            case Rule():
                self._rule(mark)
            case Span():
                left, right = (self.x(mark.first - 0.42), self.x(mark.last + 0.42))
                top = self.frame.top - 4
                self.svg.path(f"M{left:.1f} {top:.1f}v-5h{right - left:.1f}v5", 'fill="none" stroke="currentColor"')
                words = fit([mark.words, mark.words.split()[-1]], right - left, 10)
                self.svg.text((left + right) / 2, top - 8, words, anchor="middle", size=10, bold=True)
            case Text():
                y = self.y(mark.y) + (3.6 if self.panel.y.kind == "category" else 0)
                self.svg.text(self.x(mark.x), y, mark.words, anchor=mark.anchor, size=10)
            case Band():
                pass  # below the grid

    def _series(
        self, mark: Bars | Lines | Points | Area, draw: Callable[..., None], **columns: tuple[float, ...]
    ) -> None:
        data = " ".join(
            f'data-{name}="{" ".join(f"{value:.6g}" for value in values)}"' for name, values in columns.items()
        )
        kind = type(mark).__name__.lower()
        self.svg.raw(f'<g data-series="{escape(mark.name, quote=True)}" data-kind="{kind}" {data}>')
        draw(mark)
        self.svg.raw("</g>")

    def _bars(self, mark: Bars) -> None:
        fill = self.svg.fill(mark.look)
        boxes = []
        for at, start, end in zip(mark.at, mark.start, mark.end, strict=True):
            along = sorted((self.x(start), self.x(end)) if mark.across else (self.y(start), self.y(end)))
            place = self.y if mark.across else self.x
            across = sorted((place(at - mark.width / 2), place(at + mark.width / 2)))
            boxes.append((along, across) if mark.across else (across, along))
        if len(boxes) > MOST_BARS:
            shapes = "".join(
                f"M{x[0]:.1f} {y[0]:.1f}h{x[1] - x[0]:.1f}v{y[1] - y[0]:.1f}H{x[0]:.1f}z"
                for x, y in boxes
                if x[1] - x[0] >= 0.05 and y[1] - y[0] >= 0.05
            )
            self.svg.path(shapes, f'fill="{fill}"', mark.name) if shapes else None
            return
        edge = EDGE if len(boxes) <= 64 else ""
        self.taken += [(x[0], y[0], x[1], y[1]) for x, y in boxes]
        for i, (x, y) in enumerate(boxes):
            wide, high = x[1] - x[0], y[1] - y[0]
            if wide >= 0.05 and high >= 0.05:
                self.svg.rect(x[0], y[0], wide, high, fill, mark.hover[i], edge)
                if mark.framed and mark.framed[i] and wide > 3:
                    inside = f'stroke="{LABEL_INK}" stroke-width="1.8" pointer-events="none"'
                    self.svg.rect(x[0] + 1.4, y[0] + 1.4, wide - 2.8, high - 2.8, "none", extra=inside)
        for i, (x, y) in enumerate(boxes):
            if mark.labels and mark.labels[i]:
                self._bar_label(mark, mark.labels[i], x, y)

    def _bar_label(self, mark: Bars, words: str, x: list[float], y: list[float]) -> None:
        wide, high = x[1] - x[0], y[1] - y[0]
        size = 11 if high >= 15 or not mark.across else 10
        needs = text_width(words, size) + (6 if mark.across else 2)
        inside = mark.label != "end" and wide >= needs and high >= 12
        if inside:
            halo = f'stroke="{mark.look.fill}" stroke-width="3" paint-order="stroke"'
            middle = (y[0] + y[1]) / 2 + 3.8
            self.svg.text((x[0] + x[1]) / 2, middle, words, anchor="middle", size=size, ink=LABEL_INK, extra=halo)
        elif mark.label != "inside" and mark.across:
            self.svg.text(x[1] + 5, (y[0] + y[1]) / 2 + 3.8, words, size=size)
        elif mark.label != "inside" and needs <= wide + 10:
            self.svg.text((x[0] + x[1]) / 2, y[0] - 4, words, anchor="middle", size=10)

    def _line(self, mark: Lines) -> None:
        spots = [(self.x(x), self.y(y)) for x, y in zip(mark.x, mark.y, strict=True)]
        corners = spots[:1]
        for before, there in itertools.pairwise(spots):
            corners += [(there[0], before[1])] if mark.step == "hv" else []
            corners += [(before[0], there[1])] if mark.step == "vh" else []
            corners.append(there)
        if len(corners) > 1:
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
            self.taken += [
                (min(a, c) - 2, min(b, d) - 2, max(a, c) + 2, max(b, d) + 2)
                for (a, b), (c, d) in pairwise(corners)
                if a == c or b == d
            ]
            self.svg.path(f"M{points}", line_style(mark), mark.name)
        if mark.markers or len(spots) == 1:
            radius = 2.6 + mark.width / 2
            for i, (x, y) in enumerate(spots):
                ink = f'fill="{mark.colour or "currentColor"}"'
                hover = mark.hover[i] if mark.hover else self._hover(mark.name, mark.x[i], mark.y[i])
                self.svg.path(outline(mark.symbol, x, y, radius), ink, hover)

    def _area(self, mark: Area) -> None:
        corners = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in mark.corners())
        self.svg.path(f"M{corners}z", f'fill="{self.svg.fill(mark.look)}" {EDGE}', mark.hover or mark.name)

    def _hover(self, name: str, x: float, y: float) -> str:
        axes = (self.panel.x, x), (self.panel.y, y)
        hover = [f"{axis.label} {axis.text(value)}" for axis, value in axes if axis.kind != "category"]
        return f"{name}\n{', '.join(hover)}"

    def _points(self, mark: Points) -> None:
        ink = marker_style(mark)
        spots = [(self.x(x), self.y(y)) for x, y in zip(mark.x, mark.y, strict=True)]
        if len(spots) > MOST_POINTS:
            places = {(round(2 * x), round(2 * y)): (x, y) for x, y in spots}
            self.svg.path("".join(outline(mark.symbol, x, y, mark.size) for x, y in places.values()), ink, mark.name)
            return
        for i, (x, y) in enumerate(spots):
            hover = mark.hover[i] if mark.hover else self._hover(mark.name, mark.x[i], mark.y[i])
            self.svg.path(outline(mark.symbol, x, y, mark.size), f'{ink} pointer-events="all"', hover)
            self.taken.append((x - 5, y - 5, x + 5, y + 5))
        for words, (x, y) in zip(mark.labels, spots, strict=False):
            self._beside(x, y, words)

    def _beside(self, x: float, y: float, words: str, size: float = 10.5) -> None:
        """Words at a marker, on free space; a line joins them if they are further off."""
        wide, high = text_width(words, size), size * 1.2
        frame = self.frame
        spots = [(9.0, 0.0), (-9.0 - wide, 0.0)]
        for far in (1.0, 2.0, 3.0, 4.0, 5.0):
            down = far * high + 2
            spots += [(right, way * down) for way in (-1, 1) for right in (9 * (far > 1), -wide, -wide / 2)]
        for right, down in spots:
            box = (x + right, y + down - high / 2, x + right + wide, y + down + high / 2)
            inside = box[0] >= frame.left and box[1] >= frame.top and box[2] <= frame.right and box[3] <= frame.bottom
            if words and inside and not any(_overlap(box, other) for other in self.taken):
                self.taken.append(box)
                if abs(down) > 14:
                    near, edge = min(max(x, box[0]), box[2]), box[1] if down > 0 else box[3]
                    self.svg.line(x, y, near, edge, 'stroke-opacity=".5" stroke-width=".8"')
                self.svg.text(box[0], y + down + size * 0.35, words, size=size)
                return

    def _band(self, mark: Band) -> None:
        frame = self.frame
        left, right = (frame.left, frame.right) if mark.x is None else sorted(map(self.x, mark.x))
        top, bottom = (frame.top, frame.bottom) if mark.y is None else sorted(map(self.y, mark.y))
        left, right = max(left, frame.left), min(right, frame.right)
        top, bottom = max(top, frame.top), min(bottom, frame.bottom)
        if right > left and bottom > top:
            self.svg.rect(left, top, right - left, bottom - top, mark.colour, mark.name, 'fill-opacity=".16"')

    def _rule(self, mark: Rule) -> None:
        frame = self.frame
        extra = f'stroke-width="1.6" stroke-dasharray="{mark.dash}"' + (
            f' style="stroke:{mark.colour}"' if mark.colour else ' stroke-opacity=".7"'
        )
        if mark.x is not None:
            at = self.x(mark.x)
            self.svg.line(at, frame.top - 2, at, frame.bottom, extra)
            if mark.words:
                half = text_width(mark.words, 10) / 2
                middle = min(max(at, frame.left + half), frame.right - half)
                self.svg.text(middle, frame.top - 5, mark.words, anchor="middle", size=10)
        elif mark.y is not None:
            level = self.y(mark.y)
            self.svg.line(frame.left, level, frame.right, level, extra)
            self.taken.append((frame.left, level - 3, frame.right, level + 3))
            if mark.words:
                words = fit([mark.words], frame.right - frame.left - 6, 10)
                below = level - 5 if level - 16 > frame.top else level + 12
                self.svg.text(frame.left + 6, below, words, size=10)
                box = (frame.left + 6, below - 9, frame.left + 6 + text_width(words, 10), below + 3)
                self.taken.append(box)


def line_style(mark: Lines) -> str:
    """The attributes of a line's path."""
    dashed = f' stroke-dasharray="{mark.dash}"' if mark.dash else ""
    colour = mark.colour or "currentColor"
    return f'fill="none" stroke="{colour}" stroke-width="{mark.width:.1f}" stroke-linejoin="round"{dashed}'


def marker_style(mark: Points) -> str:
    """The attributes of a marker's path."""
    colour = mark.colour or "currentColor"
    fill = f'fill="{colour}"' if mark.filled else 'fill="none"'
    return f'{fill} stroke="{colour}" stroke-width="1.4"'


def _legend(svg: Svg, chart: Chart, y: float, width: float) -> float:
    """Swatches with names; returns the y below. One unnamed kind of mark needs none."""
    entries = chart.legend
    if len(entries) < 2 and not any(isinstance(mark, Band) for mark in entries.values()):
        return y
    x, y = MARGIN, y + 4
    for name, mark in entries.items():
        name = fit([name], width - 2 * MARGIN - 34, 11)
        room = 34 + text_width(name, 11) + 14
        if x > MARGIN and x + room > width - MARGIN + 14:
            x, y = MARGIN, y + 18
        _swatch(svg, mark, x, y)
        svg.text(x + 34, y + 9.5, name)
        x += room
    return y + 20


def _swatch(svg: Svg, mark: Mark, x: float, y: float) -> None:
    match mark:
        case Bars() | Area():
            svg.rect(x, y, 26, 11, svg.fill(mark.look), extra='stroke="currentColor" stroke-opacity=".5"')
        case Band():
            svg.rect(x, y, 26, 11, mark.colour, extra='fill-opacity=".16" stroke="currentColor" stroke-opacity=".5"')
        case Lines():
            svg.path(f"M{x:.1f} {y + 6:.1f}h28", line_style(mark))
            if mark.markers:
                svg.path(outline(mark.symbol, x + 14, y + 6, 4), f'fill="{mark.colour or "currentColor"}"')
        case Points():
            svg.path(outline(mark.symbol, x + 14, y + 6, min(max(4.0, mark.size), 7.0)), marker_style(mark))


def _overlap(one: Iterable[float], other: Iterable[float]) -> bool:
    (left, top, right, bottom), (l2, t2, r2, b2) = one, other
    return left < r2 and l2 < right and top < b2 and t2 < bottom
