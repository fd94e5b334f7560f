"""PlanCompare in a real JupyterLab: move the controls, read the page, compare with Python."""

from __future__ import annotations

import json
from typing import Any

import pytest

from recshard_lab.lab.compare.question import Question, answer
from recshard_lab.lab.compare.question_code import python_for
from recshard_lab.planner import Workload
from recshard_lab.sharding import Topology
from tests.browser.lab_server import command, picture, ran_notebook, wait_for_step
from tests.lab.plans import movielens

pytestmark = pytest.mark.browser

CAP = 10**9
CELLS = [
    "from tests.lab.plans import movielens, plan_of\n"
    "from recshard_lab.lab import PlanCompare, views\n"
    "from recshard_lab.sharding import Topology\n"
    "import recshard_lab\n"
    f"widget = PlanCompare(movielens(), Topology(4, ddr_cap={CAP}))\nwidget",
    "views.placement(plan_of(movielens(), 4), movielens())",
    "ranks = recshard_lab.launch(2)",
]
WIDGET = ".recshard-plan-compare"
page = ran_notebook(CELLS, f"{WIDGET} svg")


def expected(schemes: dict[str, str], world_size: int, batch_size: int = 512, cap: int = CAP) -> tuple[float, str]:
    """Step and Python of the same question, asked in this process."""
    asked = Question(schemes, world_size, batch_size, cap)
    found = answer(asked, movielens(), Topology(4, ddr_cap=CAP), Workload())
    assert found.estimate is not None
    return found.estimate.step_ms, python_for(asked, Topology(4, ddr_cap=CAP), Workload())


def wait_for_code(page: Any, side: str, code: str) -> None:
    """Steps of two plans may be equal, so a card's step does not show that its code is the new one."""
    page.wait_for_function(
        """([selector, code]) => { const pre = document.querySelector(selector);
        return pre && pre.textContent.trim() === code.trim(); }""",
        arg=[f'{WIDGET} details[data-side="{side}"] pre', code],
    )


def test_the_page_shows_what_python_computes(page: Any) -> None:
    widget = page.locator(WIDGET)
    wait_for_step(page, WIDGET, "auto", expected({}, 4)[0])
    widget.get_by_label("movie", exact=True).select_option(label="row-wise")
    wait_for_step(page, WIDGET, "mine", expected({"movie": "row_wise"}, 4)[0])
    wait_for_code(page, "mine", expected({"movie": "row_wise"}, 4)[1])
    picture(page, "plan_compare", WIDGET)


def test_the_other_pictures_are_a_click_away_and_titled(page: Any) -> None:
    from playwright.sync_api import expect

    widget = page.locator(WIDGET)
    for label, title in (("Memory", "Memory per rank"), ("Step time", "Step time")):
        widget.get_by_role("button", name=label, exact=True).click()
        live = widget.locator(f'[role="figure"][aria-label^="{title}"] [data-drawn] .gtitle:has-text("{title}")')
        expect(live).to_have_count(2)
    widget.get_by_role("button", name="Traffic", exact=True).click()
    expect(widget.locator('svg[role="img"][aria-label^="Traffic per step"]')).to_have_count(2)
    expect(widget.locator("[role=figure]:visible")).to_have_count(0)
    widget.get_by_role("button", name="Placement", exact=True).click()


def test_a_plan_that_does_not_fit_is_explained_on_the_page(page: Any) -> None:
    widget = page.locator(WIDGET)
    widget.get_by_label("Set all to").select_option(label="table-wise")
    wait_for_step(page, WIDGET, "mine", expected(dict.fromkeys((t.name for t in movielens()), "table_wise"), 4)[0])
    slider = widget.get_by_role("slider", name="Memory per rank")
    slider.focus()
    page.keyboard.press("Home")
    page.wait_for_selector(f'{WIDGET} .rs-card[data-side="mine"][data-fits="false"] .rs-alert')
    page.wait_for_selector(f"{WIDGET} .rs-alert:has-text('Fix: ')")
    assert page.locator(f"{WIDGET} :text('Traceback')").count() == 0
    page.keyboard.press("End")
    page.wait_for_selector(f'{WIDGET} .rs-card[data-side="mine"][data-fits="true"]')


def test_run_on_ranks_measures_beside_the_prediction(page: Any) -> None:
    widget = page.locator(WIDGET)
    run = widget.get_by_role("button", name="Run on ranks")
    run.click()
    page.wait_for_selector(f"{WIDGET} .rs-alert:has-text('The plan is for 4 ranks, 2 are launched')")
    widget.get_by_role("slider", name="Ranks").focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector(f"{WIDGET} details[data-side='mine'] pre:has-text('world_size=2,')", state="attached")
    run.click()
    page.wait_for_selector(f'{WIDGET} .rs-card[data-side="mine"][data-measured-ms]')
    widget.get_by_role("button", name="Memory", exact=True).click()
    page.wait_for_selector(f'{WIDGET} [role="figure"][aria-label*="predicted | counted"] [data-drawn]')


def test_a_view_is_inline_beside_a_kernel_and_an_image_in_the_saved_notebook(page: Any) -> None:
    title = "Placement: 6 tables on 4 ranks"
    assert page.locator(f'.jp-OutputArea .widget-html svg[aria-label^="{title}"]').count() >= 1
    command(page, "docmanager:save")
    page.wait_for_function("!window.jupyterapp.shell.currentWidget.context.model.dirty")
    saved = json.loads((page.folder / "test.ipynb").read_text())
    data = saved["cells"][1]["outputs"][0]["data"]
    assert "".join(data["text/html"]).startswith(f'<img alt="{title}')
    assert "widgets" not in saved["metadata"]
    assert len(json.dumps(saved)) < 200_000
