"""A real JupyterLab on loopback and notebooks in a real browser, for tests that look at the page."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.patience import scaled, wait_until

CHROMIUM = shutil.which("chromium")
ROOT = Path(__file__).resolve().parents[2]
ARTIFACTS = ROOT / "test-artifacts"
SETTINGS = {  # else JupyterLab asks about news on top of the page, and cells out of sight are not on it
    "apputils-extension/notification": {"fetchNews": "false"},
    "notebook-extension/tracker": {"windowingMode": "none"},
}
_ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
_SESSION = "window.jupyterapp.shell.currentWidget?.sessionContext"


@contextmanager
def jupyter_lab(folder: Path, **variables: str) -> Iterator[tuple[str, str]]:
    """Starts JupyterLab over ``folder``; gives its address and token, and stops it and its kernels afterwards.

    Args:
        folder: what it serves and keeps its own files in.
        variables: of the environment of the server and its kernels.
    """
    for name, values in SETTINGS.items():
        kept = folder / ".config" / "lab" / "user-settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(values))
    token, log = secrets.token_hex(16), folder / "server.log"
    environment = {
        **os.environ,
        "JUPYTER_CONFIG_DIR": str(folder / ".config"),
        "JUPYTER_RUNTIME_DIR": str(folder / ".runtime"),
        "IPYTHONDIR": str(folder / ".ipython"),
        "PYTHONPATH": str(ROOT),
        **variables,
    }
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1"]
    command += ["--ServerApp.port=0", f"--ServerApp.root_dir={folder}", f"--IdentityProvider.token={token}"]
    command += ["--LabApp.expose_app_in_browser=True", "--LabApp.news_url="]
    command += ["--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
    with log.open("w") as output:
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=output, cwd=folder)
    try:
        address = address_of(folder / ".runtime", server, log)
        wait_for(f"{address}/api/status?token={token}", server, log)
        yield address, token
    finally:
        server.terminate()
        try:
            server.wait(scaled(20))
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def address_of(runtime: Path, server: subprocess.Popen[bytes], log: Path) -> str:
    """The address of the one server that writes to a runtime folder. It binds port 0 and chooses the port itself."""

    def content() -> str:
        return "".join(path.read_text() for path in runtime.glob("jpserver-*.json"))

    wait_until(lambda: content() or server.poll() is not None, 60)
    assert content(), log.read_text()[-2000:]
    return f"http://127.0.0.1:{json.loads(content())['port']}"


def wait_for(url: str, server: subprocess.Popen[bytes], log: Path, patience_s: float = 60) -> None:
    def answered() -> bool:
        if server.poll() is not None:
            raise RuntimeError(f"JupyterLab ended with {server.returncode}: {log.read_text()[-2000:]}")
        try:
            with urllib.request.urlopen(url, timeout=scaled(2)) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    wait_until(answered, patience_s, every_s=0.2)


def write_notebook(path: Path, cells: Sequence[str]) -> None:
    """A notebook of code cells that have not run."""
    from nbformat import v4, write

    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    write(v4.new_notebook(cells=[v4.new_code_cell(source) for source in cells], metadata=kernel), path)


@contextmanager
def chromium() -> Iterator[Any]:
    """Playwright's browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=_ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def notebook_page(address: str, token: str, name: str, width: int = 1360, height: int = 1500) -> Iterator[Any]:
    """The notebook ``name`` open in Chromium."""
    with chromium() as browser:
        page = browser.new_page(viewport={"width": width, "height": height})
        page.set_default_timeout(1000 * scaled(60))
        page.goto(f"{address}/lab/tree/{name}?reset&token={token}")  # no tabs of an earlier page
        page.wait_for_selector(".jp-Notebook .jp-CodeCell")
        page.wait_for_function("window.jupyterapp !== undefined")
        if page.locator("#jp-left-stack").is_visible():
            command(page, "application:toggle-left-area")
        yield page


def ran_notebook(cells: Sequence[str], ready: str, *, height: int = 1500) -> Callable[..., Any]:
    """A fixture ``page``: a notebook of these cells, all of them run, in the JupyterLab that a test process shares.

    Args:
        cells: their Python.
        ready: a selector that is there once the page is drawn.
        height: of the window, in pixels.
    """

    @pytest.fixture(scope="module")
    def page(lab: tuple[Path, str, str], request: pytest.FixtureRequest) -> Iterator[Any]:
        root, address, token = lab
        folder = root / request.path.stem
        folder.mkdir()
        write_notebook(folder / "test.ipynb", cells)
        with notebook_page(address, token, f"{folder.name}/test.ipynb", height=height) as opened:
            run_all(opened)
            opened.wait_for_selector(ready, state="attached")
            opened.folder = folder
            yield opened
            shut_down(opened)

    return page


def command(page: Any, name: str, **arguments: Any) -> None:
    """Runs one of JupyterLab's commands."""
    page.evaluate("([name, args]) => { window.jupyterapp.commands.execute(name, args); }", [name, arguments])


def run_cell(page: Any, number: int) -> None:
    """Runs one cell of a notebook, and does not wait for it."""
    page.locator(".jp-CodeCell").nth(number).locator(".cm-content").click()
    command(page, "notebook:run-cell")


def wait_for_kernel(page: Any) -> None:
    """Waits until the kernel is there: cells that are run before have JupyterLab ask which kernel to take."""
    page.wait_for_function(f"{_SESSION}?.session?.kernel?.status === 'idle'")


def shut_down(page: Any) -> None:
    """Ends the notebook's kernel, and with it its ranks."""
    page.evaluate(f"async () => {{ await {_SESSION}.shutdown(); }}")


def run_all(page: Any) -> None:
    """Runs every cell and waits until all have run."""
    wait_for_kernel(page)
    command(page, "notebook:run-all-cells")
    page.wait_for_function(
        """() => { const prompts = [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')];
        return prompts.length && prompts.every(p => /\\[\\d+\\]/.test(p.textContent)); }"""
    )


def picture(page: Any, name: str, selector: str = "", **settings: Any) -> None:
    """Keeps a picture of the page, or of the first element that is selected, for people to look at."""
    ARTIFACTS.mkdir(exist_ok=True)
    (page.locator(selector).first if selector else page).screenshot(path=str(ARTIFACTS / f"{name}.png"), **settings)


def wait_for_step(page: Any, widget: str, side: str, step_ms: float) -> None:
    """Waits until a card of a widget predicts a step of this length."""
    page.wait_for_function(
        """([selector, step]) => { const card = document.querySelector(selector);
        return card && Math.abs(Number(card.dataset.stepMs) - step) <= 1e-9 * step; }""",
        arg=[f'{widget} .rs-card[data-side="{side}"]', step_ms],
    )
