"""A chart as a plotly figure: hover, zoom and selection; and the same figure with other values, in place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from itertools import chain, pairwise
from textwrap import wrap
from typing import Any

from recshard_lab.lab.charts.spec import (
    Area,
    Axis,
    Band,
    Bars,
    Chart,
    Lines,
    Mark,
    Panel,
    Points,
    Rule,
    Series,
    Span,
    Text,
)
from recshard_lab.lab.draw.svg import text_width
from recshard_lab.lab.draw.theme import HATCHES, LABEL_INK, MIDDLE_INK, Look

SIDES = ("top center", "bottom center", "middle right", "middle left")
GRID = "rgba(128,136,146,.25)"
BETWEEN = 66  # pixels between rows
NAME = 32  # letters of a name at an axis
TITLE = 36  # letters of a line of a panel's title
LETTERS = 60  # of a line of the caption, which fits 400 pixels
_LINE = {"linecolor": MIDDLE_INK, "tickcolor": MIDDLE_INK, "ticks": "outside", "zeroline": False, "automargin": True}


def figure_of(chart: Chart) -> Any:
    """The chart as a ``plotly.graph_objects.Figure``.

    >>> from recshard_lab.lab.charts.spec import linear
    >>> panel = Panel(linear([1, 2]), linear([5, 7]), (Lines("loss", (1, 2), (7, 5)),))
    >>> figure_of(Chart("Loss", "The loss falls to 5.", ((panel,),))).data[0].y
    (7.0, 5.0)
    """
    import plotly.graph_objects as go

    traces, layout = _parts(chart)
    return go.Figure(data=traces, layout=layout)


def widget_of(chart: Chart) -> Any:
    """The chart as a ``FigureWidget``, which `update` changes in place."""
    import plotly.graph_objects as go

    traces, layout = _parts(chart)
    return go.FigureWidget(data=traces, layout=layout)


def update(figure: Any, chart: Chart) -> None:
    """Shows another chart in a figure; zoom, hidden series and selection stay where the traces are the same ones.

    Args:
        figure: of `figure_of` or `widget_of`.
        chart: what it is to show.
    """
    traces, layout = _parts(chart)
    with figure.batch_update():
        if [(trace.type, trace.name) for trace in figure.data] == [(t["type"], t["name"]) for t in traces]:
            for old, new in zip(figure.data, traces, strict=True):
                old.update(new, overwrite=True)
        else:
            figure.data = []
            figure.add_traces(traces)
        figure.layout.update(layout, overwrite=True)


def _parts(chart: Chart) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Traces and layout as plain mappings."""
    heights = [max(panel.height for panel in panels) for panels in chart.rows]
    gaps = [BETWEEN + max(_over(panel) for panel in panels) for panels in chart.rows[1:]]
    plot = sum(heights) + sum(gaps)
    legend = chart.legend
    shown = len(legend) > 1 or any(isinstance(mark, Band) for mark in legend.values())
    lines, narrow = (_legend_lines(list(legend), wide) * shown for wide in (760.0, 340.0))
    subtitle = [*wrap(chart.caption, LETTERS), *wrap(chart.note, LETTERS)]
    top = 48 + 17 * len(subtitle) + max(_over(panel) for panel in chart.rows[0])
    below = 58 + 24 * lines
    layout: dict[str, Any] = {
        "template": "none",
        "title": {
            "text": chart.title,
            "subtitle": {"text": "<br>".join(map(escape, subtitle)), "font": {"size": 12, "color": MIDDLE_INK}},
            "font": {"size": 15},
            "x": 0,
            "xref": "container",
            "xanchor": "left",
            "y": 1,
            "yref": "container",
            "yanchor": "top",
            "pad": {"t": 10, "l": 8},
        },
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": MIDDLE_INK, "size": 12},
        "margin": {"l": 40, "r": 20, "t": top, "b": below},
        "height": plot + top + below,
        "showlegend": shown,
        "legend": {"orientation": "h", "x": 0, "xref": "container", "y": 0, "yref": "container", "yanchor": "bottom"},
        "barmode": "overlay",
        "hoverlabel": {"align": "left"},
        "hovermode": "closest",
        "dragmode": "zoom",
        "uniformtext": {"mode": "hide", "minsize": 9},
        "shapes": [],
        "annotations": [],
        "meta": {"over": max(_over(panel) for panel in chart.rows[0]), "narrow": 24 * (narrow - lines)},
    }
    traces: list[dict[str, Any]] = []
    named: set[str] = set()
    number, high = 0, float(plot)
    firsts: dict[Axis, str] = {}
    for row, panels in enumerate(chart.rows):
        low = high - heights[row]
        spans = _spans_of_row(panels)
        for place, panel in enumerate(panels):
            number += 1
            suffix = "" if number == 1 else str(number)
            shared = place > 0 and panel.y == panels[place - 1].y
            x, y = _axis(panel.x, panel), _axis(panel.y, panel)
            x |= {"domain": spans[place], "anchor": f"y{suffix}"}
            y |= {"domain": [low / plot, high / plot], "anchor": f"x{suffix}"}
            for name, axis, made in (("x", panel.x, x), ("y", panel.y, y)):
                if axis in firsts and firsts[axis].startswith(name):
                    made["matches"] = firsts[axis]
                firsts.setdefault(axis, f"{name}{suffix}")
            if shared:
                y |= {"showticklabels": False, "ticks": "", "title": {"text": ""}}
            layout[f"xaxis{suffix}"], layout[f"yaxis{suffix}"] = x, y
            axes = {"xaxis": f"x{suffix}", "yaxis": f"y{suffix}"}
            traces += [_trace(mark, axes, named, panel) for mark in panel.marks if isinstance(mark, Series)]
            for mark in panel.marks:
                _decorate(layout, traces, mark, panel, axes, named)
            if panel.title:
                head_text = "<br>".join(map(escape, _title(panel)))
                head = {"text": f"<b>{head_text}</b>", "align": "left", "xref": f"{axes['xaxis']} domain", "x": 0}
                head |= {
                    "yref": f"{axes['yaxis']} domain",
                    "y": 1,
                    "yshift": 20 if _spans(panel) else 18 if _over(panel) > 16 * len(_title(panel)) else 4,
                }
                layout["annotations"].append(head | {"xanchor": "left", "yanchor": "bottom", "showarrow": False})
        high = low - (gaps[row] if row < len(gaps) else 0)
    return traces, layout


def _spans(panel: Panel) -> bool:
    return any(isinstance(mark, Span) for mark in panel.marks)


def _title(panel: Panel) -> list[str]:
    return wrap(panel.title, TITLE)


def _over(panel: Panel) -> int:
    """Pixels over a panel for its title and brackets."""
    return 16 * len(_title(panel)) + 18 * _spans(panel) + 16 * any(isinstance(m, Rule) and m.words for m in panel.marks)


def _legend_lines(names: Sequence[str], width: float) -> int:
    """About how many lines a legend takes."""
    return 1 + int(sum(text_width(name, 12) + 44 for name in names) / width)


def _spans_of_row(panels: Sequence[Panel]) -> list[list[float]]:
    """Left and right end of each panel, as shares of the figure's width."""
    gaps = [0.03 if b.y == a.y else 0.11 for a, b in pairwise(panels)]
    room, x, found = 1 - sum(gaps), 0.0, []
    for gap, panel in zip([*gaps, 0.0], panels, strict=True):
        wide = room * panel.share / sum(each.share for each in panels)
        found.append([x, min(1.0, x + wide)])
        x += wide + gap
    return found


def _axis(axis: Axis, panel: Panel) -> dict[str, Any]:
    """An axis; a category axis is linear, with a tick at each name, so that bars can be at fractions."""
    logarithmic = axis.kind.startswith("log")
    low, high = (math.log10(axis.low), math.log10(axis.high)) if logarithmic else (axis.low, axis.high)
    upside = axis is panel.y and axis.kind == "category"
    made: dict[str, Any] = {
        **_LINE,
        "type": "log" if logarithmic else "linear",
        "range": [high, low] if upside else [low, high],
        "title": {"text": escape(axis.label), "standoff": 6},
        "showgrid": axis.kind != "category" and (axis is panel.y or panel.y.kind == "category"),
        "gridcolor": GRID,
    }
    if axis.kind == "category":
        marks = axis.marks()
        marks = marks[:: 1 if upside else max(1, -(-len(marks) // 32))]
        made |= {"tickvals": [value for value, _ in marks], "ticktext": [escape(_cut(words)) for _, words in marks]}
    elif logarithmic or axis.ticks:
        marks = axis.marks()
        made |= {"tickvals": [value for value, _ in marks], "ticktext": [words for _, words in marks]}
        made |= {"dtick": math.log10(2)} if axis.kind == "log2" else {}
    elif axis.unit == "bytes":
        made |= {"tickformat": ".3~s", "ticksuffix": "B"}
    elif axis.unit in ("ms", "%"):
        made |= {"ticksuffix": " ms" if axis.unit == "ms" else "%"}
    return made


def _cut(words: str) -> str:
    return words if len(words) <= NAME else f"{words[: NAME - 1]}…"


def marker(look: Look) -> dict[str, Any]:
    """A bar's fill, hatching and outline."""
    shape = HATCHES[look.hatch][0]
    pattern = {"shape": shape, "fgcolor": "rgba(20,24,29,.35)", "size": 7, "solidity": 0.15, "bgcolor": look.fill}
    made: dict[str, Any] = {"color": look.fill, "line": {"color": LABEL_INK, "width": 0.6}}
    return {**made, "pattern": pattern} if shape else made


def _trace(mark: Bars | Lines | Points | Area, axes: dict[str, str], named: set[str], panel: Panel) -> dict[str, Any]:
    entry = mark.legend and bool(mark.name) and mark.name not in named
    named |= {mark.name} if entry else set()
    made: dict[str, Any] = {"name": mark.name, "legendgroup": mark.name, "showlegend": entry, **axes}
    if isinstance(mark, Area):
        made |= {"text": _lines(mark.hover or mark.name), "hoverinfo": "text", "hoveron": "fills"}
    elif mark.hover:
        made |= {"hovertext": [_lines(words) for words in mark.hover], "hoverinfo": "text"}
    elif not isinstance(mark, Bars):
        made["hovertemplate"] = f"{escape(panel.x.label)} %{{x}}<br>{escape(panel.y.label)} %{{y:.5g}}"
    match mark:
        case Bars():
            along, place = ("x", "y") if mark.across else ("y", "x")
            look = marker(mark.look)
            if mark.framed:
                look["line"] = {"color": LABEL_INK, "width": [2.0 if framed else 0.6 for framed in mark.framed]}
            made |= {
                "type": "bar",
                "orientation": "h" if mark.across else "v",
                place: list(map(float, mark.at)),
                along: [_short(end - start) for start, end in zip(mark.start, mark.end, strict=True)],
                "base": list(map(_short, mark.start)),
                "width": mark.width,
                "marker": look,
            }
            if mark.labels:
                where = {"inside": "inside", "end": "outside", "auto": "auto"}[mark.label]
                made |= {"text": [escape(words) for words in mark.labels], "textposition": where, "cliponaxis": False}
                made |= {"textangle": 0, "insidetextfont": {"color": LABEL_INK}}
                made |= {"insidetextanchor": "middle"}
        case Lines():
            lined = "lines+markers" if mark.markers or len(mark.x) == 1 else "lines"
            dash = ",".join(f"{each}px" for each in mark.dash.split()) or "solid"
            made |= {"type": "scatter", "x": list(map(_short, mark.x)), "y": list(map(_short, mark.y)), "mode": lined}
            made["line"] = {"color": mark.colour or MIDDLE_INK, "width": mark.width, "dash": dash}
            made["line"] |= {"shape": mark.step} if mark.step else {}
            made["marker"] = {"symbol": mark.symbol, "size": 7}
        case Points():
            colour = mark.colour or MIDDLE_INK
            symbol = mark.symbol if mark.filled else f"{mark.symbol}-open"
            made |= {"type": "scatter", "x": list(map(_short, mark.x)), "y": list(map(_short, mark.y))}
            made["mode"] = "markers+text" if any(mark.labels) else "markers"
            made |= (
                {"text": [escape(words) for words in mark.labels], "textposition": _side(mark, panel)}
                if mark.labels
                else {}
            )
            made["marker"] = {"symbol": symbol, "size": 2 * mark.size + 1, "color": colour}
            made["marker"]["line"] = {"width": 1.4, "color": colour}
            made["cliponaxis"] = False
        case Area():
            x, y = zip(*mark.corners(), strict=True)
            made |= {"type": "scatter", "x": list(map(_short, x)), "y": list(map(_short, y)), "mode": "lines"}
            made |= {"fill": "toself", "line": {"color": LABEL_INK, "width": 0.6}, "fillcolor": mark.look.fill}
            made |= {"fillpattern": pattern} if (pattern := marker(mark.look).get("pattern")) else {}
    return made


def _side(mark: Points, panel: Panel) -> str:
    """Where a series has its labels: series with labels take turns, as their markers may be at one place."""
    labelled = [each for each in panel.marks if isinstance(each, Points) and each.labels]
    return SIDES[labelled.index(mark) % len(SIDES)]


def _decorate(
    layout: dict[str, Any],
    traces: list[dict[str, Any]],
    mark: Mark,
    panel: Panel,
    axes: dict[str, str],
    named: set[str],
) -> None:
    """Bands, rules, brackets and texts."""
    x, y = axes["xaxis"], axes["yaxis"]
    match mark:
        case Band():
            shape: dict[str, Any] = {"type": "rect", "name": mark.name, "layer": "below", "opacity": 0.16}
            shape |= {"fillcolor": mark.colour, "line": {"width": 0}}
            shape |= _reach("x", x, mark.x) | _reach("y", y, mark.y)
            layout["shapes"].append(shape)
            if mark.legend and mark.name not in named:
                named.add(mark.name)
                square = {"symbol": "square", "size": 12, "color": mark.colour, "opacity": 0.3}
                key = {"type": "scatter", "name": mark.name, "x": [None], "y": [None], "mode": "markers"}
                traces.append(key | {"marker": square, "showlegend": True, "hoverinfo": "skip", **axes})
        case Rule():
            colour, dash = mark.colour or MIDDLE_INK, ",".join(f"{each}px" for each in mark.dash.split())
            at = mark.x if mark.x is not None else mark.y
            assert at is not None
            upright = mark.x is not None
            shape = {"type": "line", "name": mark.words, "line": {"color": colour, "dash": dash, "width": 1.6}}
            shape |= _reach("x", x, (at, at) if upright else None) | _reach("y", y, None if upright else (at, at))
            layout["shapes"].append(shape)
            if mark.words:
                where = {"x": _at(layout, x, at), "y": 1, "yref": f"{y} domain", "xref": x, "yanchor": "bottom"}
                if upright:  # within the panel
                    share = panel.x.share(at)
                    where["xanchor"] = "left" if share < 0.12 else "right" if share > 0.88 else "center"
                else:
                    where = {"x": 0, "xref": f"{x} domain", "y": _at(layout, y, at), "yref": y, "yanchor": "bottom"}
                    where["xanchor"] = "left"
                layout["annotations"].append({"text": escape(mark.words), "showarrow": False, **where})
        case Span():
            edge = {"type": "line", "line": {"color": MIDDLE_INK, "width": 1}, "xref": x, "yref": f"{y} domain"}
            layout["shapes"].append(edge | {"x0": mark.first - 0.42, "x1": mark.last + 0.42, "y0": 1.01, "y1": 1.01})
            words = {"text": escape(mark.words), "x": (mark.first + mark.last) / 2, "xref": x, "showarrow": False}
            layout["annotations"].append(words | {"y": 1.01, "yref": f"{y} domain", "yanchor": "bottom"})
        case Text():
            where = {"x": _at(layout, x, mark.x), "y": _at(layout, y, mark.y), "xref": x, "yref": y}
            anchor = {"start": "left", "middle": "center", "end": "right"}[mark.anchor]
            where |= {"yanchor": "middle" if panel.y.kind == "category" else "bottom"}
            where |= {"name": "value", "xanchor": anchor, "showarrow": False}  # a narrow page leaves these out
            layout["annotations"].append({"text": escape(mark.words), **where})


def _reach(name: str, axis: str, ends: tuple[float, float] | None) -> dict[str, Any]:
    """One side of a shape: between two values, or over the whole panel."""
    if ends is None:
        return {f"{name}ref": f"{axis} domain", f"{name}0": 0, f"{name}1": 1}
    return {f"{name}ref": axis, f"{name}0": ends[0], f"{name}1": ends[1]}


def _at(layout: dict[str, Any], axis: str, value: float) -> float:
    """A value where an annotation wants it: on a logarithmic axis its power of ten."""
    made = layout[f"{axis[0]}axis{axis[1:]}"]
    return math.log10(value) if made["type"] == "log" else value


def _short(value: float) -> float:
    return float(f"{value:.8g}")


def _lines(words: str) -> str:
    return "<br>".join(
        escape(line) for line in chain.from_iterable(wrap(part, 80) or [""] for part in words.split("\n"))
    )
