"""Wire formats: the error of each communication codec against the bytes that it sends, measured on given rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from recshard_lab.comm import CodecError
from recshard_lab.lab.draw.axes import Labels
from recshard_lab.lab.draw.rank_columns import MARGIN
from recshard_lab.lab.draw.svg import Svg, text_width
from recshard_lab.lab.draw.theme import LABEL_INK, SPARE, bytes_text, number, ticks, with_notes
from recshard_lab.lab.draw.view import View, message_view
from recshard_lab.lab.views.registry import register_view
from recshard_lab.text_table import TextTable

LEFT, HEIGHT = 74.0, 210.0


def codec_errors(rows: Any) -> dict[str, CodecError]:
    """The measured error of every format on rows ``[..., w]``, by its name.

    Args:
        rows: a tensor of floating point rows, such as pooled rows or their gradients.

    >>> import torch
    >>> found = codec_errors(torch.linspace(-1, 1, 64).view(4, 16))
    >>> found["fp32"].max_abs, found["fp16"].encoded_bytes, found["fp32"].encoded_bytes
    (0.0, 128, 256)
    """
    from recshard_lab.comm import CommType, codec_error

    return {str(kind): codec_error(kind, rows) for kind in CommType}


@register_view("Wire formats", place=24)
def wire_formats(codec_errors: Mapping[str, CodecError], *, note: str = "", width: int = 860) -> View:
    """Error of communication codecs against bytes on the wire: largest, mean, and the bound of the format.

    Args:
        codec_errors: format -> its measured error, as `codec_errors` returns it for rows.
        note: a sentence under the summary, such as whose rows they are.
        width: of the picture, in pixels.
    """
    title = "Wire formats: error against bytes"
    found = dict(codec_errors)
    if not found or not any(one.plain_bytes for one in found.values()):
        return message_view("wire_formats", title, "No format was measured on any row.")
    numbers = TextTable(
        ("format", "bytes", "of plain", "largest error", "mean error", "bound", "within", "saturated"),
        [
            [
                name,
                bytes_text(one.encoded_bytes),
                f"{number(100 * one.encoded_bytes / max(1, one.plain_bytes), 3)}%",
                number(one.max_abs),
                number(one.mean_abs),
                number(one.bound),
                "yes" if one.within else "NO",
                f"{one.saturated:,}",
            ]
            for name, one in found.items()
        ],
    )
    smallest = min(found.values(), key=lambda one: one.encoded_bytes)
    share = number(100 * smallest.encoded_bytes / max(1, smallest.plain_bytes), 3)
    summary = f"{smallest.codec} sends {share}% of the bytes, with a largest error of {number(smallest.max_abs)}."
    if beyond := [name for name, one in found.items() if not one.within]:
        summary += f" Beyond its bound: {', '.join(beyond)}."
    if cut := [name for name, one in found.items() if one.saturated]:
        summary += f" Values were saturated by {', '.join(cut)}."
    summary = with_notes(summary, [note.removesuffix(".")])
    return View(
        "wire_formats",
        title,
        summary,
        numbers,
        lambda uid: _draw(found, title, summary, width, uid),
    )


def _draw(found: Mapping[str, CodecError], title: str, summary: str, width: int, uid: str) -> Svg:
    svg = Svg(width, 0, title, summary, uid)
    top = svg.head(title, summary, MARGIN, warn=not all(one.within for one in found.values())) + 26
    bottom, right = top + HEIGHT, width - MARGIN - 8
    positive = [v for one in found.values() for v in (one.max_abs, one.mean_abs, one.bound) if np.isfinite(v) and v > 0]
    low, high = (np.floor(np.log10(min(positive))), np.ceil(np.log10(max(positive)))) if positive else (-1.0, 0.0)
    high = high if high > low else low + 1
    most = 108.0 * max(one.encoded_bytes / max(1, one.plain_bytes) for one in found.values())
    zero = bottom  # errors of zero are on the floor, below the logarithmic part
    floor = bottom - 26

    def y_of(error: float) -> float:
        if not error > 0:
            return zero
        return floor - (floor - top) * (float(np.log10(error)) - float(low)) / (float(high) - float(low))

    def x_of(share: float) -> float:
        return LEFT + (right - LEFT) * share / most

    for power in range(int(low), int(high) + 1):
        y = y_of(10.0**power)
        svg.line(LEFT, y, right, y, 'stroke-opacity=".18"')
        svg.text(LEFT - 7, y + 4, f"1e{power}", anchor="end", size=10)
    svg.text(LEFT - 7, zero + 4, "0", anchor="end", size=10)
    svg.line(LEFT, zero, right, zero)
    for tick in ticks(0, most):
        svg.line(x_of(tick), zero, x_of(tick), zero + 4)
        svg.text(x_of(tick), zero + 16, f"{number(tick)}%", anchor="middle", size=10)
    svg.text(MARGIN, top - 12, "error", size=10)
    svg.text(right, zero + 31, "bytes on the wire, as a share of the plain rows", anchor="end", size=10)
    labels, spots = Labels((LEFT, top - 10, right, bottom + 2)), []
    same: dict[int, int] = {}  # bytes -> formats drawn there, which are side by side
    for place, (name, one) in enumerate(found.items()):
        aside = 26 * same.get(one.encoded_bytes, 0)
        same[one.encoded_bytes] = same.get(one.encoded_bytes, 0) + 1
        x = x_of(100 * one.encoded_bytes / max(1, one.plain_bytes)) + aside
        fill = SPARE[place % len(SPARE)][0]
        hover = f"{name}: largest {number(one.max_abs)}, mean {number(one.mean_abs)}, bound {number(one.bound)}"
        heights = [y_of(v) for v in (one.max_abs, one.mean_abs, one.bound) if np.isfinite(v)]
        if heights:
            svg.line(x, max(heights), x, min(heights), 'stroke-width="1.4"')
            labels.block(x - 11, min(heights) - 4, x + 11, max(heights) + 4)
        if np.isfinite(one.bound):
            svg.line(x - 9, y_of(one.bound), x + 9, y_of(one.bound), 'stroke-width="2.4"')
        for value, shape in ((one.max_abs, "square"), (one.mean_abs, "circle")):
            if np.isfinite(value):
                _mark(svg, x, y_of(value), shape, fill, hover)
        at = y_of(one.max_abs) if np.isfinite(one.max_abs) else zero
        spots.append((x, at, f"{name} {bytes_text(one.encoded_bytes)}" + ("" if one.within else ", beyond its bound")))
    for x, at, words in spots:
        if spot := labels.place(x, at, words, 11.5, 14):
            svg.text(*spot, words, bold=True)
    x, y = MARGIN, zero + 52
    for shape, words in (("square", "largest error"), ("circle", "mean error"), ("bar", "bound of the format")):
        room = 46 + text_width(words, 11)
        if x > MARGIN and x + room > width - MARGIN:
            x, y = MARGIN, y + 18
        if shape == "bar":
            svg.line(x, y - 4, x + 18, y - 4, 'stroke-width="2.4"')
        else:
            _mark(svg, x + 9, y - 4, shape, "#c9ced6", "")
        svg.text(x + 26, y, words)
        x += room
    svg.height = y + 10
    return svg


def _mark(svg: Svg, x: float, y: float, shape: str, fill: str, hover: str) -> None:
    edge = f'stroke="{LABEL_INK}" stroke-width=".8"'
    if shape == "square":
        svg.rect(x - 5, y - 5, 10, 10, fill, hover, edge)
    else:
        svg.path(f"M{x - 5:.1f} {y:.1f}a5 5 0 1 0 10 0a5 5 0 1 0 -10 0z", f'fill="{fill}" {edge}', hover)
