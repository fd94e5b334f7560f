"""SchemeSwitcher in a real JupyterLab: drag a split line, press Apply, and the ranks hold what the page says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.lab_server import command, jupyter_lab, notebook_page, run_all, write_notebook
from tests.lab.test_scheme_switcher import MODEL

pytestmark = pytest.mark.browser

ROOT = Path(__file__).resolve().parents[2]
WIDGET = ".recshard-switcher"
CELLS = [
    "%load_ext recshard_lab\nimport recshard_lab as rs\nranks = rs.launch(4)",
    f"%%recshard\n{MODEL}",
    "from recshard_lab.lab import SchemeSwitcher\n"
    "switcher = SchemeSwitcher(ranks, 'model', 'train_step', workload=rs.Workload(32, 2.0))\nswitcher",
    "print('held', ranks.eval(\"[s.num_rows for s in model.plan.tables()['movie'].shards]\")[0], "
    "model_step := switcher.live.switched)",
]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("lab")
    write_notebook(folder / "switch.ipynb", CELLS)
    with (
        jupyter_lab(folder, PYTHONPATH=str(ROOT)) as (address, token),
        notebook_page(address, token, "switch.ipynb", height=1700) as opened,
    ):
        run_all(opened)
        opened.wait_for_selector(f"{WIDGET} svg")
        yield opened


def picture(page: Any, name: str) -> None:
    folder = ROOT / "test-artifacts"
    folder.mkdir(exist_ok=True)
    page.locator(WIDGET).screenshot(path=str(folder / f"scheme_switcher_{name}.png"))


def test_a_dragged_line_is_predicted_applied_and_proved_while_training_goes_on(page: Any) -> None:
    widget = page.locator(WIDGET)
    line = widget.get_by_role("slider", name="rank 0 ends").locator("circle")
    box = line.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 4, box["y"] + 4)
    page.mouse.down()
    page.mouse.move(box["x"] + 4, box["y"] - 16, steps=5)
    page.mouse.up()
    page.wait_for_function(
        "() => Number(document.querySelector('.rs-split-lines [role=slider]').getAttribute('aria-valuenow')) < 200"
    )
    second = widget.get_by_role("slider", name="rank 1 ends")
    second.focus()
    page.keyboard.press("PageDown")
    ends = [int(s.get_attribute("aria-valuenow")) for s in widget.locator(".rs-split-lines [role=slider]").all()]
    assert 0 < ends[0] < 200
    assert ends[1:] == [600, 750]
    page.wait_for_function(
        "end => document.querySelector('.recshard-switcher pre').textContent.includes(`(0, (0, ${end})`)", arg=ends[0]
    )
    widget.get_by_role("button", name="Train").click()
    pause = widget.get_by_role("button", name="Pause")
    pause.locator(".fa-pause").wait_for()
    page.wait_for_selector(f"{WIDGET} :text-matches('^step [0-9]')")
    widget.get_by_role("button", name="Apply").click()
    badge = page.locator(f"{WIDGET} .rs-badge")
    badge.wait_for()
    assert badge.get_attribute("data-same") == "true"
    page.wait_for_selector(f"{WIDGET} .rs-card[data-side='live'][data-measured-ms]")
    widget.get_by_role("button", name="Memory", exact=True).click()
    page.wait_for_selector(f"{WIDGET} [role=figure][aria-label^='Memory per rank, predicted | counted'] [data-drawn]")
    page.wait_for_selector(f"{WIDGET} [role=figure][aria-label^='Loss by step'] [data-drawn]")
    picture(page, "light")
    pause.click()
    widget.get_by_role("button", name="Train").wait_for()
    page.locator(".jp-CodeCell").nth(3).locator(".cm-content").click()
    command(page, "notebook:run-cell")
    held = str([ends[0], ends[1] - ends[0], ends[2] - ends[1], 1000 - ends[2]])
    page.wait_for_selector(f".jp-CodeCell .jp-OutputArea-output:has-text('held {held}')")


def test_it_is_legible_in_the_dark_theme(page: Any) -> None:
    command(page, "apputils:change-theme", theme="JupyterLab Dark")
    page.wait_for_selector("body[data-jp-theme-light='false']", state="attached")
    page.locator(WIDGET).get_by_role("button", name="Placement", exact=True).click()
    page.wait_for_selector(f"{WIDGET} svg[aria-label^='Placement']")
    picture(page, "dark")
