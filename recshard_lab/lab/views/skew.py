"""Access skew: the share of lookups that few rows get, and its effect on ranks that hold equal shares of the rows.

The first panel shows the share of the lookups of the hottest rows. The panels below show the lookups of every rank if
ids are sorted by use: row shards with equal numbers of rows, and row shards with equal numbers of lookups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from recshard_lab.lab.charts import spec
from recshard_lab.lab.draw.theme import LINES, Look, as_sentence, count_text, number
from recshard_lab.lab.draw.view import View, message_view
from recshard_lab.lab.views.registry import register_view
from recshard_lab.planner import AccessProfile
from recshard_lab.text_table import TextTable

MOST_TABLES = 10  # curves drawn one by one
HEIGHT, BARS = 190.0, 90.0

EQUAL_ROWS = Look("equal numbers of rows", "#f6bd83", "rows")
EQUAL_LOOKUPS = Look("equal numbers of lookups", "#9cc4ee", "plain")

_Array = NDArray[np.float64]


@register_view("Access skew", place=6)
def access_skew(
    access: Mapping[str, AccessProfile] | AccessProfile,
    *,
    num_embeddings: Mapping[str, int] | int | None = None,
    table: str | None = None,
    world_size: int = 4,
    note: str = "",
    width: int = 860,
) -> View:
    """The curve of hot rows of each table, and the lookups of every rank under two ways to cut one of them by rows.

    Args:
        access: table -> profile, or one profile; counts of ids make one by ``AccessProfile.of_ids``.
        num_embeddings: rows, table -> number or one for all. Default: the rows that were used.
        table: the one whose ranks are drawn. Default: the most skewed.
        world_size: ranks W that it is split over.
        note: a sentence under the picture.
        width: of the static picture, in pixels.

    Raises:
        ValueError: `access` has no profile of the table.

    >>> view = access_skew(AccessProfile(uses=(1.0, 97.0), rows=(3.0, 1.0)), world_size=2)
    >>> view.summary
    'The hottest 1% of rows get 97% of the lookups. With equal numbers of rows, rank 0 of 2 gets 98% of them.'
    """
    profiles = dict(access) if isinstance(access, Mapping) else {"table": access}
    if not profiles:
        return message_view("access_skew", "Access skew", "No table has a profile of its use.")
    if table is not None and table not in profiles:
        raise ValueError(f"access has no profile of table {table!r}. Profiles: {', '.join(profiles)}")
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size!r}")
    curves = {name: _Curve(profile, _rows(num_embeddings, name, profile)) for name, profile in profiles.items()}
    chosen = table or max(curves, key=lambda name: curves[name].share(0.01))
    curve = curves[chosen]
    equal, balanced = curve.shards(world_size, by_lookups=False), curve.shards(world_size, by_lookups=True)
    of = "" if len(curves) == 1 and not isinstance(access, Mapping) else f" of {chosen}"
    title = f"Access skew{of}: {count_text(curve.rows)} rows"
    summary = (
        f"The hottest 1% of rows get {_percent(curve.share(0.01))} of the lookups. With equal numbers of rows, "
        f"rank 0 of {world_size} gets {_percent(equal[0][1])} of them."
    )

    tallest = max(share for _, share in (*equal, *balanced))
    bars = [(EQUAL_ROWS, equal), (EQUAL_LOOKUPS, balanced)]
    rows = [(_curve_panel(curves, chosen),), *((_rank_panel(look, shards, tallest, width),) for look, shards in bars)]
    words = "Dashed: equal shares of all ranks."
    if len(curves) > MOST_TABLES:
        words += f" {len(curves) - MOST_TABLES} less skewed tables are not drawn."
    chart = spec.Chart(title, summary, tuple(rows), f"{words} {as_sentence(note)}".strip())
    return View.of_chart("access_skew", chart, _numbers(curves), width)


class _Curve:
    """Lookups as a function of the hottest rows, from one profile."""

    def __init__(self, profile: AccessProfile, rows: float) -> None:
        held, uses = np.array(profile.rows)[::-1], np.array(profile.uses)[::-1]
        self.rows = rows
        self.x = np.concatenate([[0.0], np.cumsum(held)])  # rows, hottest first
        self.y = np.concatenate([[0.0], np.cumsum(held * uses)]) / profile.num_ids

    def share(self, of_rows: float) -> float:
        """The share of lookups of this share of the rows, and of one row at least."""
        return float(np.interp(max(of_rows * self.rows, min(1.0, self.rows)), self.x, self.y))

    def shards(self, ranks: int, by_lookups: bool) -> list[tuple[float, float]]:
        """``(rows, share of lookups)`` of every rank's row shard, rows sorted by use."""
        even = np.arange(1, ranks) / ranks
        inner = np.interp(even, self.y, self.x) if by_lookups else even * self.rows
        ends = np.concatenate([[0.0], inner, [self.rows]])
        if by_lookups:
            ends = np.round(ends)
        shares = np.diff(np.interp(ends, self.x, self.y))
        return list(zip(np.diff(ends).tolist(), shares.tolist(), strict=True))

    def points(self) -> tuple[_Array, _Array]:
        """Per cent of rows and of lookups, evenly along a logarithmic axis."""
        low = max(1e-4, min(0.01, 1 / self.rows))
        shares = np.geomspace(low, 1.0, 160)
        return 100 * shares, 100 * np.interp(shares * self.rows, self.x, self.y)


def _rows(given: Mapping[str, int] | int | None, name: str, profile: AccessProfile) -> float:
    stated = given.get(name) if isinstance(given, Mapping) else given
    rows = profile.num_rows if stated is None else float(stated)
    if rows < profile.num_rows * (1 - 1e-9):
        raise ValueError(
            f"table {name!r} has {rows:,.0f} rows by num_embeddings, but {profile.num_rows:,.0f} of them were used"
        )
    return rows


def _percent(share: float) -> str:
    return f"{number(100 * share, 2)}%"


def _curve_panel(curves: dict[str, _Curve], chosen: str) -> spec.Panel:
    drawn = _shown(curves, chosen)
    marks = []
    for i, name in enumerate(drawn):
        colour, dash, symbol = LINES[i % len(LINES)]
        xs, ys = (tuple(values.tolist()) for values in curves[name].points())
        marks.append(spec.Lines(name, xs, ys, colour, dash, symbol, 3.0 if name == chosen else 1.8))
    low = min(mark.x[0] for mark in marks)
    powers = tuple(10.0**power for power in range(int(np.ceil(np.log10(low) - 1e-9)), 3))
    x = spec.Axis("log10", low, 100.0, "share of the rows, hottest first", "%", powers)
    y = spec.Axis("linear", 0.0, 100.0, "share of the lookups", "%", (0.0, 25.0, 50.0, 75.0, 100.0))
    return spec.Panel(x, y, tuple(marks), height=HEIGHT)


def _rank_panel(look: Look, shards: Sequence[tuple[float, float]], tallest: float, width: int) -> spec.Panel:
    """The share of the lookups of every rank under one way to cut the rows."""
    ranks = len(shards)
    wide = (width - 80) / ranks
    each = [
        (
            i,
            0.0,
            100 * share,
            f"rank {i}\n{count_text(rows)} rows\n{_percent(share)} of the lookups",
            _percent(share) if wide >= 40 else "",
        )
        for i, (rows, share) in enumerate(shards)
    ]
    bars = spec.bars(look.label, look, each, label="end")
    even = spec.Rule(y=100 / ranks, words="", dash="3 3")
    least, most = (count_text(pick(rows for rows, _ in shards)) for pick in (min, max))
    rows = f"{least} rows" if least == most else f"{least} to {most} rows"
    axis = spec.Axis("linear", 0.0, 1.22 * 100 * tallest, "", "%")
    title = f"Each rank's share of the lookups: {look.label}, {rows} per rank"
    return spec.Panel(spec.categories(map(str, range(ranks)), "rank"), axis, (*bars, even), title, BARS)


def _shown(curves: dict[str, _Curve], chosen: str) -> list[str]:
    """The chosen table, and the most skewed others."""
    others = sorted((name for name in curves if name != chosen), key=lambda name: -curves[name].share(0.01))
    return [chosen, *others[: MOST_TABLES - 1]]


def _numbers(curves: dict[str, _Curve]) -> TextTable:
    heads = ("table", "rows", *(f"lookups of hottest {share:.3g}%" for share in (0.1, 1.0, 10.0, 50.0)))
    rows = [
        [name, count_text(curve.rows), *(_percent(curve.share(share)) for share in (0.001, 0.01, 0.1, 0.5))]
        for name, curve in curves.items()
    ]
    return TextTable(heads, rows)
