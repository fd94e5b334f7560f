"""ChartBox and ChartFigure: charts are live figures beside a kernel, with one message per change; else SVG."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from recshard_lab.lab import views
from recshard_lab.lab.draw.view import View
from recshard_lab.lab.widgets import chart_box
from recshard_lab.lab.widgets.chart_box import ChartBox
from tests.lab.plans import movielens, plan_of


def losses(*values: float, name: str = "row-wise") -> View:
    return views.curves({"table-wise": [0.9, 0.8], name: list(values)})


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chart_box, "beside_a_kernel", lambda: True)
    chart_box.loading().result(60)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[set[str]]]:
    """The names of what each message to the page changes."""
    from recshard_lab.lab.widgets.chart_figure import ChartFigure

    messages: list[set[str]] = []
    send = ChartFigure._send

    def seen(self: Any, message: dict[str, Any], buffers: Any = None) -> None:
        if message["method"] == "update":
            messages.append(set(message["state"]))
        send(self, message, buffers)

    monkeypatch.setattr(ChartFigure, "_send", seen)
    return messages


def test_without_a_kernel_a_chart_is_svg() -> None:
    box = ChartBox()
    box.show(losses(0.9, 0.7), "u", head="<h4>Losses</h4>")
    assert box.figure is None
    assert "<h4>Losses</h4><svg" in box.value
    box.say()
    assert (box.value, box.shown) == ("", None)


def test_beside_a_kernel_a_chart_is_a_figure_and_geometry_is_svg(live: None) -> None:
    box, view = ChartBox(), losses(0.9, 0.7)
    box.show(view, "u", head="<h4>Losses</h4>")
    figure = box.figure
    assert figure is not None
    drawn = json.loads(figure.drawn)
    assert [trace["y"] for trace in drawn["data"]] == [[0.9, 0.8], [0.9, 0.7]]
    assert figure.label == f"{view.title}. {view.summary}"
    assert figure.still == view.inline("u")
    assert "<h4>Losses</h4>" in box.value
    assert "<svg" not in box.value
    box.show(views.placement(plan_of(movielens(), 4), movielens()), "u")
    assert "<svg" in box.value
    assert box.children[1].layout.display == "none"
    box.show(losses(0.9, 0.5), "u", gone=True)
    assert box.figure is figure
    assert box.children[1].layout.display == ""
    assert "rs-gone" in box.children[1]._dom_classes


def test_a_change_is_one_message_and_none_where_nothing_changes(live: None, sent: list[set[str]]) -> None:
    box = ChartBox()
    box.show(losses(0.9, 0.7), "u")
    sent.clear()
    box.show(losses(0.9, 0.7), "u")
    assert sent == []
    box.show(losses(0.9, 0.6), "u")
    assert len(sent) == 1
    assert "drawn" in sent[0]
    box.show(losses(0.9, 0.6, name="column-wise"), "u")  # another series
    assert len(sent) == 2
    assert box.figure is not None
    box.figure.data[0].line.width = 5  # the reader's change, from a cell
    assert json.loads(box.figure.drawn)["data"][0]["line"]["width"] == 5


def test_the_page_receives_plotly_when_it_asks(live: None, monkeypatch: pytest.MonkeyPatch) -> None:
    box = ChartBox()
    box.show(losses(0.9, 0.7), "u")
    assert box.figure is not None
    answers: list[tuple[Any, list[bytes]]] = []
    monkeypatch.setattr(type(box.figure), "send", lambda _, content, buffers: answers.append((content, buffers)))
    box.figure._handle_custom_msg({"want": "plotly"}, [])
    ((content, (packed,)),) = answers
    assert content == {"plotly": box.figure.version}
    assert f"plotly.js v{box.figure.version}".encode() in gzip.decompress(packed)[:200]
    assert "plotly.js v" not in str(box.figure.get_state())  # so that no notebook saves it


def test_the_svg_is_shown_until_plotly_is_loaded(live: None, monkeypatch: pytest.MonkeyPatch) -> None:
    later: Future[Any] = Future()
    loaded = chart_box.loading()
    monkeypatch.setattr(chart_box, "loading", lambda: later)
    good, bad = ChartBox(), ChartBox()
    good.show(losses(0.9, 0.7), "u")
    assert "<svg" in good.value
    good.show(losses(0.9, 0.6), "u")
    later.set_result(loaded.result())
    assert good.figure is not None
    assert json.loads(good.figure.drawn)["data"][1]["y"] == [0.9, 0.6]
    assert good.value == ""
    failed: Future[Any] = Future()
    monkeypatch.setattr(chart_box, "loading", lambda: failed)
    bad.show(losses(0.9, 0.7), "u")
    failed.set_exception(ImportError("no plotly"))
    assert "<svg" in bad.value
    assert "This picture is still: ImportError: no plotly" in bad.value
