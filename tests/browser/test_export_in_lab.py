"""Export in a real JupyterLab: the browser saves the file and it lies beside the notebook; by mouse, by keyboard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recshard_lab.sharding import ShardingPlan, Topology
from tests.browser.lab_server import picture, ran_notebook
from tests.lab.plans import movielens

pytestmark = pytest.mark.browser

CELLS = [
    "from tests.lab.plans import movielens\n"
    "from recshard_lab.lab import DrawingBoard, PlanCompare\n"
    "from recshard_lab.sharding import Topology\n"
    "compared = PlanCompare(movielens(), Topology(4, ddr_cap=10**9), schemes={'movie': 'row_wise'})\ncompared",
    "board = DrawingBoard(movielens()[0], Topology(2))\nboard",
]
page = ran_notebook(CELLS, ".rs-export button", height=2400)


def control(page: Any, place: int = 0) -> Any:
    return page.locator(".rs-export").nth(place)


def saved(page: Any, press: Any) -> tuple[str, bytes]:
    with page.expect_download() as waiting:
        press()
    return waiting.value.suggested_filename, Path(waiting.value.path()).read_bytes()


def test_a_click_saves_a_page_in_the_browser_and_beside_the_notebook(page: Any) -> None:
    name, data = saved(page, control(page).get_by_role("button", name="Export").click)
    assert name == "plan_comparison.html"
    assert (page.folder / name).read_bytes() == data
    assert data.startswith(b"<!doctype html>")
    assert 2_000_000 < len(data) <= 3_000_000  # plotly.js is inside
    status = control(page).get_by_role("status")
    page.wait_for_function(f"document.querySelector('.rs-export [role=status]').textContent.includes('{name}')")
    assert "Wrote plan_comparison.html (2" in status.inner_text()
    assert control(page).locator("code").inner_text() == 'compared.export("plan_comparison.html")'
    picture(page, "export_control", ".rs-export")


def test_the_keyboard_alone_chooses_a_kind_and_a_plan_and_exports(page: Any) -> None:
    box = control(page)
    box.get_by_label("Export as", exact=True).focus()
    page.keyboard.type(".json")
    assert box.get_by_label("Export as", exact=True).input_value() == "json"
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowDown")
    assert box.get_by_label("Plan to export", exact=True).input_value() == "The planner's plan"
    page.keyboard.press("Tab")
    name, data = saved(page, lambda: page.keyboard.press("Enter"))
    assert name == "the_planners_plan.json"
    from recshard_lab.planner import EmbeddingShardingPlanner, Workload

    wanted = EmbeddingShardingPlanner(Topology(4, ddr_cap=10**9), workload=Workload()).plan_tables(movielens())
    assert ShardingPlan.from_json(data.decode()) == wanted
    page.wait_for_function(
        """() => document.querySelector('.rs-export code').textContent ===
        `compared.export("the_planners_plan.json", plan="The planner's plan")`"""
    )
    assert saved(page, control(page).get_by_role("link", name="save again").click) == (name, data)


def test_another_widget_exports_its_own(page: Any) -> None:
    box = control(page, 1)
    box.get_by_label("Export as", exact=True).select_option("png")
    assert not box.get_by_label("Plan to export", exact=True).is_visible()
    name, data = saved(page, box.get_by_role("button", name="Export").click)
    assert name == "drawing_of_user.png"
    assert data.startswith(b"\x89PNG")
    assert (page.folder / name).read_bytes() == data
