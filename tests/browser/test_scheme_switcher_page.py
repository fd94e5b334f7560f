"""SchemeSwitcher in a real JupyterLab: drag a split line, press Apply, and the ranks hold what the page says."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.lab_server import picture, ran_notebook, run_cell
from tests.lab.test_scheme_switcher import MODEL

pytestmark = pytest.mark.browser

WIDGET = ".recshard-switcher"
CELLS = [
    "%load_ext recshard_lab\nimport recshard_lab as rs\nranks = rs.launch(4)",
    f"%%recshard\n{MODEL}",
    "from recshard_lab.lab import SchemeSwitcher\n"
    "switcher = SchemeSwitcher(ranks, 'model', 'train_step', workload=rs.Workload(32, 2.0))\nswitcher",
    "print('held', ranks.eval(\"[s.num_rows for s in model.plan.tables()['movie'].shards]\")[0], "
    "model_step := switcher.live.switched)",
]
page = ran_notebook(CELLS, f"{WIDGET} svg", height=1700)


def test_a_dragged_line_is_predicted_applied_and_proved_while_training_goes_on(page: Any) -> None:
    widget = page.locator(WIDGET)
    box = widget.get_by_role("slider", name="rank 0 ends").locator("circle").bounding_box()
    page.mouse.move(box["x"] + 4, box["y"] + 4)
    page.mouse.down()
    page.mouse.move(box["x"] + 4, box["y"] - 16, steps=5)
    page.mouse.up()
    page.wait_for_function(
        "() => Number(document.querySelector('.rs-split-lines [role=slider]').getAttribute('aria-valuenow')) < 200"
    )
    widget.get_by_role("slider", name="rank 1 ends").focus()
    page.keyboard.press("PageDown")
    ends = [int(s.get_attribute("aria-valuenow")) for s in widget.locator(".rs-split-lines [role=slider]").all()]
    assert ends[1:] == [600, 750]
    page.wait_for_function(
        "end => document.querySelector('.recshard-switcher pre').textContent.includes(`(0, (0, ${end})`)", arg=ends[0]
    )
    widget.get_by_role("button", name="Train").click()
    pause = widget.get_by_role("button", name="Pause")
    pause.locator(".fa-pause").wait_for()
    page.wait_for_selector(f"{WIDGET} :text-matches('^step [0-9]')")
    widget.get_by_role("button", name="Apply").click()
    page.wait_for_selector(f"{WIDGET} .rs-badge[data-same='true']")
    page.wait_for_selector(f"{WIDGET} .rs-card[data-side='live'][data-measured-ms]")
    widget.get_by_role("button", name="Memory", exact=True).click()
    page.wait_for_selector(f"{WIDGET} [role=figure][aria-label^='Memory per rank, predicted | counted'] [data-drawn]")
    page.wait_for_selector(f"{WIDGET} [role=figure][aria-label^='Loss by step'] [data-drawn]")
    picture(page, "scheme_switcher", WIDGET)
    pause.click()
    widget.get_by_role("button", name="Train").wait_for()
    run_cell(page, 3)
    held = str([ends[0], ends[1] - ends[0], ends[2] - ends[1], 1000 - ends[2]])
    page.wait_for_selector(f".jp-CodeCell .jp-OutputArea-output:has-text('held {held}')")
