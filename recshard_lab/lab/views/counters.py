"""Counters: what optimizers and caches of living ranks hold and have counted, a line a table, a curve a number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from recshard_lab.lab.draw.plots import figure
from recshard_lab.lab.draw.rank_columns import MARGIN
from recshard_lab.lab.draw.svg import Svg, fit
from recshard_lab.lab.draw.theme import LINES, as_sentence, bytes_text, count_text, number
from recshard_lab.lab.draw.view import View, message_view
from recshard_lab.lab.views.registry import register_view
from recshard_lab.text_table import TextTable

MOST_LINES = 12  # tables, or ranks of one, that are drawn; the others are named by number
MOST_TOLD = 64  # lines of numbers
MOST_POINTS = 120  # of a curve in the static picture
LINE = 40.0


@dataclass(frozen=True)
class Column:
    """One number of a table.

    Args:
        head: what it is.
        value: of a table's counters; None where the table has no such thing.
        text: as people read it.
        curve: whether its course is drawn.
        under: a further number, in small print.
    """

    head: str
    value: Callable[[Any], float | None]
    text: Callable[[float], str]
    curve: bool = True
    under: Callable[[Any], str] = lambda table: ""


def _percent(share: float) -> str:
    return f"{number(100 * share)}%"


def _cache_words(table: Any) -> str:
    evicted = table.evictions
    return "" if evicted is None else f"evicted {count_text(evicted)}"


def _rate(value: float) -> str:
    return count_text(round(value))


def _rate_words(name: str, value: float | None) -> str:
    return "" if value is None else f"{name} {_rate(value)}"


def _grown(table: Any) -> float | None:
    return table.counted.get("grown_rows")


COLUMNS = (
    Column("lookups", lambda t: float(t.lookups()), count_text, False, lambda t: _kinds(t)),
    Column("rows looked up", lambda t: t.touched_share, _percent, True, lambda t: f"of {count_text(t.rows)}"),
    Column("slots in use", lambda t: t.load_factor, _percent, True, lambda t: f"of {count_text(t.slots or 0)}"),
    Column("in fast memory", lambda t: t.fast_share, _percent, True, lambda t: f"host {count_text(t.lookups('ddr'))}"),
    Column("cache hits", lambda t: t.hit_share, _percent, True, _cache_words),
    Column("misses/step", lambda t: t.a_step("misses"), _rate, True, lambda t: _rate_words("hits", t.a_step("hits"))),
    Column(
        "evicted/step",
        lambda t: t.a_step("evictions"),
        _rate,
        True,
        lambda t: _rate_words("admitted", t.a_step("admissions", "inserts")),
    ),
    Column("rows grown", _grown, count_text),
    Column(
        "optimizer state",
        lambda t: t.state_norm,
        lambda v: f"norm {number(v)}",
        True,
        lambda t: bytes_text(t.state("bytes")),
    ),
    Column("weights", lambda t: t.weight_norm, lambda v: f"norm {number(v, 4)}"),
    Column("steps counted", lambda t: None if t.steps is None else float(t.steps), count_text, False),
    Column("no such row", lambda t: float(t.out_of_range) or None, count_text, False),
)


def _kinds(table: Any) -> str:
    own = table.lookups("replica")
    return f"at home {count_text(own)}" if own else ""


@register_view("Counters", place=11)
def counters(history: Sequence[Any], *, table: str | None = None, note: str = "", width: int = 860) -> View:
    """What each table's optimizer and caches have counted, and its course over the samples.

    Args:
        history: samples, oldest first, as `lab.counters.read` or `LiveCounters.history` give them.
        table: this one alone, a line a rank.
        note: a sentence under the picture.
        width: of the static picture, in pixels.
    """
    samples = list(history)
    if not samples:
        return message_view("counters", "Counters", "There is no sample yet.")
    last = samples[-1]
    totals = last.totals()
    if table is not None and table not in totals:
        raise ValueError(f"there is no table {table!r}; tables: {', '.join(list(totals)[:8])}")
    if not totals:
        return message_view("counters", "Counters", "The model holds no table.")
    if table is None:
        keys: list[tuple[str, int | None]] = [(name, None) for name in totals]
    else:
        keys = [(table, rank) for rank in range(len(last.ranks))]
    told = {key: last.table(*key) for key in keys[:MOST_TOLD]}
    columns = [c for c in COLUMNS if any(c.value(one) is not None for one in told.values())]
    what = f"{len(totals)} table" + "s" * (len(totals) != 1) if table is None else table
    title = f"Counters of {what} after step {last.step:,}, {len(last.ranks)} rank" + "s" * (len(last.ranks) != 1)
    summary = _summary(last.sums(table), sum(totals.values()) if table is None else totals[table])

    def draw(uid: str) -> Svg:
        return _draw(samples, keys, columns, (title, summary, note), width, uid)

    def plot() -> Any:
        return _plot(samples, keys, columns, title)

    return View("counters", title, summary, _numbers(last, keys, columns), draw, plot)


def _summary(sums: dict[str, float], lookups: int) -> str:
    words = f"{count_text(lookups)} lookups; optimizer state {bytes_text(sums['state_bytes'])}."
    own = sums["own_hits"] + sums["own_misses"]
    if own:
        words += f" {_percent(sums['own_hits'] / own)} of lookups hit one of {count_text(sums['slots'])} slots."
    hits, asked = sums["hits"], sums["hits"] + sums["misses"]
    if asked:
        words += (
            f" Caches of {count_text(sums['capacity'])} rows in all would have hit {_percent(hits / asked)}; they "
            f"would hold {count_text(sums['held'])} rows now (reckoned from the ids: no row is cached)."
        )
    return words


def _named(key: tuple[str, int | None]) -> str:
    return key[0] if key[1] is None else f"rank {key[1]}"


def _draw(
    samples: list[Any],
    keys: list[tuple[str, int | None]],
    columns: list[Column],
    words: tuple[str, str, str],
    width: int,
    uid: str,
) -> Svg:
    title, summary, note = words
    svg = Svg(width, 0, title, summary, uid)
    top = svg.head(title, summary, MARGIN) + 22
    names = min(130.0, width * 0.2)
    each = (width - 2 * MARGIN - names) / len(columns)
    for i, column in enumerate(columns):
        svg.text(MARGIN + names + i * each, top, fit([column.head], each - 4, 10.5), size=10.5, bold=True)
    svg.line(MARGIN, top + 5.5, width - MARGIN, top + 5.5, 'stroke-opacity=".4"')
    shown = keys if len(keys) <= MOST_LINES else keys[: MOST_LINES - 1]
    points = _thinned(samples)
    for line, key in enumerate(shown):
        y = top + 8 + line * LINE
        svg.text(MARGIN, y + 17, fit([_named(key)], names - 6, 11))
        now = samples[-1].table(*key)
        for i, column in enumerate(columns):
            x = MARGIN + names + i * each
            value = column.value(now)
            if value is None:
                svg.text(x, y + 15, "none", size=10, soft=True)
                continue
            room = each - 8
            svg.text(x, y + 13, fit([column.text(value)], room, 10.5), size=10.5)
            svg.text(x, y + 25, fit([column.under(now)], room, 9), size=9, soft=True)
            if column.curve:
                start = x + max(66.0, len(column.text(value)) * 6.2 + 6, len(column.under(now)) * 5.2 + 6)
                if x + each - 10 - start >= 24:
                    course = [
                        column.value(sample.table(*key)) for sample in points if key[0] in sample.ranks[0]["tables"]
                    ]
                    _spark(svg, (start, y + 3, x + each - 10, y + 25), course, f"{_named(key)}, {column.head}")
        svg.line(MARGIN, y + LINE - 8, width - MARGIN, y + LINE - 8, 'stroke-opacity=".12"')
    bottom = top + 8 + len(shown) * LINE
    if len(shown) < len(keys):
        rest = f"and {len(keys) - len(shown)} more {'tables, looked up less' if keys[0][1] is None else 'ranks'}"
        svg.text(MARGIN, bottom + 8, rest, soft=True)
        bottom += 16
    told = "Curves: over the samples, each from its lowest to its highest." if len(points) > 1 else ""
    svg.text(MARGIN, bottom + 10, f"{told} {as_sentence(note)}".strip(), soft=True)
    svg.height = bottom + 20
    return svg


def _spark(svg: Svg, box: tuple[float, float, float, float], course: list[float | None], hover: str) -> None:
    """A small curve from its lowest to its highest value, with a dot at its end; level where nothing changes."""
    left, top, right, bottom = box
    values = [value for value in course if value is not None and value == value]
    if len(values) < 2:
        return
    low, high = min(values), max(values)
    span = high - low
    step = (right - left) / (len(values) - 1)
    dots = [
        (left + i * step, bottom - (value - low) / span * (bottom - top) if span else (top + bottom) / 2)
        for i, value in enumerate(values)
    ]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in dots)
    words = f"{hover}: from {number(values[0], 4)} to {number(values[-1], 4)}"
    svg.path(f"M{path}", 'fill="none" stroke="currentColor" stroke-width="1.4" stroke-linejoin="round"', words)
    x, y = dots[-1]
    svg.path(f"M{x - 2:.1f} {y:.1f}a2 2 0 1 0 4 0a2 2 0 1 0 -4 0", 'fill="currentColor"')


def _thinned(samples: list[Any]) -> list[Any]:
    """At most so many samples, the last one among them."""
    if len(samples) <= MOST_POINTS:
        return samples
    step = (len(samples) - 1) / (MOST_POINTS - 1)
    return [samples[round(i * step)] for i in range(MOST_POINTS)]


def _numbers(last: Any, keys: list[tuple[str, int | None]], columns: list[Column]) -> TextTable:
    """A line a table and rank where they can be read one by one, else a line a table, of those looked up most."""
    of_ranks = keys[0][1] is not None
    ranked = of_ranks or len(keys) * len(last.ranks) <= MOST_TOLD
    every = (
        keys if of_ranks else [(name, rank) for name, _ in keys for rank in range(len(last.ranks))] if ranked else []
    )
    heads = ["table", *(["rank"] if ranked else []), *(part for c in columns for part in (c.head, ""))]
    rows = []
    for name, rank in every:
        counted = last.table(name, rank)
        cells = []
        for column in columns:
            value = column.value(counted)
            cells += ["", ""] if value is None else [column.text(value), column.under(counted)]
        rows.append([name, *([str(rank)] if ranked else []), *cells])
    if not ranked and len(keys) > MOST_TOLD:
        rows.append([f"and {len(keys) - MOST_TOLD} more, looked up less", *[""] * (len(heads) - 1)])
    return TextTable(heads, rows)


def _plot(samples: list[Any], keys: list[tuple[str, int | None]], columns: list[Column], title: str) -> Any:
    """Curves over the steps; a menu chooses the number."""
    import plotly.graph_objects as go

    drawn = [column for column in columns if column.curve]
    drawn.sort(key=lambda column: column.head != "cache hits")
    shown, points = keys[:MOST_LINES], _thinned(samples)
    traces = []
    for place, column in enumerate(drawn):
        for i, key in enumerate(shown):
            colour, dash, symbol = LINES[i % len(LINES)]
            pairs = [(s.step, column.value(s.table(*key))) for s in points]
            traces.append(
                go.Scatter(
                    name=_named(key),
                    x=[step for step, value in pairs if value is not None],
                    y=[float(f"{value:.6g}") for _, value in pairs if value is not None],
                    mode="lines+markers" if len(points) <= 30 else "lines",
                    marker={"symbol": symbol, "size": 7},
                    line={"color": colour, "dash": ",".join(f"{d}px" for d in dash.split()) or "solid"},
                    visible=place == 0,
                    hovertemplate=f"step %{{x}}<br>{column.head} %{{y:.5g}}",
                )
            )
    each = len(shown)
    buttons = [
        {
            "label": column.head,
            "method": "update",
            "args": [{"visible": [i // each == place for i in range(len(traces))]}],
        }
        for place, column in enumerate(drawn)
    ]
    menu = [{"buttons": buttons, "x": 1, "xanchor": "right", "y": 1.18, "yanchor": "top"}] if len(buttons) > 1 else []
    return figure(traces, title, updatemenus=menu, xaxis={"title": {"text": "step"}})
