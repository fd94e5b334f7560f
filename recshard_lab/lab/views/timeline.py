"""When the stages of a pipeline ran: one lane per rank and stage.

The stages of a step (wait, forward, backward, optimizer) run one after the other in one thread and share a lane. The
part of a stage that runs while the same rank computes is hidden. The step's thread waits for the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import isfinite
from statistics import median
from typing import Any

from recshard_lab.lab.charts import spec
from recshard_lab.lab.draw.svg import fit
from recshard_lab.lab.draw.theme import STAGES, as_sentence, look_of, ms_text, number, with_notes
from recshard_lab.lab.draw.view import View, message_view
from recshard_lab.lab.views.registry import register_view
from recshard_lab.text_table import TextTable
from recshard_lab.train.stages import COMPUTE_STAGES, hidden_share, stage_ms

STEP = ("wait", *COMPUTE_STAGES)
MOST_RANKS = 8
SHOWN = 6  # batches drawn by default
_Lane = tuple[int, str]


@register_view("Timeline", place=9)
def timeline(
    events: Any,
    *,
    batches: tuple[int, int] | None = None,
    span_ms: float | None = None,
    name: str = "",
    note: str = "",
    width: int = 860,
) -> View:
    """The stages of each rank over time.

    Args:
        events: `StageEvent` of all ranks: ``pipeline.events``, `events_from_chrome_trace`, `events_from_collectives`.
        batches: the first and the last batch drawn; some in the middle when left out. Numbers are of all but the first.
        span_ms: milliseconds from the left edge to the right at least, the same for pictures to be compared.
        name: whose events they are, for the title.
        note: a sentence under the picture.
        width: of the static picture, in pixels.
    """
    events = list(events)
    timed = [event for event in events if isfinite(event.start_s) and isfinite(event.end_s)]
    if len(timed) < len(events):
        left_out = len(events) - len(timed)
        note = f"{left_out} stages without a finite time are not drawn. {as_sentence(note)}".strip()
    events = sorted(timed, key=lambda event: event.start_s)
    if not events:
        return message_view("timeline", "Timeline", "No stage to show: no batch has passed the pipeline yet.")
    ranks = sorted({event.rank for event in events})
    first, last = batches if batches is not None else _middle(sorted({event.batch for event in events}))
    drawn = _during([event for event in events if event.rank in ranks[:MOST_RANKS]], first, last)
    if not drawn:
        return message_view("timeline", "Timeline", f"No stage of batches {first} to {last} is known.")
    known = [event for event in events if event.batch > 0] or events
    stages = sorted({event.stage for event in known}, key=_order)
    step, waited = _step_ms(known), stage_ms(known, "wait")
    whose = f"{name}: batches" if name else "Timeline of batches"
    title = f"{whose} {first} to {last}" + (f": {ms_text(step)} a step" if step else "")
    hidden = {stage: hidden_share(events, stage) for stage in stages if stage not in STEP}
    summary = with_notes(_summary(hidden, stages, step, waited), (event.times_note for event in events))
    if len(ranks) > MOST_RANKS:
        note = f"The first {MOST_RANKS} of {len(ranks)} ranks. {as_sentence(note)}".strip()
    lanes = [
        (rank, lane)
        for rank in ranks[:MOST_RANKS]
        for lane in dict.fromkeys(_lane_of(event.stage) for event in sorted(drawn, key=lambda e: _order(e.stage)))
    ]

    note = f"Numbers in bars: the batch. {as_sentence(note)}".strip()
    chart = spec.Chart(title, summary, ((_panel(drawn, lanes, span_ms or 0.0, width),),), note)
    return View.of_chart("timeline", chart, _numbers(known, stages, hidden), width)


def _middle(batches: Sequence[int]) -> tuple[int, int]:
    if len(batches) <= SHOWN:
        return batches[0], batches[-1]
    start = max(1, (len(batches) - SHOWN) // 2)
    return batches[start], batches[start + SHOWN - 1]


def _during(events: Sequence[Any], first: int, last: int) -> list[Any]:
    """What happened from the first step of ``first`` to the last one of ``last``, of all batches."""
    asked = [event for event in events if first <= event.batch <= last]
    steps = [event for event in asked if event.stage in COMPUTE_STAGES] or asked
    if not steps:
        return []
    begin, end = min(event.start_s for event in steps), max(event.end_s for event in steps)
    return [event for event in events if event.start_s >= begin - 1e-9 and event.end_s <= end + 1e-9]


def _order(stage: str) -> tuple[int, str]:
    names = list(STAGES)
    return (names.index(stage) if stage in names else len(names) - len(STEP), stage)


def _lane_of(stage: str) -> str:
    return "step" if stage in STEP else stage


def _step_ms(events: Sequence[Any]) -> float:
    """Median time from one forward to the next, of the slowest rank."""
    starts: dict[int, list[float]] = {}
    for event in events:
        if event.stage == "forward":
            starts.setdefault(event.rank, []).append(event.start_s)
    found = [median(1e3 * (b - a) for a, b in pairwise(sorted(own))) for own in starts.values() if len(own) > 1]
    return max(found, default=0.0)


def _summary(hidden: Mapping[str, float], stages: Sequence[str], step: float, waited: float) -> str:
    words = []
    if "input_dist" in hidden:
        words.append(f"{number(100 * hidden['input_dist'])}% of input_dist ran behind computing.")
    elif step and "wait" not in stages:
        words.append("Nothing is sent ahead: waiting is part of forward and backward.")
    if step and (words == [] or "input_dist" in hidden):
        words.append(f"The step waited {ms_text(waited)} of its {ms_text(step)} ({number(100 * waited / step, 2)}%).")
    return " ".join(words) or f"{len(stages)} stages."


def _numbers(events: Sequence[Any], stages: Sequence[str], hidden: Mapping[str, float]) -> TextTable:
    rows = []
    for stage in stages:
        behind = f"{number(100 * hidden[stage])}%" if stage in hidden else ""
        longest = max(event.ms for event in events if event.stage == stage)
        rows.append([look_of(stage, STAGES).label, ms_text(stage_ms(events, stage)), ms_text(longest), behind])
    return TextTable(["stage", "a batch", "longest", "behind computing"], rows)


def _panel(events: Sequence[Any], lanes: list[_Lane], span_ms: float, width: int) -> spec.Panel:
    begin, end = min(event.start_s for event in events), max(event.end_s for event in events)
    longest = max(1e3 * (end - begin), span_ms) or 1.0
    place = {lane: float(i) for i, lane in enumerate(lanes)}
    marks: list[spec.Mark] = []
    for stage in sorted({event.stage for event in events}, key=_order):
        own = [event for event in events if event.stage == stage and (event.rank, _lane_of(stage)) in place]
        look = look_of(stage, STAGES)
        rows = [
            (
                place[event.rank, _lane_of(stage)],
                1e3 * (event.start_s - begin),
                1e3 * (event.start_s - begin) + event.ms,
                f"rank {event.rank}, batch {event.batch}\n{look.label}: {ms_text(event.ms)}",
                _fitting(event.batch, event.ms / longest * (width - 170)),
            )
            for event in own
        ]
        marks += spec.bars(look.label, look, rows, across=True)
    names = [f"rank {rank}, {look_of(lane, STAGES).label}" for rank, lane in lanes]
    axis = spec.Axis("linear", 0.0, 1.01 * longest, "", "ms")
    return spec.Panel(
        axis, spec.categories(names), tuple(marks), height=len(lanes) * (22.0 if len(lanes) <= 16 else 16.0)
    )


def _fitting(batch: int, pixels: float) -> str:
    words = fit([str(batch)], pixels - 8, 11)
    return "" if words.endswith("…") else words
