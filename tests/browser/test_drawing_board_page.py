"""DrawingBoard in a real JupyterLab: shards drawn with the mouse and changed by keys arrive in Python, and run."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.lab_server import picture, ran_notebook, run_cell

pytestmark = pytest.mark.browser

WIDGET = ".recshard-drawing-board"
CELLS = [
    "import recshard_lab as rs\nfrom recshard_lab.lab import DrawingBoard\nranks = rs.launch(2)\n"
    "movies = rs.EmbeddingBagConfig(name='movies', num_embeddings=1000, embedding_dim=16, feature_names=['f'])\n"
    "board = DrawingBoard(movies)\nboard",
    "print('drawn', sorted(board.tiles))",
]
page = ran_notebook(CELLS, f"{WIDGET} [data-tile]", height=1100)


def drag(page: Any, box: Any, start: tuple[float, float], end: tuple[float, float]) -> None:
    """Draws from one place of the table to another, as shares of its width and height."""
    (x0, y0), (x1, y1) = ((box["x"] + box["width"] * x, box["y"] + box["height"] * y) for x, y in (start, end))
    page.mouse.move(x0, y0)
    page.mouse.down()
    page.mouse.move(x1, y1, steps=4)
    page.mouse.up()


def test_pieces_are_drawn_refused_mended_and_run(page: Any) -> None:
    widget = page.locator(WIDGET)
    box = widget.locator("[data-tile] rect").first.bounding_box()
    widget.get_by_label("Draw as").select_option(label="rank 1")
    drag(page, box, (0.5, 0.0), (1.0, 0.6))
    page.wait_for_function("() => document.querySelectorAll('.rs-tile-canvas [data-tile]').length === 3")
    page.wait_for_selector(f"{WIDGET} :text('A tiling: 3 shards on 2 ranks')")
    widget.locator("[data-tile='2']").focus()
    page.keyboard.press("Delete")
    page.wait_for_selector(f"{WIDGET} .rs-alert:has-text('no shard covers rows [0, 600) x cols [8, 16)')")
    widget.get_by_role("button", name="Apply this fix").click()
    page.wait_for_selector(f"{WIDGET} :text('A tiling: 2 shards')")
    widget.locator("[data-tile='1']").focus()
    page.keyboard.press("1")
    page.wait_for_selector(f"{WIDGET} [data-tile='1'][aria-label^='rank 1']")
    widget.get_by_role("button", name="Run it").click()
    page.wait_for_selector(f"{WIDGET} .rs-badge[data-same='true']")
    picture(page, "drawing_board", WIDGET)
    run_cell(page, 1)
    page.wait_for_selector(
        ".jp-OutputArea-output:has-text('drawn [(0, (600, 1000), (0, 16)), (1, (0, 600), (0, 16))]')"
    )


def held(page: Any) -> str:
    """Which piece has the focus."""
    return str(page.evaluate("() => document.activeElement.dataset.tile"))


def test_a_tiling_is_drawn_by_keys_alone(page: Any) -> None:
    widget = page.locator(WIDGET)
    widget.get_by_label("Draw as").select_option(label="rank 1")
    widget.get_by_role("textbox", name="Shards").fill("rank 0: rows 0-1000, cols 0-16")
    page.wait_for_selector(f"{WIDGET} :text('A tiling: 1 shard on 1 rank')")
    page.locator(f"{WIDGET} [data-tile='0']").focus()
    page.keyboard.press("h")
    page.keyboard.press("v")
    assert held(page) == "2"
    page.keyboard.press("0")
    wait_for_code(page, "(0, (0, 500), (0, 16)),", "(1, (500, 1000), (0, 8)),", "(0, (500, 1000), (8, 16)),")
    page.keyboard.press("Delete")
    page.wait_for_selector(f"{WIDGET} .rs-alert:has-text('no shard covers')")
    page.keyboard.press("Control+z")
    wait_for_code(page, "(0, (0, 500), (0, 16)),", "(1, (500, 1000), (0, 8)),", "(0, (500, 1000), (8, 16)),")
    page.locator(f"{WIDGET} [data-tile='2']").focus()
    page.keyboard.press("ArrowLeft")
    assert held(page) == "1"
    page.keyboard.press("ArrowUp")
    assert held(page) == "0"
    page.keyboard.press("Shift+ArrowDown")  # shards below give way, ...
    wait_for_code(page, "(0, (0, 550), (0, 16)),", "(1, (550, 1000), (0, 8)),", "(0, (550, 1000), (8, 16)),")
    for _ in range(2):
        page.keyboard.press("Shift+ArrowUp")  # ... and follow
    page.keyboard.press("Enter")
    wait_for_code(page, "(1, (0, 450), (0, 16)),", "(1, (450, 1000), (0, 8)),", "(0, (450, 1000), (8, 16)),")
    page.wait_for_selector(f"{WIDGET} :text('A tiling: 3 shards on 2 ranks')")
    assert held(page) == "0"
    assert "28.8 KB" in page.locator(f"{WIDGET} [data-tile='0']").get_attribute("aria-label")  # 450 x 16 floats


def wait_for_code(page: Any, *lines: str) -> None:
    for line in lines:
        page.wait_for_selector(f'{WIDGET} pre:has-text("{line}")', state="attached")
