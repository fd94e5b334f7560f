"""Axes with a strip at the end for what lies beyond, and labels that keep out of each other's way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from recshard_lab.lab.draw.svg import text_width

STRIP = 26.0  # pixels


@dataclass(frozen=True)
class Axis:
    """Values from ``low`` to ``high`` on pixels from ``start`` to ``end``; larger ones stand in a strip beyond.

    >>> axis = Axis(0.0, 10.0, 100.0, 200.0, beyond=True)
    >>> axis.at(5.0), axis.at(99.0), axis.beyond_from
    (137.0, 187.0, 174.0)
    """

    low: float
    high: float
    start: float
    end: float
    beyond: bool = False

    @property
    def beyond_from(self) -> float:
        """Where the strip begins; the axis' end where there is none."""
        return self.end - (STRIP if self.end > self.start else -STRIP) * self.beyond

    def at(self, value: float) -> float:
        """The pixel of a value."""
        if value > self.high and self.beyond:
            return (self.beyond_from + self.end) / 2
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return self.start + share * (self.beyond_from - self.start)


@dataclass
class Labels:
    """Places words beside marks: where nothing else stands yet, within a box.

    Args:
        box: left, top, right, bottom.
    """

    box: tuple[float, float, float, float]
    taken: list[tuple[float, float, float, float]] = field(default_factory=list)

    def block(self, left: float, top: float, right: float, bottom: float) -> None:
        """Keeps an area free of words."""
        self.taken.append((left, top, right, bottom))

    def place(self, x: float, y: float, words: str, size: float = 10.5, gap: float = 9.0) -> tuple[float, float] | None:
        """Left end and baseline for words at a mark: beside it, above, below, further off; None where all is taken.

        >>> labels = Labels((0, 0, 200, 100))
        >>> [labels.place(100, 50, words)[0] for words in ("first", "second")]  # right of it, then left
        [109.0, 53.2]
        """
        wide, high = text_width(words, size), size * 1.2
        ways = [(gap, 0.0), (-gap - wide, 0.0)]
        for far in (1.0, 2.0, 3.0, 4.0, 5.0):
            off = far * high + 2
            ways += [(gap * (far > 1), -off), (-wide, -off), (gap * (far > 1), off), (-wide, off), (-wide / 2, off)]
        for right, down in ways:
            left, middle = x + right, y + down
            area = (left, middle - high / 2, left + wide, middle + high / 2)
            inside = area[0] >= self.box[0] and area[1] >= self.box[1]
            inside = inside and area[2] <= self.box[2] and area[3] <= self.box[3]
            if inside and not any(_overlap(area, other) for other in self.taken):
                self.taken.append(area)
                return left, middle + size * 0.35
        return None


def _overlap(one: Sequence[float], other: Sequence[float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
