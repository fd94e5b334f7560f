"""A reader of a notebook in JupyterLab: runs it, scrolls to a cell, looks; and asks the kernel what is true."""

from __future__ import annotations

import base64
import os
import pickle
import time
from pathlib import Path
from typing import Any

from tests.browser.lab_server import command

ROOT = Path(__file__).resolve().parents[2]
_NOTEBOOK = "window.jupyterapp.shell.currentWidget"


def run_every_cell(page: Any, timeout_s: float = 150) -> float:
    """Run All, until the last cell is done; its seconds."""
    page.wait_for_function(f"{_NOTEBOOK}?.sessionContext?.session?.kernel?.status === 'idle'")
    begun = time.perf_counter()
    page.evaluate(
        "() => { window.allRan = null;"
        " window.jupyterapp.commands.execute('notebook:run-all-cells').then(() => { window.allRan = true; }); }"
    )
    page.wait_for_function("window.allRan === true", timeout=1000 * timeout_s)
    # the command ends at the first cell that raises, while the cells after it still run
    page.wait_for_function(
        f"""() => {{ const cells = {_NOTEBOOK}.content.model.cells;
        return [...Array(cells.length).keys()].map(i => cells.get(i)).every(cell => cell.type !== 'code'
        || !cell.sharedModel.getSource()
        || (cell.executionCount && !cell.isPending && cell.executionState !== 'running')); }}""",
        timeout=1000 * timeout_s,
    )
    return time.perf_counter() - begun


def saved(page: Any, path: Path) -> Any:
    """The notebook as JupyterLab saves it, outputs and all."""
    import nbformat

    command(page, "docmanager:save")
    page.wait_for_function(f"!{_NOTEBOOK}.context.model.dirty")
    return nbformat.read(path, as_version=4)


def scroll_to(page: Any, source: str) -> None:
    """Brings the cell with these words to the top of the page; cells that are out of sight are not on the page."""
    found = page.evaluate(
        """async words => { const notebook = window.jupyterapp.shell.currentWidget.content;
        const cells = [...Array(notebook.model.cells.length).keys()].map(i => notebook.model.cells.get(i));
        const at = cells.findIndex(cell => cell.type === 'code' && cell.sharedModel.getSource().includes(words));
        if (at < 0) return false;
        notebook.activeCellIndex = at;
        await notebook.scrollToItem(at, 'start');
        return true; }""",
        source,
    )
    assert found, f"no cell contains {source!r}"
    page.wait_for_timeout(400)


def ask(page: Any, expression: str, *, first: str = "") -> Any:
    """A value of the notebook's kernel, by way of pickle; ``first`` is run before. Nothing of it shows on the page."""
    text = f"__import__('base64').b64encode(__import__('pickle').dumps({expression})).decode()"
    answer = page.evaluate(
        """async ([code, wanted]) => {
        const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
        const reply = await kernel.requestExecute(
            {code, user_expressions: {wanted}, store_history: false, stop_on_error: false}).done;
        return reply.content.user_expressions?.wanted ?? reply.content; }""",
        [first, text],
    )
    assert answer["status"] == "ok", answer
    return pickle.loads(base64.b64decode(answer["data"]["text/plain"].strip("'")))


def numbers_of(page: Any, title: str) -> list[list[str]]:
    """The cells of "The numbers" under the picture whose title begins so, heads first."""
    rows: list[list[str]] = page.evaluate(
        """title => { const pictures = [...document.querySelectorAll('svg[aria-label]')];
        const one = pictures.find(svg => svg.getAttribute('aria-label').startsWith(title));
        return [...one.parentElement.querySelector('table').rows].map(
            row => [...row.cells].map(cell => cell.textContent)); }""",
        title,
    )
    return rows


def picture(page: Any, name: str, selector: str = "") -> None:
    folder = ROOT / "test-artifacts"
    folder.mkdir(exist_ok=True)
    (page.locator(selector).first if selector else page).screenshot(path=str(folder / f"{name}.png"))


def processes_of(folder: Path) -> list[int]:
    """Every living process that was started, at whatever remove, by the JupyterLab of this folder."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            environment, state = (place / "environ").read_bytes(), (place / "stat").read_text().rpartition(")")[2]
        except OSError:  # it has ended, or is another user's
            continue
        if str(folder / ".runtime").encode() in environment and state.split()[0] != "Z":
            found.append(int(place.name))
    return [pid for pid in found if pid != os.getpid()]
