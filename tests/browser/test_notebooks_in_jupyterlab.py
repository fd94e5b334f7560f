"""Notebook 01 as a reader has it: Run All in JupyterLab, then controls moved and numbers read back. At night all run.

What the page says is compared with what the notebook's kernel says when asked past the widgets, and with what this
process computes of the same tables.
"""

from __future__ import annotations

import base64
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest

import recshard_lab as rs
from tests.browser.lab_server import ROOT, command, notebook_page, picture, shut_down, wait_for_kernel, wait_for_step
from tests.patience import scaled

pytestmark = pytest.mark.browser

FIRST = "01_shard_your_first_model"
OTHERS = sorted({path.stem for path in (ROOT / "notebooks").glob("*.ipynb")} - {FIRST})
COMPARE = ".recshard-plan-compare"
NOTEBOOK = "window.jupyterapp.shell.currentWidget"
ALL_RAN = f"""() => {{ const cells = {NOTEBOOK}.content.model.cells;
    return [...Array(cells.length).keys()].map(i => cells.get(i)).every(cell => cell.type !== 'code'
    || !cell.sharedModel.getSource()
    || (cell.executionCount && !cell.isPending && cell.executionState !== 'running')); }}"""
COMPARED = """
import gc
compare = next(one for one in gc.get_objects() if isinstance(one, rs.PlanCompare))
ranks = rs.launcher.current() or rs.launch(4)
"""


@pytest.fixture(scope="module")
def notebooks(lab: tuple[Path, str, str]) -> Path:
    """A copy of the notebooks, which JupyterLab serves."""
    return Path(shutil.copytree(ROOT / "notebooks", lab[0] / "notebooks"))


@pytest.fixture
def read(lab: tuple[Path, str, str], notebooks: Path) -> Iterator[Callable[[str], Any]]:
    """Opens a notebook, runs every cell and gives its page; its kernel is shut down afterwards."""
    _, address, token = lab
    with ExitStack() as stack:

        def opened(name: str) -> Any:
            page = stack.enter_context(notebook_page(address, token, f"notebooks/{name}.ipynb"))
            stack.callback(shut_down, page)
            wait_for_kernel(page)
            command(page, "notebook:run-all-cells")
            page.wait_for_function(ALL_RAN, timeout=1000 * scaled(150))
            command(page, "docmanager:save")
            page.wait_for_function(f"!{NOTEBOOK}.context.model.dirty")
            for cell in nbformat.read(notebooks / f"{name}.ipynb", as_version=4).cells:
                if cell.cell_type == "code":
                    meant = "raises-exception" in cell.metadata.get("tags", [])
                    wrong = [o for o in cell.outputs if o.output_type == "error" and not meant]
                    wrong += [o for o in cell.outputs if o.get("name") == "stderr"]
                    assert not wrong, f"{cell.source}\n\n{wrong}"
                    assert cell.execution_count or not cell.source
            return page

        yield opened


def ask(page: Any, expression: str, *, first: str = "") -> Any:
    """A value of the notebook's kernel, by way of pickle; ``first`` is run before. Nothing of it shows on the page."""
    text = f"__import__('base64').b64encode(__import__('pickle').dumps({expression})).decode()"
    answer = page.evaluate(
        f"""async ([code, wanted]) => {{
        const kernel = {NOTEBOOK}.sessionContext.session.kernel;
        const reply = await kernel.requestExecute(
            {{code, user_expressions: {{wanted}}, store_history: false, stop_on_error: false}}).done;
        return reply.content.user_expressions?.wanted ?? reply.content; }}""",
        [first, text],
    )
    assert answer["status"] == "ok", answer
    return pickle.loads(base64.b64decode(answer["data"]["text/plain"].strip("'")))


@pytest.mark.nightly
def test_the_first_notebook_compares_plans_and_measures_one(read: Callable[[str], Any]) -> None:
    page = read(FIRST)
    tables, load = ask(page, "(tables, workload)", first=COMPARED)
    widget = page.locator(COMPARE)

    def wait_for_plan(side: str, ranks: int, schemes: dict[str, str]) -> None:
        """Waits until a card predicts what this process plans, past every widget."""
        wishes = {name: rs.ParameterConstraints(sharding_types=[scheme]) for name, scheme in schemes.items()}
        planner = rs.EmbeddingShardingPlanner(rs.Topology(ranks), workload=load, constraints=wishes)
        wait_for_step(page, COMPARE, side, planner.plan_tables(tables).estimate.step_ms)

    wait_for_plan("mine", 4, {"movie": "row_wise"})
    wait_for_plan("auto", 4, {})
    widget.get_by_label("movie", exact=True).select_option(label="column-wise")
    wait_for_plan("mine", 4, {"movie": "column_wise"})
    assert ask(page, "compare.mine.plan.tables()['movie'].sharding_type") == "column_wise"
    widget.get_by_role("slider", name="Ranks").focus()
    page.keyboard.press("ArrowRight")  # six ranks
    wait_for_plan("mine", 6, {"movie": "column_wise"})
    page.keyboard.press("ArrowLeft")
    wait_for_plan("mine", 4, {"movie": "column_wise"})
    widget.get_by_role("button", name="Run on ranks").click()
    card = page.wait_for_selector(f'{COMPARE} .rs-card[data-side="mine"][data-measured-ms]')
    assert float(card.get_attribute("data-measured-ms")) == ask(page, "compare.measured.step_ms")
    plan, counted = ask(page, "(compare.mine.plan, compare.measured.traffic_bytes)")
    sent = rs.estimate(plan, tables, rs.Topology(4), replace(load, dense_parameters=0)).traffic_bytes
    np.fill_diagonal(counted, 0)
    assert np.allclose(sent, counted, rtol=0.1)  # it ran that plan, not another
    picture(page, "notebook_01_compare", COMPARE)


@pytest.mark.nightly
@pytest.mark.parametrize("name", OTHERS)
def test_every_other_notebook_runs(read: Callable[[str], Any], name: str) -> None:
    read(name)
