"""Notebooks 01, 06 and 11 as a reader has them: Run All in JupyterLab, then controls moved and numbers read back. At
night the others too.

What the page says is compared with what the notebook's kernel says when asked past the widgets, and with what this
process computes of the same tables.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from math import isclose
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recshard_lab as rs
from recshard_lab.lab.draw.theme import ms_text
from tests.browser.lab_server import command, jupyter_lab, notebook_page
from tests.browser.reader import ROOT, ask, numbers_of, picture, processes_of, run_every_cell, saved, scroll_to

pytestmark = pytest.mark.browser

FIRST, SCHEMES, PLANNER = "01_shard_your_first_model", "06_sharding_schemes", "11_the_planner"
OTHERS = sorted({path.stem for path in (ROOT / "notebooks").glob("*.ipynb")} - {FIRST, SCHEMES, PLANNER})
COMPARE, SWITCHER, BOARD = ".recshard-plan-compare", ".recshard-switcher", ".recshard-drawing-board"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str, str]]:
    """One JupyterLab over a copy of the notebooks. Nothing that it started is left when it ends."""
    folder = tmp_path_factory.mktemp("notebooks")
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        shutil.copy(notebook, folder)
    for name in ("images", "examples"):
        shutil.copytree(ROOT / "notebooks" / name, folder / name)
    with jupyter_lab(folder, PYTHONPATH=str(ROOT)) as (address, token):
        yield folder, address, token
        assert processes_of(folder)  # the server at least: the search finds what there is
    end = time.monotonic() + 15
    while (left := processes_of(folder)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not left, f"processes of the notebooks live on: {left}"


@pytest.fixture
def read(lab: tuple[Path, str, str]) -> Iterator[Callable[[str], Any]]:
    """Opens a notebook, runs every cell and gives its page; its kernel is shut down afterwards."""
    folder, address, token = lab
    with ExitStack() as stack:

        def opened(name: str) -> Any:
            page = stack.enter_context(notebook_page(address, token, f"{name}.ipynb", height=1500))
            stack.callback(shut_down, page)
            run_every_cell(page)
            done = saved(page, folder / f"{name}.ipynb")
            for cell in (cell for cell in done.cells if cell.cell_type == "code"):
                meant = "raises-exception" in cell.metadata.get("tags", [])
                wrong = [
                    o for o in cell.outputs if (o.output_type == "error" and not meant) or o.get("name") == "stderr"
                ]
                assert not wrong, f"{cell.source}\n\n{wrong}"
                assert cell.execution_count or not cell.source
            return page

        yield opened


def shut_down(page: Any) -> None:
    page.evaluate("async () => { await window.jupyterapp.shell.currentWidget.sessionContext.shutdown(); }")


def card(page: Any, widget: str, side: str) -> dict[str, Any]:
    """What one card of a widget says."""
    return dict(page.locator(f'{widget} .rs-card[data-side="{side}"]').evaluate("card => ({...card.dataset})"))


def wait_for_step(page: Any, widget: str, side: str, ms: float) -> None:
    """Waits until a card predicts a step of `ms`."""
    page.wait_for_function(
        """([selector, ms]) => { const card = document.querySelector(selector);
        return card && Math.abs(Number(card.dataset.stepMs) - ms) <= 1e-9 * ms; }""",
        arg=[f'{widget} .rs-card[data-side="{side}"]', ms],
        timeout=15_000,
    )


def in_ms(words: str) -> float:
    """A time as the page writes it.

    >>> in_ms("88.4 µs"), in_ms("0.27 ms")
    (0.0884, 0.27)
    """
    number, unit = words.split()
    return float(number) * {"ms": 1.0, "µs": 1e-3}[unit]


def planned_ms(tables: list[Any], topology: Any, load: Any, schemes: dict[str, str]) -> float:
    """The step that this process plans, past every widget."""
    wishes = {name: rs.ParameterConstraints(sharding_types=[scheme]) for name, scheme in schemes.items()}
    planner = rs.EmbeddingShardingPlanner(topology, workload=load, constraints=wishes)
    plan = planner.plan_tables(tables)
    return plan.estimate.step_ms


def stop_the_ranks(page: Any) -> None:
    """Ends the ranks as the notebook would; their processes are gone."""
    pids = ask(page, "rs.launcher.current().pids")
    assert ask(page, "rs.launcher.current()", first="rs.launcher.current().stop()") is None
    end = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


COMPARED = """
import gc
compare = next(one for one in gc.get_objects() if isinstance(one, rs.PlanCompare))
ranks = rs.launcher.current() or rs.launch(4)
"""


def test_the_first_notebook_compares_plans_and_measures_one(read: Callable[[str], Any]) -> None:
    page = read(FIRST)
    tables, load = ask(page, "(tables, workload)", first=COMPARED)
    scroll_to(page, "rs.PlanCompare(")
    widget = page.locator(COMPARE)
    wait_for_step(page, COMPARE, "mine", planned_ms(tables, rs.Topology(4), load, {"movie": "row_wise"}))
    wait_for_step(page, COMPARE, "auto", planned_ms(tables, rs.Topology(4), load, {}))
    widget.get_by_label("movie", exact=True).select_option(label="column-wise")
    wait_for_step(page, COMPARE, "mine", planned_ms(tables, rs.Topology(4), load, {"movie": "column_wise"}))
    assert ask(page, "compare.mine.plan.tables()['movie'].sharding_type") == "column_wise"
    slider = widget.get_by_role("slider", name="Ranks")
    slider.focus()
    page.keyboard.press("ArrowRight")  # six ranks
    assert slider.get_attribute("aria-valuetext") == "6"
    wait_for_step(page, COMPARE, "mine", planned_ms(tables, rs.Topology(6), load, {"movie": "column_wise"}))
    page.keyboard.press("ArrowLeft")
    wait_for_step(page, COMPARE, "mine", planned_ms(tables, rs.Topology(4), load, {"movie": "column_wise"}))
    widget.get_by_role("button", name="Run on ranks").click()
    page.wait_for_selector(f'{COMPARE} .rs-card[data-side="mine"][data-measured-ms]')
    shown = card(page, COMPARE, "mine")
    assert float(shown["measuredMs"]) == ask(page, "compare.measured.step_ms")
    plan, counted = ask(page, "(compare.mine.plan, compare.measured.traffic_bytes)")
    sent = rs.estimate(plan, tables, rs.Topology(4), replace(load, dense_parameters=0)).traffic_bytes
    np.fill_diagonal(counted, 0)
    assert np.allclose(sent, counted, rtol=0.1)  # it ran that plan, not another
    picture(page, "notebook_01_compare", COMPARE)
    command(page, "apputils:change-theme", theme="JupyterLab Dark")
    page.wait_for_selector('body[data-jp-theme-light="false"]', state="attached")
    page.wait_for_timeout(500)
    picture(page, "notebook_01_compare_dark", COMPARE)
    stop_the_ranks(page)


WHOLE = """
def whole_table(name, rows, cols):
    import numpy
    table = numpy.full((rows, cols), numpy.nan, dtype=numpy.float32)
    pieces = "[(s.rows, s.cols, w.numpy().copy()) for s, w in model.collections[''].table_shards()[%r].shards()]"
    for held in ranks.eval(pieces % name):
        for r, c, weights in held:
            table[slice(*r), slice(*c)] = weights
    return table
"""


@pytest.mark.nightly
def test_the_sixth_draws_a_tiling_and_reshards_a_living_model(read: Callable[[str], Any]) -> None:
    page = read(SCHEMES)
    a_tile_changes_hands(page)
    a_line_is_dragged_and_applied(page)
    stop_the_ranks(page)


def a_tile_changes_hands(page: Any) -> None:
    scroll_to(page, "board = lab.DrawingBoard(")
    board = page.locator(BOARD).first
    before = ask(page, "board.tiles")
    middle = next(i for i, tile in enumerate(before) if tile == (0, (300, 700), (4, 8)))  # of the pinwheel
    board.locator(f"[data-tile='{middle}']").focus()
    page.keyboard.press("3")
    board.locator(f"[data-tile='{middle}'][aria-label^='rank 3']").wait_for()
    after = ask(page, "board.tiles")
    assert sorted(after) == sorted([*before[:middle], (3, *before[middle][1:]), *before[middle + 1 :]])
    assert board.locator("textarea").input_value().count("rank 3") == 2
    board.get_by_role("button", name="Run it").click()
    board.locator(".rs-badge[data-same='true']").wait_for()
    picture(page, "notebook_06_board", BOARD)


def a_line_is_dragged_and_applied(page: Any) -> None:
    scroll_to(page, "switcher = lab.SchemeSwitcher(")
    widget = page.locator(SWITCHER)
    weights = ask(page, "whole_table('movie', 4000, 8)", first=WHOLE)
    assert np.isfinite(weights).all()
    widget.get_by_label("movie", exact=True).select_option(label="row-wise")
    widget.get_by_label("user", exact=True).select_option(label="column-wise")
    circle = widget.get_by_role("slider", name="rank 0 ends").locator("circle")
    circle.scroll_into_view_if_needed()
    box = circle.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 4, box["y"] + 4)
    page.mouse.down()
    page.mouse.move(box["x"] + 4, box["y"] - 16, steps=5)
    page.mouse.up()
    page.wait_for_function(
        "() => Number(document.querySelector('.rs-split-lines [role=slider]').getAttribute('aria-valuenow')) < 1000"
    )
    ends = [int(s.get_attribute("aria-valuenow")) for s in widget.locator(".rs-split-lines [role=slider]").all()]
    assert 0 < ends[0] < 1000
    assert ends[1:] == [2000, 3000]
    wait_for_step(page, SWITCHER, "asked", asked_ms(page, ends))
    widget.get_by_role("button", name="Apply").click()
    widget.locator(".rs-card[data-side='live']").wait_for()
    page.wait_for_function(
        "() => document.querySelector('.recshard-switcher .rs-badge').textContent.includes('the same model')"
    )
    wait_for_step(page, SWITCHER, "live", asked_ms(page, ends))
    held = ask(page, "ranks.eval(\"model.plan.tables()['movie'].shards\")[0]")
    assert [(s.rank, s.rows) for s in held] == list(enumerate(zip([0, *ends], [*ends, 4000], strict=True)))
    assert np.array_equal(ask(page, "whole_table('movie', 4000, 8)"), weights)  # bit for bit, past the badge
    before = ask(page, "len(switcher.live.losses)")
    widget.get_by_role("button", name="Train").click()
    page.wait_for_selector(".recshard-switcher [role=figure][aria-label^='Loss by step']", state="attached")
    page.wait_for_timeout(700)
    widget.get_by_role("button", name="Pause").click()
    widget.get_by_role("button", name="Train").wait_for()
    assert ask(page, "len(switcher.live.losses)") > before
    end = time.monotonic() + 15  # the last steps may still be measured
    while not isclose(float(card(page, SWITCHER, "live")["measuredMs"]), ask(page, "switcher.live.measured.step_ms")):
        assert time.monotonic() < end
        page.wait_for_timeout(200)
    picture(page, "notebook_06_switcher", SWITCHER)


def asked_ms(page: Any, ends: list[int]) -> float:
    """What this process predicts of the plan that the page asks for."""
    tables, topology, load, live = ask(
        page, "(switcher.tables, switcher.topology, switcher.workload, switcher.live.plan)"
    )
    stripes = zip([0, *ends], [*ends, 4000], strict=True)
    cut = dict(live.tables())
    cut["movie"] = rs.ParameterSharding(
        "row_wise", shards=[rs.Shard(i, rows, (0, 8)) for i, rows in enumerate(stripes)]
    )
    cut["user"] = rs.ParameterSharding("column_wise")
    plan = rs.ShardingPlan({"tables": cut}).resolved(tables, 4, topology.local_world_size)
    return rs.estimate(plan, tables, topology, load).step_ms


@pytest.mark.nightly
def test_the_eleventh_shows_what_this_process_plans_of_its_tables(read: Callable[[str], Any]) -> None:
    page = read(PLANNER)
    tables, load, step_ms, found = ask(page, "(tables, load, plan.estimate.step_ms, by_hand.estimate.ms)")
    assert isclose(planned_ms(tables, rs.Topology.preset("h100x8"), load, {}), step_ms, rel_tol=1e-9)
    scroll_to(page, 'views.draw_alike("phases"')
    _, *rows = numbers_of(page, f"Step time, predicted: {ms_text(float(found.max(axis=0).sum()))}")
    assert np.allclose([[in_ms(cell) for cell in row[1:]] for row in rows], np.c_[found, found.sum(axis=1)], rtol=5e-3)
    picture(page, "notebook_11_phases")


@pytest.mark.nightly
@pytest.mark.parametrize("name", OTHERS)
def test_every_other_notebook_runs(read: Callable[[str], Any], name: str) -> None:
    read(name)
