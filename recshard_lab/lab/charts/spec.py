"""What a chart is: panels with two axes each, marks on them, a legend that follows from the marks, and a caption.

Values are numbers in the axes' units. Nothing here knows the pixels of a page or a renderer. On a category axis the
first category is at 0, the second at 1; bars may be at fractions. A vertical category axis runs downwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, TypeAlias

from recshard_lab.lab.draw.theme import WARNING, Look, bytes_text, ms_text, number, ticks

Kind = Literal["linear", "log2", "log10", "category"]
Unit = Literal["", "count", "ms", "bytes", "%", "share"]
PAGE_INK = ""  # the colour of the page's text


@dataclass(frozen=True)
class Axis:
    """One axis of a panel.

    Args:
        kind: of the scale.
        low, high: its range, in values.
        label: what it shows.
        unit: how its ticks are written.
        ticks: values that have a tick. Default: round values within the range.
        categories: names of the places 0, 1, 2, ... of a category axis.

    Raises:
        ValueError: an empty or infinite range, or a logarithmic one that begins at 0.
    """

    kind: Kind
    low: float
    high: float
    label: str = ""
    unit: Unit = ""
    ticks: tuple[float, ...] = ()
    categories: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ValueError(f"the axis {self.label!r} has the range {self.low} to {self.high}: low must be below high")
        if self.kind.startswith("log") and self.low <= 0:
            raise ValueError(f"the logarithmic axis {self.label!r} begins at {self.low}: it must begin above 0")

    def share(self, value: float) -> float:
        """Where a value is, from 0 at `low` to 1 at `high`.

        >>> Axis("log10", 1, 100).share(10), Axis("linear", 0, 50).share(10)
        (0.5, 0.2)
        """
        if self.kind.startswith("log"):
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def marks(self) -> list[tuple[float, str]]:
        """Value and text of each tick.

        >>> Axis("linear", 0, 5, unit="ms").marks()[:2], Axis("log2", 4, 33).marks()
        ([(0.0, '0'), (1.0, '1 ms')], [(4.0, '4'), (8.0, '8'), (16.0, '16'), (32.0, '32')])
        """
        if self.kind == "category":
            return [(float(i), name) for i, name in enumerate(self.categories)]
        return [(value, self.text(value)) for value in self.ticks or self._round()]

    def text(self, value: float) -> str:
        """A value as a tick writes it."""
        if not value:
            return f"0{'%' if self.unit in ('%', 'share') else ''}"
        if self.unit == "share":
            return f"{number(100 * value)}%"
        if self.unit == "count":
            size, letter = next(((s, n) for s, n in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if value >= s), (1.0, ""))
            return f"{number(value / size)}{letter}"
        written = {"ms": ms_text, "bytes": bytes_text, "%": lambda share: f"{number(share)}%"}.get(self.unit)
        return written(value) if written else number(value, 4)

    def _round(self) -> list[float]:
        if self.kind == "linear":
            return ticks(self.low, self.high)
        base = 2.0 if self.kind == "log2" else 10.0
        first, last = (edge(math.log(at, base) + tiny) for edge, at, tiny in (
            (math.ceil, self.low, -1e-9), (math.floor, self.high, 1e-9)))  # fmt: skip
        powers = [base**power for power in range(first, last + 1)]
        if self.kind == "log2" or len(powers) >= 3:
            return powers
        every = (factor * 10.0**power for power in range(first - 1, last + 1) for factor in (1, 2, 5))
        return [value for value in every if self.low <= value <= self.high] or [self.low, self.high]


@dataclass(frozen=True)
class Bars:
    """Bars of one series: each at a place of the category axis, from one value to another.

    Args:
        name: in the legend; series of one name have one entry.
        look: fill and hatching.
        at, start, end: of each bar.
        hover: of each bar.
        labels: of each bar; empty texts are left out.
        label: "inside" where there is room, "end" always beyond the bar, "auto" inside, else beyond.
        width: of a bar, where the places of the category axis are 1 apart.
        across: the bars are horizontal.
        framed: of each bar, whether it is outlined.
        legend: whether the legend names the series.
    """

    name: str
    look: Look
    at: tuple[float, ...]
    start: tuple[float, ...]
    end: tuple[float, ...]
    hover: tuple[str, ...]
    labels: tuple[str, ...] = ()
    label: Literal["inside", "end", "auto"] = "inside"
    width: float = 0.8
    across: bool = False
    framed: tuple[bool, ...] = ()
    legend: bool = True

    def __post_init__(self) -> None:
        _check(self.name, self.at, self.start, self.end)
        _check_texts(self.name, len(self.at), self.hover, self.labels, self.framed)


@dataclass(frozen=True)
class Lines:
    """One line. ``step`` "hv" goes across before it goes up, "vh" the other way, "" straight.

    Args:
        name, legend: as of `Bars`.
        x, y: of its points.
        colour, dash, symbol: a line has no area to hatch: the three differ together.
        width: in pixels.
        markers: whether each point has a marker.
        hover: of each point; without, the renderer writes its values.
    """

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    colour: str = PAGE_INK
    dash: str = ""
    symbol: str = "circle"
    width: float = 2.0
    markers: bool = False
    step: Literal["", "hv", "vh"] = ""
    hover: tuple[str, ...] = ()
    legend: bool = True

    def __post_init__(self) -> None:
        _check(self.name, self.x, self.y)
        _check_texts(self.name, len(self.x), self.hover)


@dataclass(frozen=True)
class Points:
    """Markers.

    Args:
        name, legend: as of `Bars`.
        x, y: of each.
        symbol, colour, filled, size: the same for all; size is a radius in pixels.
        hover, labels: of each; labels are written beside the marker.
    """

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    symbol: str = "circle"
    colour: str = PAGE_INK
    filled: bool = True
    size: float = 4.0
    hover: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    legend: bool = True

    def __post_init__(self) -> None:
        _check(self.name, self.x, self.y)
        _check_texts(self.name, len(self.x), self.hover, self.labels)


@dataclass(frozen=True)
class Area:
    """The area of one series between two values that hold until the next x, as one layer of a stack.

    Args:
        name, look, legend: as of `Bars`.
        x: where the values change, ascending.
        low, high: from each x on.
        hover: of the whole area.
    """

    name: str
    look: Look
    x: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    hover: str = ""
    legend: bool = True

    def __post_init__(self) -> None:
        _check(self.name, self.x, self.low, self.high)

    def corners(self) -> list[tuple[float, float]]:
        """Its outline: along the upper side, and back along the lower one.

        >>> Area("dense", Look("dense", "#d3bdea", "dots"), (0, 1), (0, 0), (5, 7)).corners()
        [(0, 5), (1, 5), (1, 7), (1, 0), (1, 0), (0, 0)]
        """
        places = [x for x in self.x for _ in range(2)][1:]
        upper, lower = (
            list(zip(places, [value for value in values for _ in range(2)][:-1], strict=True))
            for values in (self.high, self.low)
        )
        return [*upper, *reversed(lower)]


@dataclass(frozen=True)
class Band:
    """A shaded area; None reaches over the whole panel."""

    name: str
    x: tuple[float, float] | None = None
    y: tuple[float, float] | None = None
    colour: str = WARNING
    legend: bool = True


@dataclass(frozen=True)
class Rule:
    """A straight line over the panel at an x or a y, with a text at it."""

    x: float | None = None
    y: float | None = None
    words: str = ""
    colour: str = PAGE_INK
    dash: str = "6 3"

    def __post_init__(self) -> None:
        if (self.x is None) == (self.y is None):
            raise ValueError(f"the rule {self.words!r} needs either x or y, got {self.x} and {self.y}")


@dataclass(frozen=True)
class Span:
    """A bracket with a name over several places of a horizontal category axis: first place, last place."""

    first: float
    last: float
    words: str


@dataclass(frozen=True)
class Text:
    """A text on the panel."""

    x: float
    y: float
    words: str
    anchor: Literal["start", "middle", "end"] = "middle"


Mark: TypeAlias = Bars | Lines | Points | Area | Band | Rule | Span | Text
Series = (Bars, Lines, Points, Area)


@dataclass(frozen=True)
class Panel:
    """Two axes and what is drawn on them.

    Args:
        x, y: the axes. Panels of one row with equal y axes share it, panels below each other equal x axes.
        marks: later ones are drawn on top.
        title: of the panel.
        height: of the plot, in pixels.
        share: of the row's width, in proportion to the others.
    """

    x: Axis
    y: Axis
    marks: tuple[Mark, ...]
    title: str = ""
    height: float = 230.0
    share: float = 1.0


@dataclass(frozen=True)
class Chart:
    """A figure: rows of panels under a title.

    Args:
        title: what is shown.
        caption: what it says, in a sentence or two that are written for this figure. Also its text alternative.
        rows: of panels, from the top.
        note: below it: how to read it, where the data come from.
        warn: whether the caption is a warning.

    Raises:
        ValueError: no title, no caption, or no panel.
    """

    title: str
    caption: str
    rows: tuple[tuple[Panel, ...], ...]
    note: str = ""
    warn: bool = False

    def __post_init__(self) -> None:
        for what in ("title", "caption"):
            if not getattr(self, what).strip():
                raise ValueError(f"the chart {self.title!r} has no {what}. Fix: say in a sentence what it shows")
        if not self.rows or not all(self.rows):
            raise ValueError(f"the chart {self.title!r} has a row without a panel")

    @property
    def panels(self) -> list[Panel]:
        return list(chain.from_iterable(self.rows))

    @property
    def legend(self) -> dict[str, Mark]:
        """Name -> the first mark of that name, of those that the legend names; empty where one would say nothing."""
        named: dict[str, Mark] = {}
        for mark in chain.from_iterable(panel.marks for panel in self.panels):
            if isinstance(mark, (*Series, Band)) and mark.legend and mark.name:
                named.setdefault(mark.name, mark)
        return named


def bars(name: str, look: Look, rows: Iterable[tuple[float, float, float, str, str]], **style: Any) -> list[Mark]:
    """A series of `Bars` from rows of place, start, end, tooltip and label; no series without rows.

    >>> bars("step", Look("step", "#9cc4ee", "plain"), [(0, 0.0, 2.5, "rank 0", "2.5 ms")])[0].end
    (2.5,)
    """
    rows = list(rows)
    if not rows:
        return []
    at, start, end, hover, labels = zip(*rows, strict=True)
    at, start, end = (tuple(map(float, values)) for values in (at, start, end))
    return [Bars(name, look, at, start, end, hover, labels if any(labels) else (), **style)]


def points(name: str, rows: Iterable[tuple[float, float, str, str]], **style: Any) -> list[Mark]:
    """A series of `Points` from rows of x, y, tooltip and label; no series without rows."""
    rows = list(rows)
    if not rows:
        return []
    x, y, hover, labels = zip(*rows, strict=True)
    x, y = tuple(map(float, x)), tuple(map(float, y))
    return [Points(name, x, y, hover=hover, labels=labels if any(labels) else (), **style)]


def categories(names: Iterable[str], label: str = "") -> Axis:
    """An axis of names.

    >>> categories(["a", "b"]).high
    1.5
    """
    names = tuple(names)
    return Axis("category", -0.5, max(1, len(names)) - 0.5, label, categories=names)


def linear(
    values: Iterable[float],
    label: str = "",
    unit: Unit = "",
    *,
    extent: float = 0.0,
    zero: bool = True,
    pad: float = 0.04,
) -> Axis:
    """A linear axis on which all values fit.

    Args:
        values: finite numbers.
        extent: a value that fills the axis, where several charts are to one scale; 0 for the largest of `values`.
        zero: whether it includes 0.
        pad: room beyond the values, as a share of the range.

    >>> linear([2.0, 10.0]).high, linear([2.0], extent=50.0).high, linear([2.0, 4.0], zero=False, pad=0.5).low
    (10.4, 52.0, 1.0)
    """
    held = [*values, *([extent] if extent else []), *([0.0] if zero else [])] or [0.0]
    low, high = min(held), max(held)
    if low == high:
        aside = abs(low) * 0.1 or 1.0
        low, high = (low - aside * (not zero), high + aside)
    room = pad * (high - low)
    return Axis("linear", low - room * (not zero or low < 0), high + room * (not zero or high > 0), label, unit)


def log(
    values: Iterable[float], label: str = "", unit: Unit = "", *, base: int = 10, ticks: Sequence[float] = ()
) -> Axis:
    """A logarithmic axis on which all values, which are above 0, fit.

    >>> axis = log([8, 16, 32], base=2)
    >>> axis.kind, axis.low < 8, axis.marks()
    ('log2', True, [(8.0, '8'), (16.0, '16'), (32.0, '32')])
    """
    held = list(values)
    low, high = min(held), max(held)
    room = (high / low) ** 0.04 if high > low else 1.4
    return Axis("log2" if base == 2 else "log10", low / room, high * room, label, unit, tuple(ticks))


def room_for(bars: Iterable[tuple[float, str]], pixels: float, size: float = 11.0, inside: bool = True) -> float:
    """The largest value of an axis from 0 on which each bar and its label fit.

    Args:
        bars: end and label of each.
        pixels: about the width of the plot.
        inside: whether a label may be in its bar.

    >>> room_for([(10.0, "10 ms")], 100), round(room_for([(10.0, "10 ms")], 100, inside=False))
    (10.0, 16)
    """
    sized = [(value, len(words) * size * 0.6 + 6 if words else 0.0) for value, words in bars]
    high = max((value for value, _ in sized), default=0.0) or 1.0
    for _ in range(20):
        before = high
        for value, wide in sized:
            long = value / high * pixels
            if not (inside and long >= wide + 4) and long + wide > pixels:
                high = max(high, value * pixels / max(pixels - wide, 0.12 * pixels))
        if high == before:
            break
    return high


def _check(name: str, *columns: Sequence[float]) -> None:
    if len({len(column) for column in columns}) > 1:
        raise ValueError(f"the series {name!r} has columns of {[len(column) for column in columns]} values")
    if not all(math.isfinite(value) for value in chain.from_iterable(columns)):
        raise ValueError(f"the series {name!r} has a value that is not a number. Fix: leave it out")


def _check_texts(name: str, count: int, *texts: Sequence[object]) -> None:
    if any(each and len(each) != count for each in texts):
        raise ValueError(f"the series {name!r} has {count} marks and {[len(each) for each in texts]} texts")
