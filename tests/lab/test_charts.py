"""Charts: the static and the interactive rendering of every view show the same axes, marks, values and words."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from html import unescape
from typing import Any

import numpy as np
import pytest

from recshard_lab.lab import views
from recshard_lab.lab.charts import plotly, spec
from recshard_lab.lab.charts.static import draw_chart
from recshard_lab.lab.draw.theme import Look
from recshard_lab.lab.draw.view import View
from tests.lab.every_view import CASES
from tests.lab.pictures import SVG, texts

PLAIN, HATCHED = Look("plain", "#9cc4ee", "plain"), Look("hatched", "#f6bd83", "rising")
GEOMETRY = {"placement", "jagged_anatomy", "follow_id", "traffic", "replica_grid", "step_frames"}
COLUMNS = {"bars": ("at", "start", "end"), "lines": ("x", "y"), "points": ("x", "y"), "area": ("x", "low", "high")}
Series = tuple[str, str, dict[str, list[float]]]


def numbers(words: str | None) -> list[float]:
    return [float(word) for word in (words or "").split()]


def panels_of_svg(svg: str) -> list[dict[str, Any]]:
    """Title, axes and series of each panel, as the picture's attributes say."""
    found = []
    for group in ET.fromstring(svg).iter(f"{SVG}g"):
        if group.get("data-panel") is None:
            continue
        series = [
            (
                one.get("data-series", ""),
                one.get("data-kind", ""),
                {name: numbers(one.get(f"data-{name}")) for name in COLUMNS[one.get("data-kind", "")]},
            )
            for one in group.iter(f"{SVG}g")
            if one.get("data-series") is not None
        ]
        axes = {
            name: (group.get(f"data-{name}-kind"), *numbers(group.get(f"data-{name}-range"))) for name in ("x", "y")
        }
        labels = tuple(group.get(f"data-{name}-label", "") for name in ("x", "y"))
        found.append({"title": group.get("data-title"), "axes": axes, "labels": labels, "series": series, "g": group})
    return found


def axis_of_plotly(axis: Any, upright: bool) -> tuple[str, float, float]:
    """Kind and range of an axis, as the figure has them."""
    low, high = axis.range
    if axis.type == "log":
        kind = "log2" if axis.dtick is not None else "log10"
        return kind, 10**low, 10**high
    places = axis.tickvals is not None and list(axis.tickvals) == list(range(0, round(max(low, high) + 0.5)))
    if low > high and upright:
        return "category", high, low
    thinned = (
        axis.tickvals is not None and min(low, high) == -0.5 and all(value == int(value) for value in axis.tickvals)
    )
    return ("category" if (places and min(low, high) == -0.5) or thinned else "linear"), low, high


def panels_of_plotly(figure: Any) -> list[dict[str, Any]]:
    """The same of a figure: its traces by the axes that they are on."""
    found = []
    for number in range(1, 100):
        suffix = "" if number == 1 else str(number)
        if f"xaxis{suffix}" not in figure.layout:
            break
        x, y = figure.layout[f"xaxis{suffix}"], figure.layout[f"yaxis{suffix}"]
        series: list[Series] = []
        for trace in figure.data:
            if (trace.xaxis or "x") != f"x{suffix}" or (trace.x is not None and list(trace.x) == [None]):
                continue
            if trace.type == "bar":
                along, place = (trace.x, trace.y) if trace.orientation == "h" else (trace.y, trace.x)
                ends = [start + long for start, long in zip(trace.base, along, strict=True)]
                series.append((trace.name, "bars", {"at": list(place), "start": list(trace.base), "end": ends}))
            elif trace.fill == "toself":
                half = len(trace.x) // 2
                assert trace.x[:half] == trace.x[half:][::-1]
                columns = {"x": trace.x[:half:2], "low": trace.y[: half - 1 : -2], "high": trace.y[:half:2]}
                series.append((trace.name, "area", columns))
            else:
                kind = "lines" if "lines" in trace.mode else "points"
                series.append((trace.name, kind, {"x": list(trace.x), "y": list(trace.y)}))
        heads = [
            note.text
            for note in figure.layout.annotations
            if note.xref == f"x{suffix} domain" and note.text[:3] == "<b>"
        ]
        found.append(
            {
                "title": unescape(heads[0][3:-4].replace("<br>", " ")) if heads else "",
                "axes": {"x": axis_of_plotly(x, False), "y": axis_of_plotly(y, True)},
                "labels": tuple(unescape(axis.title.text or "") for axis in (x, y)),
                "series": series,
            }
        )
    return found


def same(one: list[float], other: list[float]) -> None:
    assert len(one) == len(other)
    np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-9 + 2e-5 * max([0.0, *map(abs, other)]))


def solid(words: str) -> str:
    """Words without the white space at which lines are broken."""
    return "".join(words.split())


def charts(case: str) -> dict[str, View]:
    known = CASES[case]()
    drawn = {name: views.draw(name, **known) for name in views.view_names()}
    return {name: view for name, view in drawn.items() if view.chart is not None}


@pytest.mark.parametrize("case", ["one", *(pytest.param(case, marks=pytest.mark.gate) for case in ("nan", "large"))])
def test_both_renderings_of_every_chart_show_the_same(case: str) -> None:
    found = charts(case)
    assert case != "large" or set(found) == set(views.view_names()) - GEOMETRY
    assert len(found) >= 3
    for name, view in found.items():
        chart, figure = view.chart, view.figure
        assert chart is not None
        svg = view.svg
        still, live = panels_of_svg(svg), panels_of_plotly(figure)
        assert len(still) == len(live) == len(chart.panels), name
        for one, other, panel in zip(still, live, chart.panels, strict=True):
            assert one["title"] == panel.title
            assert solid(other["title"]) == solid(panel.title)
            for side in ("x", "y"):
                assert one["axes"][side][0] == other["axes"][side][0], (name, panel.title, side)
                same(list(one["axes"][side][1:]), list(other["axes"][side][1:]))
            assert one["labels"][0] == other["labels"][0] == panel.x.label
            assert other["labels"][1] in (one["labels"][1], "")  # named once where panels share it
            assert [(n, kind) for n, kind, _ in one["series"]] == [(n, kind) for n, kind, _ in other["series"]], name
            for (_, _, mine), (_, _, theirs) in zip(one["series"], other["series"], strict=True):
                for column, values in mine.items():
                    same(values, theirs[column])
        caption = re.sub(r"<br>", " ", figure.layout.title.subtitle.text)
        assert solid(unescape(caption)) == solid(chart.caption + chart.note)
        assert chart.caption == view.summary
        assert "ends at" not in chart.caption.lower()
        assert solid(chart.caption) in solid("".join(texts(svg)))
        assert ET.fromstring(svg).find(f"{SVG}desc").text == chart.caption  # type: ignore[union-attr]
        entries = [trace.name for trace in figure.data if trace.showlegend]
        assert sorted(entries) == sorted(chart.legend), name
        if figure.layout.showlegend:
            shown = texts(svg)
            assert all(
                any(name == t or (t.endswith("…") and name.startswith(t[:-1])) for t in shown) for name in entries
            )


@pytest.mark.parametrize("case", ["one", pytest.param("large", marks=pytest.mark.gate)])
def test_what_is_drawn_is_where_the_values_are(case: str) -> None:
    """Rectangles and lines measured in pixels, turned back into values by the axes' ends."""
    measured = 0
    for view in charts(case).values():
        for panel in panels_of_svg(view.svg):
            ends = {side: numbers(panel["g"].get(f"data-{side}-pixels")) for side in ("x", "y")}

            def value(side: str, pixel: float, ends: Any = ends, panel: Any = panel) -> float:
                kind, low, high = panel["axes"][side]
                share = (pixel - ends[side][0]) / (ends[side][1] - ends[side][0])
                return float(low * (high / low) ** share if kind.startswith("log") else low + share * (high - low))

            for group in panel["g"].iter(f"{SVG}g"):
                kind = group.get("data-kind")
                if kind == "lines" and len(path := group.findall(f"{SVG}path")) == 1:
                    spots = [pair.split(",") for pair in path[0].get("d", "M")[1:].split()]
                    x, y = (numbers(group.get(f"data-{side}")) for side in ("x", "y"))
                    if len(spots) != len(x):
                        continue  # a staircase
                    for (px, py), vx, vy in zip(spots, x, y, strict=True):
                        for side, pixel, wanted in (("x", px, vx), ("y", py, vy)):
                            _, low, high = panel["axes"][side]
                            off = abs(value(side, float(pixel)) - wanted)
                            assert off <= 0.01 * (high - low) or math.isclose(
                                value(side, float(pixel)), wanted, rel_tol=0.02
                            )
                    measured += 1
                if kind == "bars":
                    rects = [r for r in group.findall(f"{SVG}rect") if r.find(f"{SVG}title") is not None]
                    start, end = (numbers(group.get(f"data-{name}")) for name in ("start", "end"))
                    if len(rects) != len(start):
                        continue  # some are too small to draw, or all are one shape
                    across = panel["axes"]["y"][0] == "category"
                    side, at, size = ("x", "x", "width") if across else ("y", "y", "height")
                    _, low, high = panel["axes"][side]
                    for rect, a, b in zip(rects, start, end, strict=True):
                        pixels = [float(rect.get(at, 0)), float(rect.get(at, 0)) + float(rect.get(size, 0))]
                        same_ends = sorted(value(side, pixel) for pixel in pixels)
                        np.testing.assert_allclose(same_ends, sorted((a, b)), atol=0.004 * (high - low))
                    measured += 1
    assert measured >= 5


def test_geometry_has_no_interactive_figure_and_a_message_neither() -> None:
    known = CASES["one"]()
    for name in GEOMETRY:
        view = views.draw(name, **known)
        assert not view.problem
        assert view.figure is None
    assert views.curves({}).figure is None


def panel(*marks: spec.Mark, **more: Any) -> spec.Panel:
    axes = {"x": spec.linear([1.0, 10.0]), "y": spec.linear([0.0, 5.0])}
    return spec.Panel(**{**axes, **more}, marks=marks)


def test_a_chart_needs_a_caption_and_numbers() -> None:
    line = spec.Lines("loss", (1.0, 2.0), (3.0, 4.0))
    with pytest.raises(ValueError, match="has no caption"):
        spec.Chart("Loss", " ", ((panel(line),),))
    with pytest.raises(ValueError, match="not a number"):
        spec.Lines("loss", (1.0,), (math.nan,))
    with pytest.raises(ValueError, match=r"columns of \[2, 1\] values"):
        spec.Points("p", (1.0, 2.0), (1.0,))
    with pytest.raises(ValueError, match="begins at -1"):
        spec.Axis("log10", -1.0, 10.0, "ms")
    with pytest.raises(ValueError, match="either x or y"):
        spec.Rule()


@pytest.mark.parametrize("width", [1000, 400])
def test_series_differ_without_colour(width: int) -> None:
    bars = [spec.Bars(look.label, look, (float(i),), (0.0,), (3.0,), ("",)) for i, look in enumerate((PLAIN, HATCHED))]
    lines = [
        spec.Lines(n, (1, 2), (3, 4), "#1f83d6", dash, symbol)
        for n, dash, symbol in (("a", "", "circle"), ("b", "7 3", "square"))
    ]
    chart = spec.Chart("C", "Two of each.", ((panel(*bars, *lines, x=spec.categories(["one", "two", "three"])),),))
    svg, figure = draw_chart(chart, width, "u"), plotly.figure_of(chart)
    assert str(svg).count("<pattern") == 1
    assert str(svg).count('stroke-dasharray="7 3"') == 2  # the line and its entry in the legend
    shapes = [trace.marker.pattern.shape for trace in figure.data[:2]]
    assert shapes == [None, "/"]
    assert [trace.line.dash for trace in figure.data[2:]] == ["solid", "7px,3px"]
    right = [float(text.get("x", 0)) for text in ET.fromstring(str(svg)).iter(f"{SVG}text")]
    assert max(right) < width


def test_an_update_sets_what_differs_and_removes_what_is_gone() -> None:
    def chart(*marks: spec.Mark, low: float = 0.0) -> spec.Chart:
        return spec.Chart("Loss", "It falls.", ((panel(*marks, x=spec.Axis("linear", low, 9.0, "step")),),))

    named = spec.Points("p", (1.0,), (2.0,), labels=("first",))
    figure = plotly.figure_of(chart(named, spec.Rule(y=3.0, words="limit")))
    trace = figure.data[0]
    trace.visible = "legendonly"
    changes: list[str] = []
    figure.layout.on_change(lambda _, axis: changes.append("x"), "xaxis")
    figure.layout.on_change(lambda _, axis: changes.append("y"), "yaxis")
    figure.data[0].on_change(lambda _, x: changes.append("data"), "x")
    plotly.update(figure, chart(spec.Points("p", (1.0,), (2.0,)), low=-2.0))
    assert changes == ["x"]
    assert figure.data[0] is trace
    assert trace.visible == "legendonly"
    trace.visible = None
    assert (figure.data[0].text, figure.data[0].mode, len(figure.layout.shapes)) == (None, "markers", 0)
    same = plotly.figure_of(chart(spec.Points("p", (1.0,), (2.0,)), low=-2.0))
    assert (figure.data, figure.layout.xaxis, figure.layout.title) == (same.data, same.layout.xaxis, same.layout.title)
