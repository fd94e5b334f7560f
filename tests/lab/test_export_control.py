"""The Export control without a browser: a press writes the file that the widget's own ``export`` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recshard_lab.lab import DrawingBoard, PlanCompare
from recshard_lab.lab.exporting.kinds import KINDS
from recshard_lab.planner import Workload
from recshard_lab.sharding import ShardingPlan, Topology
from tests.lab.plans import movielens, table

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def widget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PlanCompare:
    monkeypatch.chdir(tmp_path)
    return PlanCompare(movielens(), Topology(2, ddr_cap=10**9), Workload(64), {"movie": "row_wise"})


def pressed(widget: Any, kind: str, plan: str = "") -> bytes:
    """The file of a press, and the same bytes sent to the browser."""
    sent: list[Any] = []
    widget.exports.send = lambda message, buffers: sent.append((message, buffers))
    widget.exports.press(kind, plan)
    widget.exports.wait()
    assert not widget.exports.failed, widget.exports.message
    data = widget.exports.last.read_bytes()
    assert sent == [({"file": widget.exports.last.name, "type": sent[0][0]["type"]}, [data])]
    assert not widget.exports.busy
    return bytes(data)


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_is_written_beside_the_notebook(kind: str, widget: PlanCompare, tmp_path: Path) -> None:
    data = pressed(widget, kind)
    assert widget.exports.last is not None
    assert widget.exports.last.parent == tmp_path
    start = {
        "html": b"<!doctype html>",
        "svg": b"<svg ",
        "png": PNG,
        "json": b"{",
        "py": b'"""',
        "sh": b"#!",
        "zip": b"PK",
    }
    assert data.startswith(start[kind])
    assert widget.exports.last.name in widget.exports.message


@pytest.mark.parametrize("kind", ["html", "svg", "json"])
def test_the_python_shown_writes_the_same_file(kind: str, widget: PlanCompare, tmp_path: Path) -> None:
    data = pressed(widget, kind, "The planner's plan" if kind == "json" else "")
    widget.exports.last.unlink()  # type: ignore[union-attr]
    exec(widget.exports.python, {"widget": widget})
    (again,) = tmp_path.iterdir()
    assert again.read_bytes() == data


def test_the_plan_of_the_menu_is_the_one_that_is_written(widget: PlanCompare) -> None:
    for name, answer in (("Your plan", widget.mine), ("The planner's plan", widget.automatic)):
        assert ShardingPlan.from_json(pressed(widget, "json", name).decode()) == answer.plan
    assert widget.exports.python == 'widget.export("the_planners_plan.json", plan="The planner\'s plan")'


def test_a_file_that_another_hand_put_there_stays(widget: PlanCompare, tmp_path: Path) -> None:
    (tmp_path / "plan_comparison.svg").write_text("mine")
    pressed(widget, "svg")
    pressed(widget, "svg")
    assert (tmp_path / "plan_comparison.svg").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"plan_comparison.svg", "plan_comparison_2.svg"}


def test_what_cannot_be_written_is_told_in_the_widget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    board = DrawingBoard(table("movies", 100), Topology(2), tiles=[(0, (0, 50), (0, 16))])
    assert board.plan is None
    board.exports.press("json")
    board.exports.wait()
    assert board.exports.failed
    assert board.exports.message.startswith("Nothing was written. Drawing of movies has no plan to write")
    assert not board.exports.busy
    board.exports.press("html")
    board.exports.wait()
    assert "<h2>No plan</h2>" in board.exports.last.read_text()  # type: ignore[union-attr]


def test_a_drawing_is_exported_with_its_plan(tmp_path: Path) -> None:
    board = DrawingBoard(table("movies", 100), Topology(2), tiles=[(0, (0, 50), (0, 16)), (1, (50, 100), (0, 16))])
    assert ShardingPlan.from_json(board.export(tmp_path / "x.json").read_text()) == board.plan
    text = board.export(tmp_path / "x.html", plotly="none").read_text()
    assert "<h1>Drawing of movies</h1>" in text
    assert "scheme = rs.sharding.tiling([" in text
    assert "BATCH_SIZE = 64" in board.export(tmp_path / "x.py").read_text()


def test_a_message_of_another_kind_is_not_obeyed(widget: PlanCompare, tmp_path: Path) -> None:
    widget.exports.send = lambda *_: None
    widget.exports.press("../../x", "someone's")
    widget.exports.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["plan_comparison.html"]
