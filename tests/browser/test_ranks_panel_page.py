"""RanksPanel in a real JupyterLab: it follows a cell that is running, and its buttons work between cells."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.lab_server import command, jupyter_lab, notebook_page, run_all, write_notebook

pytestmark = [pytest.mark.browser, pytest.mark.nightly]

ROOT = Path(__file__).resolve().parents[2]
PANEL = ".recshard-ranks"
CELLS = [
    "%load_ext recshard_lab\n%recshard_launch -n 2 --nodes 2\n"
    "from recshard_lab.lab import RanksPanel\nfrom recshard_lab.launcher import current\npanel = RanksPanel()\npanel",
    "%%recshard --quiet\nimport os, time\nprint('rank', rank, 'counts') if 'again' in globals() else None\n"
    "time.sleep(600 if 'again' in globals() else 0)\nagain = True",
    "import threading, time\nthreading.Timer(3, lambda: current().run(lambda: __import__('time').sleep(2))).start()",
]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("lab")
    write_notebook(folder / "panel.ipynb", CELLS)
    with (
        jupyter_lab(folder, PYTHONPATH=str(ROOT)) as (address, token),
        notebook_page(address, token, "panel.ipynb", height=900) as opened,
    ):
        run_all(opened)
        opened.wait_for_selector(f"{PANEL} tr[data-state='idle']")
        yield opened


def pids(page: Any) -> list[str]:
    return [row.locator("td").nth(2).inner_text() for row in page.locator(f"{PANEL} tr[data-rank]").all()]


def test_new_figures_leave_the_focus_where_it_is(page: Any) -> None:
    region = f"{PANEL} .rs-figures"
    page.locator(".jp-CodeCell").nth(2).locator(".cm-content").click()
    command(page, "notebook:run-cell")
    page.locator(region).focus()
    page.wait_for_selector(f"{region} tr[data-state='running']")
    assert page.evaluate("region => document.activeElement === document.querySelector(region)", region)
    page.wait_for_selector(f"{region} tr[data-state='idle'] >> nth=1")


def test_it_follows_a_running_cell_and_its_buttons_restart_and_stop(page: Any) -> None:
    page.locator(".jp-CodeCell").nth(1).locator(".cm-content").click()
    command(page, "notebook:run-cell")
    page.wait_for_selector(f"{PANEL} tr[data-state='running'] >> nth=1")
    page.wait_for_selector(f"{PANEL} pre:has-text('rank 1 counts')")
    (ROOT / "test-artifacts").mkdir(exist_ok=True)
    page.locator(PANEL).screenshot(path=str(ROOT / "test-artifacts" / "ranks_panel_light.png"))
    command(page, "notebook:interrupt-kernel")
    page.wait_for_selector(f"{PANEL} tr[data-state='idle'] >> nth=1")
    page.locator(".jp-CodeCell").nth(1).locator(".cm-content").click()
    command(page, "notebook:run-cell")
    page.wait_for_selector(f"{PANEL} tr[data-state='running'] >> nth=1")
    page.locator(PANEL).get_by_role("button", name="Interrupt").click()  # while the cell is running
    page.wait_for_selector(f"{PANEL} tr[data-state='idle'] >> nth=1")
    before = pids(page)
    restart = page.locator(PANEL).get_by_role("button", name="Restart")
    restart.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector(f"{PANEL} :text('Restart loses 1 variable on the ranks: again.')")
    page.locator(PANEL).screenshot(path=str(ROOT / "test-artifacts" / "ranks_panel_asks.png"))
    assert pids(page) == before
    page.keyboard.press("Enter")
    page.wait_for_selector(f"{PANEL} :text('Fresh ranks')")
    page.wait_for_selector(f"{PANEL} tr[data-state='idle'] >> nth=1")
    page.wait_for_function(
        "([panel, old]) => ![...document.querySelectorAll(panel + ' tr[data-rank] td')]"
        ".some(cell => old.includes(cell.textContent))",
        arg=[PANEL, before],
    )
    page.wait_for_selector(f"{PANEL} :text('Their variables are gone: again. Run the cells that made them.')")
    page.locator(PANEL).get_by_role("button", name="Stop").click()
    page.wait_for_selector(f"{PANEL} :text('No ranks are running')")
