"""A chart as a plotly figure: hover, zoom and selection; and the same figure with other values, in place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from itertools import pairwise
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
    room_for,
)
from recshard_lab.lab.draw.svg import text_width
from recshard_lab.lab.draw.theme import HATCHES, LABEL_INK, MIDDLE_INK, Look

SIDES = ("top center", "bottom center", "middle right", "middle left")
GRID = "rgba(128,136,146,.25)"
BETWEEN = 66  # pixels between rows
LINE_OF_TICKS = 24  # pixels between names of ticks that can be read
NAME = (32, 20)  # letters of a name at an axis, and on a narrow page
PLOT = 100.0  # pixels of a panel beside such names on a narrow page
LONG = 12  # letters of a bar's label that has no room on a narrow page
WRAPS = {  # letters of a line: title, caption, title of a panel alone in its row, of one beside others
    False: (68, 90, 52, 33),
    True: (34, 44, 28, 28),  # on a narrow page of at least 280 pixels
}
FIXED = ("template",)  # parts of a layout that no chart changes, and that plotly writes in another way
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


def update(figure: Any, chart: Chart) -> None:
    """Shows another chart in a figure. Only the traces and parts of the layout that differ are set.

    Hidden series stay hidden, by their names.

    Args:
        figure: of `figure_of`, or a ``FigureWidget``.
        chart: what it is to show.
    """
    traces, layout = _parts(chart)
    shown = figure.to_plotly_json()
    with figure.batch_update():
        if [trace.get("uid") for trace in shown["data"]] == [trace["uid"] for trace in traces]:
            for trace, old, new in zip(figure.data, shown["data"], traces, strict=True):
                _change(trace, old, new)
        else:
            hidden = {trace["uid"]: trace["visible"] for trace in shown["data"] if "visible" in trace}
            figure.data = []
            figure.add_traces([{**trace, "visible": hidden.get(trace["uid"], True)} for trace in traces])
        _change(figure.layout, shown["layout"], layout)


def _change(part: Any, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Sets what differs in a trace or a layout, and removes what is gone."""
    gone = dict.fromkeys(old.keys() - new.keys() - {"visible"})
    changed = {name: value for name, value in new.items() if name not in FIXED and old.get(name) != value}
    if gone or changed:
        part.update({**gone, **changed}, overwrite=True)


def _parts(chart: Chart) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Traces and layout as plain mappings. ``meta.narrow`` of each is what differs below a width of 560 pixels."""
    layout, narrow = _layout(chart, False), _layout(chart, True)
    layout["meta"]["narrow"] = {name: part for name, part in narrow.items() if part != layout[name]}
    return _traces(chart), layout


def _traces(chart: Chart) -> list[dict[str, Any]]:
    traces: list[dict[str, Any]] = []
    named: set[str] = set()
    for number, panel in enumerate(chart.panels, 1):
        axes = _axes_of(number)
        traces += [_trace(mark, axes, named, panel) for mark in panel.marks if isinstance(mark, Series)]
        for mark in panel.marks:
            if isinstance(mark, Band) and mark.legend and mark.name not in named:  # a shape has no entry of its own
                named.add(mark.name)
                square = {"symbol": "square", "size": 12, "color": mark.colour, "opacity": 0.3}
                key = {"type": "scatter", "name": mark.name, "x": [None], "y": [None], "mode": "markers"}
                traces.append(key | {"marker": square, "showlegend": True, "hoverinfo": "skip", **axes})
    count: dict[str, int] = {}
    for trace in traces:
        uid = f"{trace['type']} {trace['xaxis']} {trace['name']}"
        count[uid] = count.get(uid, 0) + 1
        trace["uid"] = f"{uid} {count[uid]}"
    return traces


def _axes_of(number: int) -> dict[str, str]:
    """Names of the axes of a panel, counted from 1."""
    suffix = "" if number == 1 else str(number)
    return {"xaxis": f"x{suffix}", "yaxis": f"y{suffix}"}


def _layout(chart: Chart, narrow: bool) -> dict[str, Any]:
    """The layout; on a narrow page, all panels are below one another."""
    rows = [(panel,) for panel in chart.panels] if narrow else chart.rows
    title_letters, letters, alone, beside = WRAPS[narrow]
    titles = [[wrap(panel.title, alone if len(panels) == 1 else beside) for panel in panels] for panels in rows]
    over = [max(map(_over, *pair)) for pair in zip(rows, titles, strict=True)]
    heights = [max(panel.height for panel in panels) for panels in rows]
    gaps = [BETWEEN + pixels for pixels in over[1:]]
    plot = sum(heights) + sum(gaps)
    legend = chart.legend
    shown = len(legend) > 1 or any(isinstance(mark, Band) for mark in legend.values())
    lines = _legend_lines(list(legend), 340.0 if narrow else 760.0) * shown
    title, subtitle = wrap(chart.title, title_letters), [*wrap(chart.caption, letters), *wrap(chart.note, letters)]
    top = 29 + 19 * len(title) + 17 * len(subtitle) + over[0]
    below = 58 + 24 * lines
    layout: dict[str, Any] = {
        "template": "none",
        "title": {
            "text": "<br>".join(map(escape, title)),
            "subtitle": {"text": "<br>".join(map(escape, subtitle)), "font": {"size": 12, "color": MIDDLE_INK}},
            "font": {"size": 15},
            "x": 0,
            "xref": "container",
            "xanchor": "left",
            "y": 1,
            "yref": "container",
            "yanchor": "top",
            "pad": {"t": 10 * len(title)},  # plotly centres the lines
        },
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": MIDDLE_INK, "size": 12},
        "margin": {"l": 40, "r": 8 if narrow else 20, "t": top, "b": below},
        "height": plot + top + below,
        "showlegend": shown,
        "legend": {"orientation": "h", "x": 0, "xref": "container", "y": 0, "yref": "container", "yanchor": "bottom"},
        "barmode": "overlay",
        "hoverlabel": {"align": "left"},
        "hovermode": "closest",
        "dragmode": "zoom",
        "clickmode": "event+select",  # a click dims the other marks, another one ends that
        "uniformtext": {"mode": "hide", "minsize": 9},
        "uirevision": " / ".join(f"{panel.x.label}, {panel.y.label}" for panel in chart.panels),
        "shapes": [],
        "annotations": [],
        "meta": {"over": over[0]},
    }
    number, high = 0, float(plot)
    firsts: dict[Axis, str] = {}
    for row, panels in enumerate(rows):
        low = high - heights[row]
        spans = _spans_of_row(panels)
        for place, panel in enumerate(panels):
            number += 1
            axes = _axes_of(number)
            x, y = _axis(panel.x, panel, narrow), _axis(panel.y, panel, narrow)
            if narrow and panel.x.kind == "category" and 7 * len(" ".join(x["ticktext"])) < 2 * PLOT:
                x["tickangle"] = 0
            elif narrow:
                x |= {"nticks": 3, "tickangle": 0, "range": _range_on_narrow(panel)}
            x |= {"domain": spans[place], "anchor": axes["yaxis"]}
            y |= {"domain": [low / plot, high / plot], "anchor": axes["xaxis"]}
            for name, axis, made in (("x", panel.x, x), ("y", panel.y, y)):
                if axis in firsts and firsts[axis].startswith(name):
                    made["matches"] = firsts[axis]
                firsts.setdefault(axis, axes[f"{name}axis"])
            if place > 0 and panel.y == panels[place - 1].y:
                y |= {"showticklabels": False, "ticks": "", "title": {"text": ""}}
            layout[f"xaxis{axes['xaxis'][1:]}"], layout[f"yaxis{axes['yaxis'][1:]}"] = x, y
            for mark in panel.marks:
                if not (narrow and isinstance(mark, Text)):  # values have no room beside each other there
                    _decorate(layout, mark, panel, axes)
            if panel.title:
                lines_of_title = titles[row][place]
                side = "right" if narrow else "left"  # where it is narrow, from the right, over the names at its axis
                more = _over(panel, lines_of_title) > 16 * len(lines_of_title)
                head = {"text": f"<b>{'<br>'.join(map(escape, lines_of_title))}</b>", "align": side, "x": int(narrow)}
                head |= {"xref": f"{axes['xaxis']} domain", "yref": f"{axes['yaxis']} domain", "y": 1}
                head["yshift"] = 20 if _spans(panel) else 18 if more else 4
                layout["annotations"].append(head | {"xanchor": side, "yanchor": "bottom", "showarrow": False})
        high = low - (gaps[row] if row < len(gaps) else 0)
    return layout


def _spans(panel: Panel) -> bool:
    return any(isinstance(mark, Span) for mark in panel.marks)


def _over(panel: Panel, title: Sequence[str]) -> int:
    """Pixels over a panel for the lines of its title and for brackets."""
    return 16 * len(title) + 18 * _spans(panel) + 16 * any(isinstance(m, Rule) and m.words for m in panel.marks)


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


def _range_on_narrow(panel: Panel) -> list[float]:
    """The x axis of a panel, longer where the labels of its bars need the room on a narrow page."""
    axis = _axis(panel.x, panel, True)["range"]
    bars = [mark for mark in panel.marks if isinstance(mark, Bars) and mark.across and mark.labels]
    if panel.x.kind != "linear" or any(map(_has_long_labels, bars)):
        return list(axis)
    needs = [room_for(zip(mark.end, mark.labels, strict=True), PLOT, inside=mark.label != "end") for mark in bars]
    return [axis[0], max([axis[1], *needs])]


def _has_long_labels(mark: Bars) -> bool:
    return max(map(len, mark.labels), default=0) > LONG


def _axis(axis: Axis, panel: Panel, narrow: bool) -> dict[str, Any]:
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
        "uirevision": f"{axis.label} {len(axis.categories)}",  # the reader's zoom stays while this does
    }
    if axis.kind == "category":
        marks = axis.marks()
        marks = marks[:: 1 if upside else max(1, -(-len(marks) // 32))]
        made |= {
            "tickvals": [value for value, _ in marks],
            "ticktext": [escape(_cut(words, NAME[narrow])) for _, words in marks],
        }
    elif logarithmic or axis.ticks:
        marks = axis.marks()
        made |= {"tickvals": [value for value, _ in marks], "ticktext": [words for _, words in marks]}
        made |= {"dtick": math.log10(2)} if axis.kind == "log2" else {}
    elif axis.unit == "bytes":
        made |= {"tickformat": ".3~s", "ticksuffix": "B"}
    elif axis.unit in ("ms", "%"):
        made |= {"ticksuffix": " ms" if axis.unit == "ms" else "%"}
    if axis is panel.y and panel.height < 3 * LINE_OF_TICKS:
        made["nticks"] = 3
    return made


def _cut(words: str, letters: int) -> str:
    return words if len(words) <= letters else f"{words[: letters - 1]}…"


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
                if mark.across and _has_long_labels(mark):
                    made["meta"] = {"narrow": {"textposition": "none"}}
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


def _decorate(layout: dict[str, Any], mark: Mark, panel: Panel, axes: dict[str, str]) -> None:
    """Bands, rules, brackets and texts."""
    x, y = axes["xaxis"], axes["yaxis"]
    match mark:
        case Band():
            shape: dict[str, Any] = {"type": "rect", "name": mark.name, "layer": "below", "opacity": 0.16}
            shape |= {"fillcolor": mark.colour, "line": {"width": 0}}
            shape |= _reach("x", x, mark.x) | _reach("y", y, mark.y)
            layout["shapes"].append(shape)
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
            where |= {"xanchor": anchor, "showarrow": False}
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
        escape(line) for part in words.split("\n") for line in ([part] if len(part) <= 80 else wrap(part, 80))
    )
