"""Draws a recorded step as a strip of frames, one for each stage, with the tensors of every rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from math import ceil
from textwrap import wrap

import numpy as np

from recshard_lab.lab.draw.rank_columns import MARGIN
from recshard_lab.lab.draw.svg import Svg, fit, text_width
from recshard_lab.lab.draw.theme import (
    LABEL_INK,
    MISSING,
    SCHEMES,
    Look,
    bytes_text,
    counted,
    look_of,
    ms_text,
    with_notes,
)
from recshard_lab.lab.draw.view import View, message_view
from recshard_lab.lab.live.recorded_step import STAGES, RecordedStep
from recshard_lab.lab.views.registry import register_view
from recshard_lab.lab.views.step_pieces import Frame, Group, Line, Piece, Shown, shown_frames
from recshard_lab.text_table import TextTable

NARROW, WIDE = 380, 860
PAD, LABEL, CELL, ROW, TOKEN = 10.0, 66.0, 38.0, 20.0, 22.0
LEAST_PANEL = 200.0  # pixels of a rank's panel
FEATURES = (
    Look("first feature", "#9cc4ee", "plain"),
    Look("second feature", "#f6bd83", "rising"),
    Look("third feature", "#9ad6ae", "dots"),
    Look("fourth feature", "#d3bdea", "columns"),
    Look("fifth feature", "#f1d774", "cross"),
)
_NOTHING, _PLUS, _MINUS = (244, 245, 247), (126, 178, 230), (242, 166, 98)


@register_view("Step, stage by stage", place=9)
def step_frames(
    step: RecordedStep,
    *,
    samples: int = 4,
    features: Sequence[str] | None = None,
    follow: str = "",
    note: str = "",
    width: int = WIDE,
) -> View:
    """The stages of a recorded training step, with the ids, rows and gradients that each rank had.

    Args:
        step: what `lab.StepThrough` recorded.
        samples: how many samples are shown at most, over all ranks.
        features: which are shown; the first three when left out.
        follow: what is outlined in every frame: ``"sample A"``, or ``"movie:7"`` for row 7 of a table.
        note: a sentence under the summary.
        width: of the picture, in pixels.

    Raises:
        ValueError: `samples` is below 1, or a feature is unknown.
    """
    title = "Step, stage by stage"
    if not step.ranks or not step.blocks:
        return message_view("step_frames", title, "The step has no rank, or its collection has no table.")
    shown = Shown(step, samples, features)
    frames = shown_frames(shown)
    schemes = ", ".join(
        f"{table} {look_of(step.schemes[table], SCHEMES).label}" if table in step.schemes else table
        for table in dict.fromkeys(step.blocks[block].table for block in shown.blocks)
    )
    about = f"One training step on {counted(step.world_size, 'rank')}: {schemes}. {shown.left_out}".strip()
    summary = with_notes(about, [note, step.times_note])
    title = f"{title}: {step.name}" if step.name else title
    return View(
        "step_frames",
        title,
        summary,
        stage_table(step),
        lambda uid: _strip(frames, title, summary, follow, width, uid),
    )


def stage_table(step: RecordedStep) -> TextTable:
    """Bytes and milliseconds of each stage."""
    rows = []
    for stage, name in STAGES.items():
        traffic = step.traffic(stage)
        stays, ms = int(np.trace(traffic)), step.ms(stage)
        sent = [bytes_text(int(traffic.sum()) - stays), bytes_text(stays)] if traffic.any() else ["", ""]
        rows.append([name, *sent, ms_text(ms) if ms else ""])
    return TextTable(("stage", "between ranks", "stays on its rank", "slowest rank"), rows)


def draw_frame(frame: Frame, width: float, uid: str, follow: str = "") -> Svg:
    """One stage: a panel for each rank.

    Each piece is a group with ``data-key``, ``data-origin`` (keys of earlier frames) and ``data-follow``, as JSON.
    """
    svg = Svg(width, 0, frame.title, frame.sentence, uid)
    svg.text(MARGIN, 20, frame.title, size=14, bold=True)
    y = 20.0
    if frame.cost:
        beside = MARGIN + text_width(frame.title, 14) + 20 + text_width(frame.cost, 11) < width - MARGIN
        y += 0 if beside else 17
        x, anchor = (width - MARGIN, "end") if beside else (MARGIN, "start")
        svg.text(x, y, frame.cost, anchor=anchor, bold=True, extra='class="rs-cost"')
    sentence = frame.sentence + (f" Numbers are in units of 1e{frame.scale:+d}." if frame.scale else "")
    for words in wrap(sentence, int((width - 2 * MARGIN) / 5.7)):
        y += 16
        svg.text(MARGIN, y, words, soft=True)
    y += 12
    across = max(1, min(len(frame.panels), int((width - 2 * MARGIN + 12) / (LEAST_PANEL + 12))))
    across = ceil(len(frame.panels) / ceil(len(frame.panels) / across)) if frame.panels else 1  # rows of equal length
    each = (width - 2 * MARGIN - 12 * (across - 1)) / across
    for first in range(0, len(frame.panels), across):
        ranks = range(first, min(first + across, len(frame.panels)))
        lefts = [MARGIN + place * (each + 12) for place in range(len(ranks))]
        ends = [_panel(svg, x, y, each, rank, frame, follow) for x, rank in zip(lefts, ranks, strict=True)]
        for x in lefts:
            svg.rect(x, y, each, max(ends) - y, "none", extra='rx="6" stroke="currentColor" stroke-opacity=".45"')
        y = max(ends) + 12
    svg.height = y + 2
    return svg


def _panel(svg: Svg, x: float, y: float, width: float, rank: int, frame: Frame, follow: str) -> float:
    """One rank's groups; returns the y below them."""
    svg.text(x + PAD, y + 18, f"rank {rank}", size=12, bold=True)
    y += 26
    if not frame.panels[rank]:
        svg.text(x + PAD, y + 12, "nothing shown here", soft=True)
        return y + 24
    for group in frame.panels[rank]:
        y = _group(svg, x + PAD, y, width - 2 * PAD, group, frame, follow) + 8
    return y


def _group(svg: Svg, x: float, y: float, width: float, group: Group, frame: Frame, follow: str) -> float:
    svg.line(x, y, x + width, y, 'stroke-opacity=".3"')
    for words in wrap(group.heading, int(width / 6.3)) or [""]:
        y += 15
        svg.text(x, y, words, size=11, bold=True)
    y += 8
    for line in group.lines:
        if not line.pieces and line.feature < 0:
            for words in wrap(line.name, int(width / 6)):
                y += 14
                svg.text(x, y, words)
            y += 3
        elif line.pieces and line.pieces[0].rows:
            y = _row(svg, x, y, width, line.pieces[0], frame, follow)
        else:
            y = _tokens(svg, x, y, width, line, frame, follow)
    return y


def _tokens(svg: Svg, x: float, y: float, width: float, line: Line, frame: Frame, follow: str) -> float:
    """Ids side by side, their name before them or above them."""
    beside = text_width(line.name, 10.5) <= LABEL
    high = TOKEN + 12 * any(piece.note for piece in line.pieces)
    if beside:
        svg.text(x, y + 15, line.name, size=10.5)
    else:
        svg.text(x, y + 12, fit([line.name], width, 10.5), size=10.5)
        y += 19
    left = start = x + (LABEL if beside else 0)
    if not line.pieces:
        svg.text(left, y + 15, "no ids", size=10.5, soft=True)
    for piece in line.pieces:
        wide = max(text_width(piece.label, 12) + 12, text_width(piece.note, 10) + 8, 26)
        if left > start and left + wide > x + width:
            left, y = start, y + high + 4
        _open(svg, piece, follow)
        look = FEATURES[piece.feature % len(FEATURES)] if piece.feature >= 0 else None
        edge = f'rx="4" stroke="{LABEL_INK}" stroke-width=".7"'
        if look is not None:
            svg.rect(left, y, wide, high, svg.fill(look), extra=edge)
        halo = 'stroke="#fff" stroke-opacity=".6" stroke-width="3" paint-order="stroke"' if look is not None else ""
        ink = LABEL_INK if look is not None else "currentColor"
        svg.text(left + wide / 2, y + 15, piece.label, size=12, anchor="middle", ink=ink, bold=True, extra=halo)
        if piece.note:
            svg.text(left + wide / 2, y + 28, piece.note, size=10, anchor="middle", ink=ink, extra=halo)
        _close(svg, left, y, wide, high, piece, follow)
        left += wide + 5
    return y + high + 6


def _row(svg: Svg, x: float, y: float, width: float, piece: Piece, frame: Frame, follow: str) -> float:
    """Numbers, one line for each state of the row; its name is before them and small print below them."""
    top, size = y, len(piece.rows[0][1])
    room = int((width - LABEL) / CELL)
    drawn = size if size <= room else max(1, int((width - LABEL - 28) / CELL))
    _open(svg, piece, follow)
    if piece.feature >= 0:
        look = FEATURES[piece.feature % len(FEATURES)]
        svg.rect(x, y + 4, 9, 12, svg.fill(look), extra=f'rx="2" stroke="{LABEL_INK}" stroke-width=".6"')
    named = bool(piece.rows[0][0])  # the states have names, which need room
    svg.text(x + 13, y + 14, fit([piece.label], LABEL - 16, 11), bold=True)
    if named and text_width(piece.label, 12) > LABEL - 52:  # the label has its own line above the states
        y += ROW - 3
    for name, values in piece.rows:
        if name:
            svg.text(x + LABEL - 4, y + 14, name, size=10, anchor="end")
        shown = [(x + LABEL + place * CELL, float(values[place])) for place in range(drawn)]
        svg.raw(f'<g stroke="{LABEL_INK}" stroke-width=".4">')  # attributes once a row: a strip has a thousand cells
        for left, value in shown:
            svg.rect(left, y + 1, CELL - 1, ROW - 2, _colour(value, frame.largest))
        svg.raw(f'</g><g font-size="10.5" text-anchor="middle" fill="{LABEL_INK}">')
        for left, value in shown:
            svg.text(left + CELL / 2 - 0.5, y + 14, _number(value, frame))
        svg.raw("</g>")
        if drawn < size:
            svg.text(x + LABEL + drawn * CELL + 3, y + 14, f"+{size - drawn}", size=10)
        y += ROW
    label_end = x + 13 + text_width(piece.label, 12) + 4
    if piece.note and not named and label_end + text_width(piece.note, 10) <= x + LABEL - 2:
        svg.text(label_end, top + 14, piece.note, size=10)
    elif piece.note:
        svg.text(x + LABEL, y + 10, fit([piece.note], width - LABEL, 10), size=10)
        y += 13
    _close(svg, x - 4, top - 1, width + 8, y - top + 2, piece, follow)
    return y + 4


def _open(svg: Svg, piece: Piece, follow: str) -> None:
    keys = [*(f"sample {name}" for name in piece.samples), *piece.ids]
    on = " rs-on" if follow and follow in keys else ""
    attributes = "".join(
        f' data-{name}="{escape(json.dumps(value), quote=True)}"'
        for name, value in (("origin", list(dict.fromkeys(piece.origin))), ("follow", keys))
    )
    svg.raw(f'<g class="rs-piece{on}" data-key="{escape(piece.key, quote=True)}"{attributes}>')


def _close(svg: Svg, x: float, y: float, wide: float, high: float, piece: Piece, follow: str) -> None:
    """The outline of a piece, drawn where it is followed."""
    on = follow in (*(f"sample {name}" for name in piece.samples), *piece.ids) if follow else False
    ring = 'stroke="currentColor" stroke-width="2.4"' if on else ""
    about = [", ".join(name.replace(":", " id ") for name in piece.ids)]
    about += [f"sample{'s' * (len(piece.samples) > 1)} {', '.join(piece.samples)}"] if piece.samples else []
    svg.rect(
        x - 1.5, y - 1.5, wide + 3, high + 3, "none", "\n".join(filter(None, about)), f'rx="5" class="rs-ring" {ring}'
    )
    svg.raw("</g>")


def _colour(value: float, largest: float) -> str:
    if not np.isfinite(value) or not largest:
        return "#f4f5f7"
    share = abs(value) / largest
    end = _PLUS if value > 0 else _MINUS
    mixed = [round(a + (b - a) * min(1.0, share)) for a, b in zip(_NOTHING, end, strict=True)]
    return "#" + "".join(f"{one:02x}" for one in mixed)


def _number(value: float, frame: Frame) -> str:
    if not np.isfinite(value):
        return MISSING
    value /= 10.0**frame.scale
    largest = frame.largest / 10.0**frame.scale
    text = f"{value:.{2 if largest < 10 else 1 if largest < 100 else 0}f}"
    return text if any(digit in text for digit in "123456789") else text.removeprefix("-")


def _strip(frames: Sequence[Frame], title: str, summary: str, follow: str, width: int, uid: str) -> Svg:
    """All frames below each other."""
    svg = Svg(width, 0, title, summary, uid)
    y = svg.head(title, summary, MARGIN) + 10
    for frame in frames:
        drawn = draw_frame(frame, width, f"{uid}-{frame.number}", follow)
        svg.line(MARGIN, y, width - MARGIN, y, 'stroke-opacity=".45"')
        svg.raw(drawn.group(0, y + 4))
        y += drawn.height + 12
    svg.height = y
    return svg
