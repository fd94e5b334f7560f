"""DrawingBoard in a real JupyterLab: shards drawn with the mouse and changed by keys arrive in Python, and run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.lab_server import command, jupyter_lab, notebook_page, run_all, write_notebook

pytestmark = pytest.mark.browser

ROOT = Path(__file__).resolve().parents[2]
WIDGET = ".recshard-drawing-board"
CELLS = [
    "import recshard_lab as rs\nfrom recshard_lab.lab import DrawingBoard\nranks = rs.launch(2)\n"
    "movies = rs.EmbeddingBagConfig(name='movies', num_embeddings=1000, embedding_dim=16, feature_names=['f'])\n"
    "board = DrawingBoard(movies)\nboard",
    "print('drawn', sorted(board.tiles))",
]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("lab")
    write_notebook(folder / "draw.ipynb", CELLS)
    with (
        jupyter_lab(folder, PYTHONPATH=str(ROOT)) as (address, token),
        notebook_page(address, token, "draw.ipynb", height=1100) as opened,
    ):
        run_all(opened)
        opened.wait_for_selector(f"{WIDGET} [data-tile]")
        yield opened


def picture(page: Any, name: str) -> None:
    folder = ROOT / "test-artifacts"
    folder.mkdir(exist_ok=True)
    page.locator(WIDGET).screenshot(path=str(folder / f"drawing_board_{name}.png"))


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
    picture(page, "hole")
    widget.get_by_role("button", name="Apply this fix").click()
    page.wait_for_selector(f"{WIDGET} :text('A tiling: 2 shards')")
    widget.locator("[data-tile='1']").focus()
    page.keyboard.press("1")
    page.wait_for_selector(f"{WIDGET} [data-tile='1'][aria-label^='rank 1']")
    widget.get_by_role("button", name="Run it").click()
    badge = page.locator(f"{WIDGET} .rs-badge")
    badge.wait_for()
    assert badge.get_attribute("data-same") == "true"
    picture(page, "light")
    page.locator(".jp-CodeCell").nth(1).locator(".cm-content").click()
    command(page, "notebook:run-cell")
    shown = [
        tuple(int(n) for n in "".join(c if c.isdigit() else " " for c in label.replace(",", "", 0)).split())
        for label in (
            tile.get_attribute("aria-label").split(". ")[0].replace("1,000", "1000")
            for tile in widget.locator("[data-tile]").all()
        )
    ]
    drawn = sorted((rank, (r0, r1), (c0, c1)) for rank, r0, r1, c0, c1 in shown)
    page.wait_for_selector(f".jp-OutputArea-output:has-text('drawn {drawn}')")


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
    picture(page, "by_keys")


def wait_for_code(page: Any, *lines: str) -> None:
    for line in lines:
        page.wait_for_selector(f'{WIDGET} pre:has-text("{line}")', state="attached", timeout=10_000)
