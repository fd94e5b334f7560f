"""Counters: what optimizers and caches of running ranks hold and have counted, a panel per number, a line per table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from recshard_lab.lab.charts import spec
from recshard_lab.lab.draw.theme import LINES, as_sentence, bytes_text, count_text, counted, number
from recshard_lab.lab.draw.view import View, message_view
from recshard_lab.lab.views.registry import register_view
from recshard_lab.text_table import TextTable

MOST_LINES = 10  # tables, or ranks of one, that are drawn
MOST_ROWS = 64  # lines of numbers
MOST_POINTS = 120  # of a line
FEW_POINTS = 30  # up to which each has a marker
FEW_STEPS = 4  # up to which all have a tick
HEIGHT = 84.0  # pixels of a panel


@dataclass(frozen=True)
class Column:
    """One number of a table.

    Args:
        head: what it is.
        value: of a table's counters; None if the table has none.
        text: as people read it.
        under: a further number, in small print.
    """

    head: str
    value: Callable[[Any], float | None]
    text: Callable[[float], str]
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
    Column("lookups", lambda t: float(t.lookups()), count_text, lambda t: _kinds(t)),
    Column("rows looked up", lambda t: t.touched_share, _percent, lambda t: f"of {count_text(t.rows)}"),
    Column("slots in use", lambda t: t.load_factor, _percent, lambda t: f"of {count_text(t.slots or 0)}"),
    Column("in fast memory", lambda t: t.fast_share, _percent, lambda t: f"host {count_text(t.lookups('ddr'))}"),
    Column("cache hits", lambda t: t.hit_share, _percent, _cache_words),
    Column("misses/step", lambda t: t.a_step("misses"), _rate, lambda t: _rate_words("hits", t.a_step("hits"))),
    Column(
        "evicted/step",
        lambda t: t.a_step("evictions"),
        _rate,
        lambda t: _rate_words("admitted", t.a_step("admissions", "inserts")),
    ),
    Column("rows grown", _grown, count_text),
    Column(
        "optimizer state",
        lambda t: t.state_norm,
        lambda v: f"norm {number(v)}",
        lambda t: bytes_text(t.state("bytes")),
    ),
    Column("weights", lambda t: t.weight_norm, lambda v: f"norm {number(v, 4)}"),
    Column("steps counted", lambda t: None if t.steps is None else float(t.steps), count_text),
    Column("id out of range", lambda t: float(t.out_of_range) or None, count_text),
)


def _kinds(table: Any) -> str:
    own = table.lookups("replica")
    return f"from replicas {count_text(own)}" if own else ""


@register_view("Counters", place=11)
def counters(history: Sequence[Any], *, table: str | None = None, note: str = "", width: int = 860) -> View:
    """What each table's optimizer and caches have counted, over the samples.

    Args:
        history: samples, oldest first, as `lab.counters.read` or `LiveCounters.history` give them.
        table: this one alone, with a line per rank.
        note: a sentence under the picture.
        width: of the static picture, in pixels.
    """
    samples = list(history)
    if not samples:
        return message_view("counters", "Counters", "No sample yet.")
    last = samples[-1]
    totals = last.totals()
    if table is not None and table not in totals:
        raise ValueError(f"unknown table {table!r}. Tables: {', '.join(list(totals)[:8])}")
    if not totals:
        return message_view("counters", "Counters", "The model holds no table.")
    if table is None:
        keys: list[tuple[str, int | None]] = [(name, None) for name in totals]
    else:
        keys = [(table, rank) for rank in range(len(last.ranks))]
    texts = {key: last.table(*key) for key in keys[:MOST_ROWS]}
    columns = [c for c in COLUMNS if any(c.value(one) is not None for one in texts.values())]
    what = counted(len(totals), "table") if table is None else table
    title = f"Counters of {what} after step {last.step:,}, {counted(len(last.ranks), 'rank')}"
    summary = _summary(last.sums(table), sum(totals.values()) if table is None else totals[table])

    words = "Beside each name: the newest values."
    if len(keys) > MOST_LINES:
        words += (
            f" {len(keys) - MOST_LINES} more {'tables, looked up less,' if table is None else 'ranks'} are not drawn."
        )
    rows = _rows(samples, keys, columns, width)
    chart = spec.Chart(title, summary, rows, f"{words} {as_sentence(note)}".strip())
    return View.of_chart("counters", chart, _numbers(last, keys, columns), width)


def _summary(sums: dict[str, float], lookups: int) -> str:
    words = f"{count_text(lookups)} lookups; optimizer state {bytes_text(sums['state_bytes'])}."
    own = sums["own_hits"] + sums["own_misses"]
    if own:
        words += f" {_percent(sums['own_hits'] / own)} of lookups hit one of {count_text(sums['slots'])} slots."
    hits, asked = sums["hits"], sums["hits"] + sums["misses"]
    if asked:
        words += (
            f" Caches with {count_text(sums['capacity'])} rows in total would have answered {_percent(hits / asked)} "
            f"of the lookups and would hold {count_text(sums['held'])} rows now. "
            "This is computed from the ids: no row is cached."
        )
    return words


def _named(key: tuple[str, int | None]) -> str:
    return key[0] if key[1] is None else f"rank {key[1]}"


def _rows(
    samples: list[Any], keys: list[tuple[str, int | None]], columns: list[Column], width: int
) -> tuple[tuple[spec.Panel, ...], ...]:
    """A panel for each number that has a course, and one for the lookups; so many beside each other as have room."""
    shown, points = keys[:MOST_LINES], _thinned(samples)
    panels = [panel for column in columns if (panel := _panel(points, shown, column, width))]
    most = 1 if width < 520 else 2 if width < 760 else 3
    beside = -(-len(panels) // -(-len(panels) // most)) if panels else 1
    return tuple(tuple(panels[i : i + beside]) for i in range(0, len(panels), beside))


def _panel(points: list[Any], keys: list[tuple[str, int | None]], column: Column, width: int) -> spec.Panel | None:
    """One number over the steps, a line per table or rank; the newest value is written beside the longest lines."""
    marks: list[spec.Mark] = []
    newest: list[tuple[float, str]] = []
    missing: list[str] = []  # of lines without a finite value
    for i, key in enumerate(keys):
        colour, dash, symbol = LINES[i % len(LINES)]
        known = [
            (float(sample.step), float(value))
            for sample in points
            if key[0] in sample.ranks[0]["tables"] and (value := column.value(sample.table(*key))) is not None
        ]
        pairs = [(step, value) for step, value in known if isfinite(value)]
        if known and not pairs:
            missing.append(column.text(known[-1][1]))
        if not pairs:
            continue
        x, y = zip(*pairs, strict=True)
        texts = tuple(f"{_named(key)}\nstep {at:,.0f}\n{column.head}: {column.text(value)}" for at, value in pairs)
        under = column.under(points[-1].table(*key))
        texts = (*texts[:-1], f"{texts[-1]}\n{under}".strip())
        few = len(pairs) <= FEW_POINTS
        marks.append(spec.Lines(_named(key), x, y, colour, dash, symbol, markers=few, hover=texts))
        newest.append((y[-1], _joined(column.text(y[-1]), under) if len(keys) == 1 else column.text(y[-1])))
    if not marks:
        empty = spec.linear([points[-1].step], "step", zero=False), spec.linear([1.0])
        return spec.Panel(*empty, (), f"{column.head}: {missing[0]}", HEIGHT) if missing else None
    xs, ys = ([value for mark in marks for value in getattr(mark, side)] for side in ("x", "y"))
    percent = column.text is _percent
    y_axis = spec.linear(ys, "", "count", pad=0.08)
    if percent:
        y_axis = spec.Axis("linear", 0.0, 1.0, "", "share", (0.0, 0.5, 1.0))
    newest_words = ", ".join(dict.fromkeys(words for _, words in newest[:3])) + ", ..." * (len(newest) > 3)
    x_axis, steps = spec.linear(xs, "step", zero=False, pad=0.03), sorted(set(xs))
    if len(steps) <= FEW_STEPS:
        x_axis = replace(x_axis, ticks=tuple(steps))
    return spec.Panel(x_axis, y_axis, tuple(marks), f"{column.head}: {newest_words}", HEIGHT)


def _joined(words: str, under: str) -> str:
    return f"{words} {under}" if under.startswith("of ") else ", ".join(filter(None, (words, under)))


def _thinned(samples: list[Any]) -> list[Any]:
    """At most `MOST_POINTS` samples, with the last one."""
    if len(samples) <= MOST_POINTS:
        return samples
    step = (len(samples) - 1) / (MOST_POINTS - 1)
    return [samples[round(i * step)] for i in range(MOST_POINTS)]


def _numbers(last: Any, keys: list[tuple[str, int | None]], columns: list[Column]) -> TextTable:
    """A row per table and rank if they are few, else a row per table, of those looked up most."""
    of_ranks = keys[0][1] is not None
    ranked = of_ranks or len(keys) * len(last.ranks) <= MOST_ROWS
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
    if not ranked and len(keys) > MOST_ROWS:
        rows.append([f"and {len(keys) - MOST_ROWS} more, looked up less", *[""] * (len(heads) - 1)])
    return TextTable(heads, rows)
