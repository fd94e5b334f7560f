"""Phases: one step as a time line per rank. A phase starts for everyone when the slowest rank has ended the one before.

That is what a collective does to a step, and why the gaps are time a rank waits: the length of the picture is the
step, and what the slowest rank does in each phase is what it costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from recshard_lab.lab.charts import spec
from recshard_lab.lab.draw.svg import fit
from recshard_lab.lab.draw.theme import MISSING, PHASES, Look, as_sentence, look_of, ms_text, number, with_notes
from recshard_lab.lab.draw.view import View, message_view
from recshard_lab.lab.views.registry import register_view
from recshard_lab.text_table import TextTable

MOST_ROWS = 16  # ranks drawn one by one
MEASURED = Look("measured step", "#c9ced6", "rising")


@register_view("Step time", place=3)
def phases(estimate: Any, measured: Any = None, *, note: str = "", width: int = 860, extent: float = 0.0) -> View:
    """Predicted step time per rank and phase, the critical rank marked, measured beside.

    Args:
        estimate: has ``phases`` (P names), ``ms`` ``[W, P]``, ``step_ms`` and ``critical_rank``; under a pipeline also
            ``plain_step_ms``, which is the length of the picture, and ``overlap``, which the caption describes.
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
        f"Rank {critical} is the slowest: {ms_text(busy[critical])} busy. "
        f"On average, ranks wait for {number(waits, 2)}% of the step."
    )
    if overlap is not None:
        title += f" without a pipeline, {ms_text(overlap.step_ms)} under {overlap.pipeline}"
        summary += f" {str(overlap)[0].upper()}{str(overlap)[1:]}."
    if steps is not None:
        title += f", measured: {ms_text(float(np.nanmax(steps)) if np.isfinite(steps).any() else float('nan'))}"
    summary = with_notes(summary, [getattr(measured, "times_note", "")])
    rows, longest = drawn_ranks(busy, critical), float(_starts(ms)[-1])
    if steps is not None and np.isfinite(steps).any():
        longest = max(longest, float(np.nanmax(steps)))

    words = "▸ critical rank. Framed: the slowest in its phase. Gaps: waiting."
    if len(rows) < len(ms):
        rest = np.delete(busy, rows)
        words += f" {len(rest)} other ranks are busy for {ms_text(rest.min())} to {ms_text(rest.max())}."
    panel = _panel(names, ms, critical, steps, rows, max(longest, extent) or 1.0, width)
    chart = spec.Chart(title, summary, ((panel,),), f"{words} {as_sentence(note)}".strip())
    return View.of_chart("phases", chart, _numbers(names, ms, critical, steps), width, extent=longest)


def unshowable(estimate: Any, measured: Any) -> str:
    """Why phases by rank cannot be shown; empty where they can."""
    ms = np.asarray(estimate.ms, dtype=float)
    if ms.size == 0:
        return "No rank and no phase to show."
    if not np.isfinite(ms).all():
        rank, phase = np.argwhere(~np.isfinite(ms))[0]
        return f"The predicted {estimate.phases[phase]} of rank {rank} is not a number."
    if measured is not None and len(measured.step_ms_by_rank) != len(ms):
        return f"{len(measured.step_ms_by_rank)} ranks were measured, {len(ms)} predicted: not the same plan."
    return ""


def drawn_ranks(busy: np.ndarray, critical: int) -> list[int]:
    """The ranks that have a row: all, or the busiest ones and the critical one, in the order of ranks.

    Args:
        busy: ``[W]``, in any unit.
    """
    if len(busy) <= MOST_ROWS:
        return list(range(len(busy)))
    busiest = [int(rank) for rank in np.argsort(-busy, kind="stable")[: MOST_ROWS - 1]]
    return sorted({critical, *busiest})


def _starts(ms: np.ndarray) -> np.ndarray:
    """When each phase begins, ``[P + 1]``; the last entry is the step."""
    return np.concatenate([[0.0], np.cumsum(ms.max(axis=0))])


def _panel(
    names: Sequence[str],
    ms: np.ndarray,
    critical: int,
    steps: np.ndarray | None,
    rows: list[int],
    longest: float,
    width: int,
) -> spec.Panel:
    starts, slowest = _starts(ms), ms.argmax(axis=0)
    lanes = spec.categories([f"▸ rank {rank}" if rank == critical else f"rank {rank}" for rank in rows])
    thick, offset = (0.72, 0.0) if steps is None else (0.56, -0.14)
    marks: list[spec.Mark] = []
    for phase, name in enumerate(names):
        look, start = look_of(name, PHASES), float(starts[phase])
        on = [(place, rank, float(ms[rank, phase])) for place, rank in enumerate(rows) if ms[rank, phase] > 0]
        drawn = [
            (
                place + offset,
                start,
                start + value,
                f"rank {rank}\n{look.label}: {ms_text(value)}",
                _fitting(look.label, value, value / longest * (width - 120)),
            )
            for place, rank, value in on
        ]
        framed = tuple(bool(rank == slowest[phase]) for _, rank, _ in on)
        marks += spec.bars(look.label, look, drawn, width=thick, across=True, framed=framed)
    if steps is not None:
        real = [(place, rank, float(steps[rank])) for place, rank in enumerate(rows)]
        thin = [
            (place + 0.3, 0.0, value, f"rank {rank}\nmeasured: {ms_text(value)}", ms_text(value))
            for place, rank, value in real
            if np.isfinite(value)
        ]
        marks += spec.bars("measured step", MEASURED, thin, label="end", width=0.26, across=True)
        missing = [place for place, _, value in real if not np.isfinite(value)]
        marks += [spec.Text(0.02 * longest, place + 0.3, f"measured: {MISSING}", "start") for place in missing]
    marks.append(spec.Rule(x=float(starts[-1]), dash="1 0"))
    axis = spec.linear([longest], "", "ms", pad=0.02 if steps is None else 0.1)
    return spec.Panel(
        axis, lanes, tuple(marks), height=len(rows) * (34.0 if len(rows) <= 8 else 24.0) * (1 if steps is None else 1.3)
    )


def _fitting(label: str, ms: float, pixels: float) -> str:
    """A bar's text: phase and time, the time, or nothing."""
    words = fit([f"{label} {ms_text(ms)}", ms_text(ms)], pixels - 8, 11)
    return "" if words.endswith("…") else words


def _numbers(names: Sequence[str], ms: np.ndarray, critical: int, steps: np.ndarray | None) -> TextTable:
    heads = ["rank", *(look_of(name, PHASES).label for name in names), "busy"]
    heads += ["measured step"] if steps is not None else []
    rows = []
    for rank, row in enumerate(ms):
        cells = [f"{rank} (critical)" if rank == critical else str(rank), *map(ms_text, row), ms_text(row.sum())]
        rows.append([*cells, ms_text(float(steps[rank]))] if steps is not None else cells)
    return TextTable(heads, rows)
