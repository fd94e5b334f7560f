"""Phases: one step as a time line per rank. A phase starts for everyone when the slowest rank has ended the one before.

That is what a collective does to a step, and why the gaps are time a rank waits: the length of the picture is the
step, and what the slowest rank does in each phase is what it costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from recshard_lab.lab.draw.plots import figure, marker, up_to
from recshard_lab.lab.draw.rank_columns import MARGIN
from recshard_lab.lab.draw.svg import Svg, fit
from recshard_lab.lab.draw.theme import (
    LABEL_INK,
    MISSING,
    PHASES,
    as_sentence,
    look_of,
    ms_text,
    number,
    ticks,
    with_notes,
)
from recshard_lab.lab.draw.view import View, message_view
from recshard_lab.lab.views.registry import register_view
from recshard_lab.text_table import TextTable

MOST_ROWS = 16  # ranks drawn one by one
LEFT = 92


@register_view("Step time", place=3)
def phases(estimate: Any, measured: Any = None, *, note: str = "", width: int = 860, extent: float = 0.0) -> View:
    """Predicted step time per rank and phase, the critical rank marked, measured beside.

    Args:
        estimate: has ``phases`` (P names), ``ms`` ``[W, P]``, ``step_ms`` and ``critical_rank``; under a pipeline also
            ``plain_step_ms``, which is the length of the picture, and ``overlap``, which is told.
        measured: has ``step_ms_by_rank`` ``[W]``, and where phases were traced ``phases`` and ``ms`` ``[W, P]``.
        note: a sentence under the picture.
        width: of the static picture, in pixels.
        extent: ms that fill the picture, where several are to one scale; 0 for its own step.
    """
    problem = unshowable(estimate, measured)
    if problem:
        return message_view("phases", "Step time", problem)
    names, ms = tuple(estimate.phases), np.asarray(estimate.ms, dtype=float)
    steps = None if measured is None else np.asarray(measured.step_ms_by_rank, dtype=float)
    overlap = getattr(estimate, "overlap", None)
    critical, step = int(estimate.critical_rank), float(estimate.step_ms if overlap is None else overlap.plain_ms)
    busy = ms.sum(axis=1)
    waits = 100 * (1 - busy.mean() / step) if step else 0.0
    title = f"Step time, predicted: {ms_text(step)}"
    summary = (
        f"Rank {critical} is critical ({ms_text(busy[critical])} busy); ranks wait {number(waits, 2)}% of the step."
    )
    if overlap is not None:
        title += f" without a pipeline, {ms_text(overlap.step_ms)} under {overlap.pipeline}"
        summary += f" {str(overlap)[0].upper()}{str(overlap)[1:]}."
    if steps is not None:
        title += f", measured: {ms_text(float(np.nanmax(steps)) if np.isfinite(steps).any() else float('nan'))}"
    summary = with_notes(summary, [getattr(measured, "times_note", "")])
    rows, longest = _rows(busy, critical), float(_starts(ms)[-1])
    if steps is not None and np.isfinite(steps).any():
        longest = max(longest, float(np.nanmax(steps)))

    def draw(uid: str) -> Svg:
        return _draw(names, ms, critical, steps, rows, title, summary, note, width, max(longest, extent), uid)

    def plot() -> Any:
        return _plot(names, ms, critical, steps, rows, title, max(longest, extent))

    return View("phases", title, summary, _numbers(names, ms, critical, steps), draw, plot, extent=longest)


def unshowable(estimate: Any, measured: Any) -> str:
    """Why phases by rank cannot be shown; empty where they can."""
    ms = np.asarray(estimate.ms, dtype=float)
    if ms.size == 0:
        return "There is no rank and no phase to show."
    if not np.isfinite(ms).all():
        rank, phase = np.argwhere(~np.isfinite(ms))[0]
        return f"The predicted {estimate.phases[phase]} of rank {rank} is not a number."
    if measured is not None and len(measured.step_ms_by_rank) != len(ms):
        return f"{len(measured.step_ms_by_rank)} ranks were measured, {len(ms)} predicted: not the same plan."
    return ""


def _rows(busy: np.ndarray, critical: int) -> list[int]:
    """The ranks drawn: all, or the busiest ones and the critical one."""
    if len(busy) <= MOST_ROWS:
        return list(range(len(busy)))
    busiest = [int(rank) for rank in np.argsort(-busy, kind="stable")[: MOST_ROWS - 1]]
    return sorted({critical, *busiest})


def _starts(ms: np.ndarray) -> np.ndarray:
    """When each phase begins, ``[P + 1]``; the last entry is the step."""
    return np.concatenate([[0.0], np.cumsum(ms.max(axis=0))])


def _draw(
    names: Sequence[str],
    ms: np.ndarray,
    critical: int,
    steps: np.ndarray | None,
    rows: list[int],
    title: str,
    summary: str,
    note: str,
    width: int,
    longest: float,
    uid: str,
) -> Svg:
    starts, slowest = _starts(ms), ms.argmax(axis=0)
    scale = (width - LEFT - MARGIN - 4) / (longest or 1.0)
    thick = 24 if len(rows) <= 8 else 16
    pitch = thick + 8 + (14 if steps is not None else 0)
    svg = Svg(width, 0, title, summary, uid)
    top = svg.head(title, summary, MARGIN) + 10
    y = top + 4
    for rank in rows:
        label = f"▸ rank {rank}" if rank == critical else f"rank {rank}"
        svg.text(LEFT - 8, y + thick / 2 + 4, label, anchor="end", bold=rank == critical)
        svg.line(
            LEFT, y + thick / 2, LEFT + starts[-1] * scale, y + thick / 2, 'stroke-opacity=".35" stroke-dasharray="1 3"'
        )
        for phase, name in enumerate(names):
            _bar(
                svg,
                look_of(name, PHASES),
                ms[rank, phase],
                starts[phase],
                scale,
                y,
                thick,
                rank,
                rank == slowest[phase],
            )
        if steps is not None:
            _measured(svg, float(steps[rank]), scale, y + thick + 2)
        y += pitch
    svg.line(LEFT + starts[-1] * scale, top, LEFT + starts[-1] * scale, y, 'stroke-width="1.4"')
    if len(rows) < len(ms):
        rest = np.delete(ms.sum(axis=1), rows)
        words = f"{len(rest)} other ranks are busy {ms_text(rest.min())} to {ms_text(rest.max())}"
        svg.text(LEFT, y + 10, words, soft=True)
        y += 18
    y = _axis(svg, y + 2, longest, scale)
    used = [i for i in range(len(names)) if ms[:, i].any()]
    entries = [(look_of(names[i], PHASES), look_of(names[i], PHASES).label) for i in used]
    end = svg.legend(MARGIN, y + 12, entries, width - 2 * MARGIN)
    words = "▸ critical rank. Framed: the slowest in its phase. Dotted: waiting."
    words += " Thin bar: measured." if steps is not None else ""
    svg.text(MARGIN, end + 9, f"{words} {as_sentence(note)}".strip(), soft=True)
    svg.height = end + 18
    return svg


def _bar(
    svg: Svg, look: Any, ms: float, start: float, scale: float, y: float, thick: float, rank: int, slowest: bool
) -> None:
    long = ms * scale
    if long < 0.05:
        return
    x = LEFT + start * scale
    outline = f'stroke="{LABEL_INK}" stroke-width=".6"'
    svg.rect(x, y, long, thick, svg.fill(look), f"rank {rank}\n{look.label}: {ms_text(ms)}", outline)
    if slowest:  # inside the bar, where the ink holds on a dark page too
        inset = min(1.6, long / 4)
        frame = f'stroke="{LABEL_INK}" stroke-width="{min(1.8, long / 3):.2f}" pointer-events="none"'
        svg.rect(x + inset, y + inset, long - 2 * inset, thick - 2 * inset, "none", extra=frame)
    words = fit([f"{look.label} {ms_text(ms)}", ms_text(ms), number(ms, 2)], long - 8, 10)
    if words and "…" not in words:
        halo = f'stroke="{look.fill}" stroke-width="3" paint-order="stroke"'
        svg.text(x + long / 2, y + thick / 2 + 3.6, words, size=10, anchor="middle", ink=LABEL_INK, extra=halo)


def _measured(svg: Svg, ms: float, scale: float, y: float) -> None:
    """The thin bar under a rank's predicted phases."""
    if not np.isfinite(ms):
        svg.text(LEFT - 8, y + 9.5, MISSING, size=10, anchor="end", soft=True)
        return
    svg.rect(LEFT, y + 2, ms * scale, 7, "currentColor", f"measured: {ms_text(ms)}", 'fill-opacity=".55"')
    svg.text(LEFT - 8, y + 9.5, ms_text(ms), size=10, anchor="end", soft=True)


def _axis(svg: Svg, y: float, longest: float, scale: float) -> float:
    svg.line(LEFT, y, LEFT + longest * scale, y, 'stroke-opacity=".6"')
    for tick in ticks(0.0, longest):
        svg.line(LEFT + tick * scale, y, LEFT + tick * scale, y + 4, 'stroke-opacity=".6"')
        svg.text(LEFT + tick * scale, y + 16, "0" if not tick else ms_text(tick), anchor="middle", size=10, soft=True)
    return y + 18


def _numbers(names: Sequence[str], ms: np.ndarray, critical: int, steps: np.ndarray | None) -> TextTable:
    heads = ["rank", *(look_of(name, PHASES).label for name in names), "busy"]
    heads += ["measured step"] if steps is not None else []
    rows = []
    for rank, row in enumerate(ms):
        cells = [f"{rank} (critical)" if rank == critical else str(rank), *map(ms_text, row), ms_text(row.sum())]
        rows.append([*cells, ms_text(float(steps[rank]))] if steps is not None else cells)
    return TextTable(heads, rows)


def _plot(
    names: Sequence[str],
    ms: np.ndarray,
    critical: int,
    steps: np.ndarray | None,
    rows: list[int],
    title: str,
    most: float,
) -> Any:
    import plotly.graph_objects as go

    starts = _starts(ms)
    labels = [f"rank {rank}" + (" (critical)" if rank == critical else "") for rank in rows]
    traces: list[Any] = [
        go.Bar(
            name=look_of(name, PHASES).label,
            orientation="h",
            y=labels,
            x=[float(ms[rank, phase]) for rank in rows],
            base=[float(starts[phase])] * len(rows),
            marker=marker(look_of(name, PHASES)),
            offsetgroup=0,
            hovertemplate="%{y}<br>" + look_of(name, PHASES).label + ": %{x:.4g} ms<extra></extra>",
        )
        for phase, name in enumerate(names)
    ]
    if steps is not None:
        traces.append(
            go.Bar(
                name="measured",
                orientation="h",
                y=labels,
                x=[float(steps[rank]) for rank in rows],
                offsetgroup=1,
                width=0.2,
                marker={"color": "#7a828c"},
                hovertemplate="%{y}<br>measured: %{x:.4g} ms<extra></extra>",
            )
        )
    return figure(
        traces,
        title,
        barmode="group",
        height=170 + 32 * len(rows),
        yaxis={"autorange": "reversed", "showgrid": False},
        xaxis={**up_to(most), "title": {"text": "ms"}, "showgrid": True, "gridcolor": "rgba(128,136,146,.25)"},
    )
