"""LiveCounters in a real JupyterLab: it follows a cell that trains, and what the page says is what the ranks count."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.browser.lab_server import picture, ran_notebook, run_cell

pytestmark = pytest.mark.browser

WIDGET = ".recshard-counters"
MODEL = """%%recshard --quiet
import numpy as np, pathlib, time
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
    "%%recshard --quiet\nfor step in range(60 if 'again' in globals() else 0):\n    train_step(); time.sleep(0.05)\n"
    "    while step == 40 and not pathlib.Path('go').exists(): time.sleep(0.02)\nagain = True",
    "from recshard_lab.launcher import current\n"
    "print('looked up', sum(current().pull('looked_up')), 'at', live.refresh().step)",
]
page = ran_notebook(CELLS, f"{WIDGET} [data-step='0']")


def test_it_follows_a_cell_that_trains_and_says_what_the_ranks_say(page: Any) -> None:
    run_cell(page, 3)
    page.wait_for_function(f"Number(document.querySelector('{WIDGET} [data-samples]').dataset.samples) > 4")
    assert page.locator(".jp-CodeCell").nth(3).locator(".jp-InputPrompt").inner_text().startswith("[*")  # it runs still
    assert 0 < int(page.locator(f"{WIDGET} [data-step]").get_attribute("data-step")) < 60
    (page.folder / "go").touch()
    page.wait_for_selector(f"{WIDGET} [data-step='60']", state="attached")
    picture(page, "live_counters", WIDGET)
    page.wait_for_function("!document.body.textContent.includes('[*]:')")
    run_cell(page, 4)
    told = page.wait_for_selector(".jp-OutputArea-output:has-text('at 60')").inner_text()
    counted = re.search(r"looked up (\d+) at 60", told)
    assert counted is not None
    page.wait_for_function(
        f"words => document.querySelector('{WIDGET} .rs-chart-figure')?.textContent.includes(words)",
        arg=f"lookups: {int(counted[1]):,}",
    )
    page.locator(WIDGET).get_by_label("Table", exact=True).focus()
    page.keyboard.type("user")
    page.keyboard.press("Enter")
    page.wait_for_function(f"document.querySelector('{WIDGET} .rs-chart-figure')?.textContent.includes('rank 1')")
