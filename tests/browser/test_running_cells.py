"""Widgets while a cell is running, under the ipykernel that is installed and under another one.

The other one lies in a folder of its own, which RECSHARD_OTHER_IPYKERNEL names::

    pip install --no-deps --target FOLDER 'ipykernel==7.3.*'
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.browser.lab_server import ROOT, command, jupyter_lab, notebook_page, wait_for_kernel, write_notebook

pytestmark = pytest.mark.browser

OTHER = os.environ.get("RECSHARD_OTHER_IPYKERNEL", "")
needs_other = pytest.mark.skipif(
    not OTHER, reason="RECSHARD_OTHER_IPYKERNEL is not set: no second ipykernel to test on"
)
CELLS = [
    "import ipykernel, pathlib, time\nfrom recshard_lab.lab import DrawingBoard, PlanCompare\n"
    "from recshard_lab.sharding import Topology\nfrom tests.lab.plans import movielens\n"
    "print('ipykernel', ipykernel.__version__)",
    "DrawingBoard(movielens()[1], Topology(2, ddr_cap=10**9))",
    "display(PlanCompare(movielens(), Topology(4, ddr_cap=10**9)))\n"
    "while not pathlib.Path('done').exists():\n    time.sleep(0.02)\n"
    "print('the cell ran to its end')",
]
PROMPT = ".jp-CodeCell .jp-InputPrompt"
BOARD, COMPARE = ".recshard-drawing-board", ".recshard-plan-compare"


def version_in(folder: str) -> str:
    return next(found.version for found in distributions(path=[folder]) if found.metadata["Name"] == "ipykernel")


@pytest.fixture(params=["installed", pytest.param("other", marks=needs_other)])
def page(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """The notebook, its last cell running."""
    path = os.pathsep.join([OTHER, str(ROOT)]) if request.param == "other" else str(ROOT)
    write_notebook(tmp_path / "busy.ipynb", CELLS)
    with (
        jupyter_lab(tmp_path, PYTHONPATH=path) as (address, token),
        notebook_page(address, token, "busy.ipynb", height=2600) as opened,
    ):
        wait_for_kernel(opened)
        command(opened, "notebook:run-all-cells")
        opened.folder = tmp_path
        if request.param == "other":
            opened.wait_for_selector(f".jp-OutputArea-output:has-text('ipykernel {version_in(OTHER)}')")
        opened.wait_for_selector(f"{COMPARE} svg[role=img]")
        yield opened


def running(page: Any) -> bool:
    return "[*]" in page.locator(PROMPT).nth(2).inner_text()


def move_everything(page: Any, rank: int, ranks_key: str, ranks: int, picture: str) -> None:
    """A surface, a slider, a menu and buttons; each must be answered from Python."""
    page.locator(f"{BOARD} [data-tile='0']").focus()
    page.keyboard.press(str(rank))
    page.wait_for_selector(f"{BOARD} pre:has-text('({rank}, (0, 1682), (0, 16))')", state="attached")
    widget = page.locator(COMPARE)
    widget.get_by_role("slider", name="Ranks").focus()
    page.keyboard.press(ranks_key)
    page.wait_for_selector(f"{COMPARE} pre:has-text('world_size={ranks},')", state="attached")
    widget.get_by_role("button", name=picture, exact=True).first.click()
    drawn = ":is(svg[role=img], [role=figure]:has([data-drawn]))"
    page.wait_for_selector(f"{COMPARE} {drawn}[aria-label^='{picture}']")


def test_widgets_answer_in_and_out_of_running_cells(page: Any) -> None:
    assert running(page)
    move_everything(page, 1, "ArrowLeft", 3, "Memory")
    assert running(page), "the cell was to outlast the controls"
    (page.folder / "done").touch()
    page.wait_for_selector(".jp-OutputArea-output:has-text('the cell ran to its end')")
    # The output arrives before the kernel's reply, and only the reply ends the cell.
    expect(page.locator(PROMPT).nth(2)).not_to_contain_text("[*]")
    move_everything(page, 0, "ArrowRight", 4, "Placement")
