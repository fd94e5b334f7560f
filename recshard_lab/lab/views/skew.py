"""Access skew: how few rows get most lookups, and what that does to ranks that hold equal shares of the rows.

Above, the share of lookups that go to the hottest rows, rows sorted by use. Below, the lookups of every rank when ids
are sorted by use: rows cut into equal numbers, and rows cut so that every rank serves as many lookups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recshard_lab.lab.draw.plots import figure, marker
from recshard_lab.lab.draw.rank_columns import MARGIN
from recshard_lab.lab.draw.svg import Svg, fit
from recshard_lab.lab.draw.theme import LABEL_INK, LINES, Look, count_text, number
from recshard_lab.lab.draw.view import View, message_view
from recshard_lab.lab.views.registry import register_view
from recshard_lab.planner import AccessProfile
from recshard_lab.text_table import TextTable

MOST_TABLES = 10  # curves drawn one by one
MOST_RANKS = 32  # bars with a place of their own
LEFT, HEIGHT, BARS = 62.0, 190.0, 84.0

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
        num_embeddings: rows, table -> number or one for all; the rows that were used when left out.
        table: the one whose ranks are drawn; the most skewed when left out.
        world_size: ranks W that it is cut over.
        note: a sentence under the picture.
        width: of the static picture, in pixels.

    Raises:
        ValueError: a table of which `access` says nothing.

    >>> view = access_skew(AccessProfile(uses=(1.0, 97.0), rows=(3.0, 1.0)), world_size=2)
    >>> view.summary
    'The hottest 1% of rows get 97% of the lookups. Cut into equal numbers of rows, rank 0 of 2 gets 98% of them.'
    """
    profiles = dict(access) if isinstance(access, Mapping) else {"table": access}
    if not profiles:
        return message_view(
            "access_skew", "Access skew", "No table has a profile of its use: there is no skew to show."
        )
    if table is not None and table not in profiles:
        raise ValueError(f"access says nothing of table {table!r}; it knows: {', '.join(profiles)}")
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size!r}")
    curves = {name: _Curve(profile, _rows(num_embeddings, name, profile)) for name, profile in profiles.items()}
    chosen = table or max(curves, key=lambda name: curves[name].share(0.01))
    curve = curves[chosen]
    equal, balanced = curve.stripes(world_size, by_lookups=False), curve.stripes(world_size, by_lookups=True)
    of = "" if len(curves) == 1 and not isinstance(access, Mapping) else f" of {chosen}"
    title = f"Access skew{of}: {count_text(curve.rows)} rows"
    summary = (
        f"The hottest 1% of rows get {_percent(curve.share(0.01))} of the lookups. Cut into equal numbers of rows, "
        f"rank 0 of {world_size} gets {_percent(equal[0][1])} of them."
    )

    def draw(uid: str) -> Svg:
        return _draw(curves, chosen, equal, balanced, title, summary, note, width, uid)

    def plot() -> Any:
        return _plot(curves, chosen, equal, balanced, title)

    return View("access_skew", title, summary, _numbers(curves), draw, plot)


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

    def stripes(self, ranks: int, by_lookups: bool) -> list[tuple[float, float]]:
        """``(rows, share of lookups)`` of every rank's stripe of rows sorted by use."""
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


def _draw(
    curves: dict[str, _Curve],
    chosen: str,
    equal: Sequence[tuple[float, float]],
    balanced: Sequence[tuple[float, float]],
    title: str,
    summary: str,
    note: str,
    width: int,
    uid: str,
) -> Svg:
    svg = Svg(width, 0, title, summary, uid)
    top = svg.head(title, summary, MARGIN) + 24
    right = width - MARGIN - 8
    y = _draw_curves(svg, curves, chosen, top, right)
    for look, stripes in ((EQUAL_ROWS, equal), (EQUAL_LOOKUPS, balanced)):
        y = _draw_bars(svg, look, stripes, y + 14, right)
    if note:
        svg.text(MARGIN, y + 12, note, soft=True)
        y += 16
    svg.height = y + 6
    return svg


def _draw_curves(svg: Svg, curves: dict[str, _Curve], chosen: str, top: float, right: float) -> float:
    """Curves, axes and names; returns the y below them."""
    drawn = _shown(curves, chosen)
    low = min(float(curves[name].points()[0][0]) for name in drawn)

    def at(x: float, y: float) -> tuple[float, float]:
        along = (np.log10(x) - np.log10(low)) / (2 - np.log10(low))
        return LEFT + float(along) * (right - LEFT), top + (100 - y) / 100 * HEIGHT

    for level in (0, 25, 50, 75, 100):
        _, height = at(100, level)
        svg.line(LEFT, height, right, height, f'stroke-opacity="{".6" if not level else ".15"}"')
        svg.text(LEFT - 8, height + 4, f"{level}%", anchor="end", size=10, soft=True)
    for power in range(int(np.ceil(np.log10(low) - 1e-9)), 3):
        across, _ = at(10.0**power, 0)
        svg.text(across, top + HEIGHT + 16, f"{10.0**power:g}%", anchor="middle", size=10, soft=True)
    svg.text(LEFT, top - 6, "share of the lookups", soft=True, size=10)
    svg.text(right, top + HEIGHT + 32, "share of the rows, hottest first", anchor="end", soft=True, size=10)
    legend_x, legend_y = LEFT, top + HEIGHT + 48
    for i, name in enumerate(drawn):
        colour, dash, _ = LINES[i % len(LINES)]
        style = f'fill="none" stroke="{colour}" stroke-width="{3 if name == chosen else 1.8}"'
        style += f' stroke-dasharray="{dash}"' if dash else ""
        xs, ys = curves[name].points()
        points = " ".join(
            f"{px:.1f},{py:.1f}" for px, py in (at(float(x), float(y)) for x, y in zip(xs, ys, strict=True))
        )
        told = f"1% of rows, {_percent(curves[name].share(0.01))} of lookups"
        words = fit([f"{name}: {told}", told], right - LEFT - 46, 11.4)
        svg.path(f"M{points}", style, words)
        room = 46 + len(words) * 6.6
        if legend_x > LEFT and legend_x + room > right:
            legend_x, legend_y = LEFT, legend_y + 17
        svg.path(f"M{legend_x:.1f} {legend_y:.1f}h30", style)
        room = svg.width - legend_x - 37 - MARGIN
        svg.text(legend_x + 37, legend_y + 4, fit([words, name], room, 12), bold=name == chosen)
        legend_x += room + 8
    if len(drawn) < len(curves):
        svg.text(LEFT, legend_y + 20, f"and {len(curves) - len(drawn)} tables that are less skewed", soft=True)
        legend_y += 18
    return legend_y + 10


def _draw_bars(svg: Svg, look: Look, stripes: Sequence[tuple[float, float]], y: float, right: float) -> float:
    """Lookups of every rank as bars with their rows under them; returns the y below."""
    ranks = len(stripes)
    svg.rect(LEFT, y, 16, 11, svg.fill(look), extra='stroke="currentColor" stroke-opacity=".5"')
    svg.text(LEFT + 22, y + 9.5, f"{look.label}: share of the lookups of each rank")
    top, base = y + 30, y + 30 + BARS
    each = min((right - LEFT) / ranks, 120.0)
    tallest = max(max(share for _, share in stripes), 1 / ranks)
    even = base - BARS / ranks / tallest
    for rank, (rows, share) in enumerate(stripes):
        left, high = LEFT + rank * each, BARS * share / tallest
        hover = f"rank {rank}\n{count_text(rows)} rows\n{_percent(share)} of the lookups"
        outline = f'stroke="{LABEL_INK}" stroke-width=".6"'
        svg.rect(left + 0.1 * each, base - high, 0.8 * each, high, svg.fill(look), hover, outline)
        if each >= 40:
            middle = left + each / 2
            struck = base - high - 13 < even < base - high - 2 and high >= 16  # by the line of what is even
            where, ink = (base - high + 12, LABEL_INK) if struck else (base - high - 4, "currentColor")
            svg.text(middle, where, _percent(share), anchor="middle", size=10, ink=ink)
            svg.text(middle, base + 14, f"rank {rank}", anchor="middle", size=10)
            words = fit([f"{count_text(rows)} rows", count_text(rows)], each - 2, 10)
            svg.text(middle, base + 27, words, anchor="middle", size=10, soft=True)
    svg.line(LEFT, even, LEFT + ranks * each, even, 'stroke-dasharray="3 3" stroke-opacity=".7"')
    svg.line(LEFT, base, LEFT + ranks * each, base, 'stroke-opacity=".6"')
    svg.text(LEFT - 8, even + 4, "even", anchor="end", size=10, soft=True)
    if each < 40:
        svg.text(LEFT, base + 14, f"rank 0 to rank {ranks - 1}", size=10, soft=True)
    assert top < base
    return base + 32


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


def _plot(
    curves: dict[str, _Curve],
    chosen: str,
    equal: Sequence[tuple[float, float]],
    balanced: Sequence[tuple[float, float]],
    title: str,
) -> Any:
    import plotly.graph_objects as go

    traces: list[Any] = []
    for i, name in enumerate(_shown(curves, chosen)):
        colour, dash, _ = LINES[i % len(LINES)]
        xs, ys = curves[name].points()
        line = {"color": colour, "dash": ",".join(f"{d}px" for d in dash.split()) if dash else "solid"}
        hover = "%{x:.3g}% of the rows<br>%{y:.3g}% of the lookups"
        traces.append(go.Scatter(name=name, x=xs.tolist(), y=ys.tolist(), mode="lines", line=line, hovertemplate=hover))
    for look, stripes in ((EQUAL_ROWS, equal), (EQUAL_LOOKUPS, balanced)):
        traces.append(
            go.Bar(
                name=look.label,
                x=[f"rank {rank}" for rank in range(len(stripes))],
                y=[100 * share for _, share in stripes],
                customdata=[count_text(rows) for rows, _ in stripes],
                marker=marker(look),
                xaxis="x2",
                yaxis="y2",
                hovertemplate="%{x}: %{customdata} rows<br>%{y:.3g}% of the lookups",
            )
        )
    return figure(
        traces,
        title,
        height=560,
        barmode="group",
        xaxis={"type": "log", "title": {"text": "% of the rows, hottest first"}, "anchor": "y"},
        yaxis={"domain": [0.56, 1.0], "title": {"text": "% of the lookups"}, "range": [0, 100]},
        xaxis2={"anchor": "y2"},
        yaxis2={"domain": [0.0, 0.36], "title": {"text": "% of the lookups"}, "anchor": "x2"},
    )
