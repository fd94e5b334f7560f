"""Outlines of the markers that plotly has too, by plotly's names."""

from __future__ import annotations

import itertools
from functools import lru_cache
from math import cos, pi, sin


def _polygon(corners: int, turn: float = 0.0) -> list[tuple[float, float]]:
    angles = (2 * pi * i / corners - pi / 2 + turn for i in range(corners))
    return [(cos(angle), sin(angle)) for angle in angles]


def _plus(half: float, turn: float = 0.0) -> list[tuple[float, float]]:
    corners = [(-half, -1), (half, -1), (half, -half), (1, -half), (1, half), (half, half)]
    corners += [(half, 1), (-half, 1), (-half, half), (-1, half), (-1, -half), (-half, -half)]
    return [(x * cos(turn) - y * sin(turn), x * sin(turn) + y * cos(turn)) for x, y in corners]


SYMBOLS: dict[str, list[tuple[float, float]]] = {
    "square": [(-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)],
    "diamond": _polygon(4),
    "triangle-up": _polygon(3),
    "triangle-down": _polygon(3, pi),
    "triangle-right": _polygon(3, pi / 2),
    "pentagon": _polygon(5),
    "hexagon": _polygon(6),
    "cross": _plus(0.34),
    "x": _plus(0.3, pi / 4),
    "star": [
        (radius * x, radius * y) for i, (x, y) in enumerate(_polygon(10)) for radius in ((0.45 if i % 2 else 1.0),)
    ],
    "line-ns": [(-0.14, -1), (0.14, -1), (0.14, 1), (-0.14, 1)],
    "line-ew": [(-1, -0.14), (1, -0.14), (1, 0.14), (-1, 0.14)],
}


def outline(symbol: str, x: float, y: float, radius: float) -> str:
    """The SVG path of a marker, its centre at ``(x, y)``.

    >>> outline("square", 10, 10, 10)
    'M10 10m-8.5 -8.5l17 0l0 17l-17 0z'
    """
    return f"M{_short(x)} {_short(y)}{_around(symbol, radius)}"


@lru_cache(256)
def _around(symbol: str, radius: float) -> str:
    if symbol == "circle":
        r, arc = _short(radius), f"a{_short(radius)} {_short(radius)} 0 1 0"
        return f"m-{r} 0{arc} {_short(2 * radius)} 0{arc} -{_short(2 * radius)} 0z"
    corners = [(radius * x, radius * y) for x, y in SYMBOLS[symbol]]
    steps = [f"m{_short(corners[0][0])} {_short(corners[0][1])}"]
    steps += [
        f"l{_short(x - before_x)} {_short(y - before_y)}"
        for (before_x, before_y), (x, y) in itertools.pairwise(corners)
    ]
    return "".join(steps) + "z"


def _short(value: float) -> str:
    text = f"{value:.1f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text
