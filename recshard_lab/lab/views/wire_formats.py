"""Wire formats: the error of each communication codec against the bytes that it sends, measured on given rows."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, floor, isfinite, log10
from typing import Any

from recshard_lab.comm import CodecError
from recshard_lab.lab.charts import spec
from recshard_lab.lab.draw.theme import LINES, bytes_text, number, with_notes
from recshard_lab.lab.draw.view import View, message_view
from recshard_lab.lab.views.registry import register_view
from recshard_lab.text_table import TextTable

BESIDE = 22.0  # pixels between formats that send equally many bytes
_HOW = (
    "Logarithmic scale; the lower edge is an error of zero. "
    "An upright line joins the errors of a format. Formats of equal bytes are beside each other."
)


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
        note: a sentence under the picture, such as whose rows they are.
        width: of the static picture, in pixels.
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
    chart = spec.Chart(
        title,
        summary,
        ((_panel(found, width),),),
        with_notes(_HOW, [note.removesuffix(".")]),
        warn=bool(beyond),
    )
    return View.of_chart("wire_formats", chart, numbers, width)


def _panel(found: Mapping[str, CodecError], width: int) -> spec.Panel:
    errors = [e for one in found.values() for e in (one.max_abs, one.mean_abs, one.bound) if isfinite(e) and e > 0]
    low, high = (floor(log10(min(errors))) - 1, ceil(log10(max(errors)))) if errors else (-1, 0)
    high = max(high, low + 2)
    decades = tuple(10.0**power for power in range(low + 1, high + 1))
    y = spec.Axis("log10", 10.0**low, 10.0**high * 1.6, "error", ticks=decades)
    shares = {name: 100 * one.encoded_bytes / max(1, one.plain_bytes) for name, one in found.items()}
    axis = spec.linear(shares.values(), "bytes on the wire, of the plain rows", "%", pad=0.1)
    at = _beside(shares, BESIDE * axis.high / (width - 90))
    rows: dict[str, list[tuple[float, float, str, str]]] = {"bound": [], "largest error": [], "mean error": []}
    joined: list[spec.Mark] = []
    for name, one in found.items():
        measured = {"bound": one.bound, "largest error": one.max_abs, "mean error": one.mean_abs}
        hover = "\n".join(f"{what} {number(error)}" for what, error in measured.items())
        hover = f"{name}, {bytes_text(one.encoded_bytes)}\n{hover}" + ("" if one.within else "\nbeyond its bound")
        places = {what: max(y.low, error) for what, error in measured.items() if isfinite(error)}
        top = max(places, key=places.__getitem__, default="")
        for what, place in places.items():
            rows[what].append((at[name], place, hover, name if what == top else ""))
        if len(places) > 1:
            ends = (min(places.values()), max(places.values()))
            joined.append(spec.Lines(name, (at[name],) * 2, ends, width=1.2, hover=(hover,) * 2, legend=False))
    marks = [
        mark
        for (name, own), (symbol, (colour, *_)) in zip(
            rows.items(), zip(("line-ew", "square", "circle"), (("",), *LINES[:2]), strict=True), strict=True
        )
        for mark in spec.points(name, own, symbol=symbol, colour=colour, size=8.0 if symbol == "line-ew" else 4.5)
    ]
    return spec.Panel(axis, y, (*joined, *marks), height=250.0)


def _beside(shares: Mapping[str, float], aside: float) -> dict[str, float]:
    """Where each format is on the x axis: at its bytes, or beside it where another format sends as many."""
    places: dict[str, float] = {}
    for name, share in shares.items():
        same = [other for other, its in shares.items() if its == share]
        places[name] = share + (same.index(name) - (len(same) - 1) / 2) * aside
    return places
