"""LiveCounters in a real JupyterLab: it follows a cell that trains, and what the page says is what the ranks count."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.lab_server import command, jupyter_lab, notebook_page, run_all, write_notebook

pytestmark = pytest.mark.browser

ROOT = Path(__file__).resolve().parents[2]
WIDGET = ".recshard-counters"
MODEL = """%%recshard --quiet
import numpy as np, time
import recshard_lab as rs
from recshard_lab.lab.compare.measure import random_batch
rows = {"movie": 3000, "user": 900, "genre": 19}
tables = [rs.EmbeddingBagConfig(name=n, num_embeddings=r, embedding_dim=16, feature_names=["f_" + n])
          for n, r in rows.items()]
model = rs.DistributedModelParallel(rs.EmbeddingBagCollection(tables))
rng, looked_up = np.random.default_rng(rank), 0
def train_step():
    global looked_up
    batch = random_batch(tables, rs.Workload(32, 2.0, zipf_alpha=1.05), rng)
    looked_up += len(batch["f_movie"].values())
    (model(batch).values() - 1).square().mean().backward()"""
CELLS = [
    "%load_ext recshard_lab\n%recshard_launch -n 2",
    MODEL,
    "from recshard_lab.lab import LiveCounters\nlive = LiveCounters(every_s=0.2, cache_rows=100)\nlive",
    "%%recshard --quiet\nfor step in range(60 if 'again' in globals() else 0):\n"
    "    train_step(); time.sleep(0.05)\nagain = True",
    "from recshard_lab.launcher import current\n"
    "print('looked up', sum(current().pull('looked_up')), 'at', live.refresh().step)",
]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("lab")
    write_notebook(folder / "live.ipynb", CELLS)
    with (
        jupyter_lab(folder, PYTHONPATH=str(ROOT)) as (address, token),
        notebook_page(address, token, "live.ipynb", height=1500) as opened,
    ):
        run_all(opened)
        opened.wait_for_selector(f"{WIDGET} [data-step='0']", state="attached")
        yield opened


def run_cell(page: Any, number: int) -> None:
    page.locator(".jp-CodeCell").nth(number).locator(".cm-content").click()
    command(page, "notebook:run-cell")


def test_it_follows_a_cell_that_trains_and_says_what_the_ranks_say(page: Any) -> None:
    run_cell(page, 3)
    page.wait_for_function(f"Number(document.querySelector('{WIDGET} [data-samples]').dataset.samples) > 6")
    assert page.locator(".jp-CodeCell").nth(3).locator(".jp-InputPrompt").inner_text().startswith("[*")  # it runs still
    assert 0 < int(page.locator(f"{WIDGET} [data-step]").get_attribute("data-step")) < 60
    page.wait_for_selector(f"{WIDGET} [data-step='60']", state="attached")
    (ROOT / "test-artifacts").mkdir(exist_ok=True)
    page.locator(WIDGET).screenshot(path=str(ROOT / "test-artifacts" / "live_counters_light.png"))
    page.wait_for_function("!document.body.textContent.includes('[*]:')")
    run_cell(page, 4)
    told = page.wait_for_selector(".jp-OutputArea-output:has-text('at 60')").inner_text()
    counted = re.search(r"looked up (\d+) at 60", told)
    assert counted is not None
    page.wait_for_function(
        f"words => document.querySelector('{WIDGET} .rs-chart-figure')?.textContent.includes(words)",
        arg=f"lookups: {int(counted[1]):,}",
    )


def test_a_table_is_chosen_by_keyboard_and_the_dark_page_is_legible(page: Any) -> None:
    page.locator(WIDGET).get_by_label("Table", exact=True).focus()
    page.keyboard.type("user")
    page.keyboard.press("Enter")
    page.wait_for_function(f"document.querySelector('{WIDGET} .rs-chart-figure')?.textContent.includes('rank 1')")
    command(page, "apputils:change-theme", theme="JupyterLab Dark")
    page.wait_for_selector("body[data-jp-theme-light='false']", state="attached")
    page.wait_for_function(
        """selector => { const all = [...document.querySelectorAll(selector)];
        const light = one => getComputedStyle(one).fill.match(/\\d+/g).slice(0, 3).every(part => Number(part) > 150);
        return all.length && all.every(light); }""",
        arg=f"{WIDGET} .main-svg text",
    )
    page.locator(WIDGET).screenshot(path=str(ROOT / "test-artifacts" / "live_counters_dark.png"))
