"""RanksPanel in a real JupyterLab: it follows a cell that is running, and its buttons work between cells."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.lab_server import command, picture, ran_notebook, run_cell

pytestmark = [pytest.mark.browser, pytest.mark.nightly]

PANEL = ".recshard-ranks"
CELLS = [
    "%load_ext recshard_lab\n%recshard_launch -n 2 --nodes 2\n"
    "from recshard_lab.lab import RanksPanel\nfrom recshard_lab.launcher import current\npanel = RanksPanel()\npanel",
    "%%recshard --quiet\nimport os, time\nprint('rank', rank, 'counts') if 'again' in globals() else None\n"
    "time.sleep(600 if 'again' in globals() else 0)\nagain = True",
]
page = ran_notebook(CELLS, f"{PANEL} tr[data-state='idle']", height=900)


def pids(page: Any) -> list[str]:
    return [row.locator("td").nth(2).inner_text() for row in page.locator(f"{PANEL} tr[data-rank]").all()]


def test_it_follows_a_running_cell_and_its_buttons_restart_and_stop(page: Any) -> None:
    run_cell(page, 1)
    page.wait_for_selector(f"{PANEL} tr[data-state='running'] >> nth=1")
    page.wait_for_selector(f"{PANEL} pre:has-text('rank 1 counts')")
    picture(page, "ranks_panel", PANEL)
    command(page, "notebook:interrupt-kernel")
    page.wait_for_selector(f"{PANEL} tr[data-state='idle'] >> nth=1")
    run_cell(page, 1)
    page.wait_for_selector(f"{PANEL} tr[data-state='running'] >> nth=1")
    page.locator(PANEL).get_by_role("button", name="Interrupt").click()  # while the cell is running
    page.wait_for_selector(f"{PANEL} tr[data-state='idle'] >> nth=1")
    before = pids(page)
    restart = page.locator(PANEL).get_by_role("button", name="Restart")
    restart.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector(f"{PANEL} :text('Restart loses 1 variable on the ranks: again.')")
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
