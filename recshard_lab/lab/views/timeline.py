"""When the stages of a pipeline ran: one lane a rank and stage, what overlapped and what waited.

The stages of a step (wait, forward, backward, optimizer) run one after the other in one thread and share a lane. A
stage is hidden as far as the same rank was computing meanwhile; what the step's thread spent waiting is what was not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import isfinite
from statistics import median
from typing import Any

from recshard_lab.lab.draw.plots import figure, marker
from recshard_lab.lab.draw.rank_columns import MARGIN
from recshard_lab.lab.draw.svg import Svg, fit
from recshard_lab.lab.draw.theme import LABEL_INK, STAGES, as_sentence, look_of, ms_text, number, ticks, with_notes
from recshard_lab.lab.draw.view import View, message_view
from recshard_lab.lab.views.registry import register_view
from recshard_lab.text_table import TextTable
from recshard_lab.train.stages import COMPUTE, hidden_share, stage_ms

STEP = ("wait", *COMPUTE)
MOST_RANKS = 8
SHOWN = 6  # batches drawn where no others are asked for
LEFT = 130
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
        note = f"{len(events) - len(timed)} stages whose times are no numbers are left out. {as_sentence(note)}".strip()
    events = sorted(timed, key=lambda event: event.start_s)
    if not events:
        return message_view("timeline", "Timeline", "There is no stage to show: no batch has gone through yet.")
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
    summary = with_notes(_summary(hidden, len(stages), step, waited), (event.times_note for event in events))
    if len(ranks) > MOST_RANKS:
        note = f"The first {MOST_RANKS} of {len(ranks)} ranks. {as_sentence(note)}".strip()
    lanes = [
        (rank, lane)
        for rank in ranks[:MOST_RANKS]
        for lane in dict.fromkeys(_lane_of(event.stage) for event in sorted(drawn, key=lambda e: _order(e.stage)))
    ]

    def draw(uid: str) -> Svg:
        return _draw(drawn, lanes, title, summary, note, width, uid, span_ms or 0.0)

    def plot() -> Any:
        return _plot(drawn, lanes, title)

    return View("timeline", title, summary, _numbers(known, stages, hidden), draw, plot)


def _middle(batches: Sequence[int]) -> tuple[int, int]:
    if len(batches) <= SHOWN:
        return batches[0], batches[-1]
    start = max(1, (len(batches) - SHOWN) // 2)
    return batches[start], batches[start + SHOWN - 1]


def _during(events: Sequence[Any], first: int, last: int) -> list[Any]:
    """What happened from the first step of ``first`` to the last one of ``last``, of whatever batch."""
    asked = [event for event in events if first <= event.batch <= last]
    steps = [event for event in asked if event.stage in COMPUTE] or asked
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


def _summary(hidden: Mapping[str, float], stages: int, step: float, waited: float) -> str:
    words = []
    if "input_dist" in hidden:
        words.append(f"{number(100 * hidden['input_dist'])}% of input_dist ran behind computing.")
    elif step:
        words.append("Nothing is sent ahead: what the step waits for lies inside forward and backward.")
    if step and (words == [] or "input_dist" in hidden):
        words.append(f"The step waited {ms_text(waited)} of its {ms_text(step)} ({number(100 * waited / step, 2)}%).")
    return " ".join(words) or f"{stages} stages."


def _numbers(events: Sequence[Any], stages: Sequence[str], hidden: Mapping[str, float]) -> TextTable:
    rows = []
    for stage in stages:
        behind = f"{number(100 * hidden[stage])}%" if stage in hidden else ""
        longest = max(event.ms for event in events if event.stage == stage)
        rows.append([look_of(stage, STAGES).label, ms_text(stage_ms(events, stage)), ms_text(longest), behind])
    return TextTable(["stage", "a batch", "longest", "behind computing"], rows)


def _draw(
    events: Sequence[Any],
    lanes: list[_Lane],
    title: str,
    summary: str,
    note: str,
    width: int,
    uid: str,
    span_ms: float,
) -> Svg:
    begin, end = min(event.start_s for event in events), max(event.end_s for event in events)
    longest = max(1e3 * (end - begin), span_ms) or 1.0
    scale = (width - LEFT - MARGIN - 4) / longest
    thick = 18 if len(lanes) <= 16 else 12
    svg = Svg(width, 0, title, summary, uid)
    top = y = svg.head(title, summary, MARGIN) + 12
    places: dict[_Lane, float] = {}
    for number_, (rank, lane) in enumerate(lanes):
        if number_ and lanes[number_ - 1][0] != rank:
            y += 8
        if not number_ or lanes[number_ - 1][0] != rank:
            svg.text(MARGIN, y + thick / 2 + 4, f"rank {rank}", bold=True)
        places[rank, lane] = y
        words = fit([look_of(lane, STAGES).label, lane], LEFT - 62, 10)
        svg.text(LEFT - 8, y + thick / 2 + 4, words, size=10, anchor="end")
        svg.line(LEFT, y + thick / 2, width - MARGIN, y + thick / 2, 'stroke-opacity=".2"')
        y += thick + 4
    for tick in ticks(0.0, longest):
        x = LEFT + tick * scale
        svg.line(x, top, x, y, 'stroke-opacity=".15"')
    for event in events:
        place = (event.rank, _lane_of(event.stage))
        if place in places:
            _bar(svg, event, LEFT + 1e3 * (event.start_s - begin) * scale, event.ms * scale, places[place], thick)
    svg.line(LEFT, y, width - MARGIN, y, 'stroke-opacity=".6"')
    for tick in ticks(0.0, longest):
        words = "0" if not tick else ms_text(tick)
        svg.text(LEFT + tick * scale, y + 15, words, anchor="middle", size=10, soft=True)
    used = sorted({event.stage for event in events}, key=_order)
    bottom = svg.legend(MARGIN, y + 26, [(look_of(s, STAGES), look_of(s, STAGES).label) for s in used], width - 28)
    svg.text(MARGIN, bottom + 9, f"Numbers in bars: the batch. {as_sentence(note)}".strip(), soft=True)
    svg.height = bottom + 18
    return svg


def _bar(svg: Svg, event: Any, x: float, long: float, y: float, thick: float) -> None:
    look = look_of(event.stage, STAGES)
    hover = f"rank {event.rank}, batch {event.batch}\n{look.label}: {ms_text(event.ms)}"
    svg.rect(x, y, max(long, 0.4), thick, svg.fill(look), hover, f'stroke="{LABEL_INK}" stroke-width=".5"')
    words = fit([str(event.batch)], long - 4, 10)
    if words and "…" not in words:
        halo = f'stroke="{look.fill}" stroke-width="3" paint-order="stroke"'
        svg.text(x + long / 2, y + thick / 2 + 3.6, words, size=10, anchor="middle", ink=LABEL_INK, extra=halo)


def _plot(events: Sequence[Any], lanes: list[_Lane], title: str) -> Any:
    import plotly.graph_objects as go

    begin = min(event.start_s for event in events)
    traces = []
    for stage in sorted({event.stage for event in events}, key=_order):
        own = [event for event in events if event.stage == stage]
        look = look_of(stage, STAGES)
        traces.append(
            go.Bar(
                name=look.label,
                orientation="h",
                y=[_label(event.rank, _lane_of(stage)) for event in own],
                x=[event.ms for event in own],
                base=[1e3 * (event.start_s - begin) for event in own],
                marker=marker(look),
                customdata=[event.batch for event in own],
                hovertemplate=f"%{{y}}<br>{look.label} of batch %{{customdata}}: %{{x:.4g}} ms<extra></extra>",
            )
        )
    order = [_label(rank, lane) for rank, lane in lanes]
    return figure(
        traces,
        title,
        barmode="overlay",
        height=170 + 24 * len(lanes),
        yaxis={"categoryorder": "array", "categoryarray": order[::-1], "showgrid": False},
        xaxis={"title": {"text": "ms"}, "showgrid": True, "gridcolor": "rgba(128,136,146,.25)"},
    )


def _label(rank: int, lane: str) -> str:
    return f"rank {rank}, {look_of(lane, STAGES).label}"
