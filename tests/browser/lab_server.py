"""A real JupyterLab on loopback and a notebook in a real browser, for tests that look at the page."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
_ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def jupyter_lab(
    folder: Path, settings: Mapping[str, Mapping[str, Any]] | None = None, **variables: str
) -> Iterator[tuple[str, str]]:
    """Starts JupyterLab over ``folder``; gives its address and token, and stops it and its kernels afterwards.

    Args:
        folder: what it serves and keeps its own files in.
        settings: of JupyterLab's extensions, as in ``{"notebook-extension/tracker": {"windowingMode": "none"}}``.
        variables: of the environment of the server and its kernels.
    """
    for name, values in {"apputils-extension/notification": {"fetchNews": "false"}, **(settings or {})}.items():
        kept = folder / ".config" / "lab" / "user-settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(values))
    port, token = free_port(), secrets.token_hex(16)
    environment = {
        **os.environ,
        "JUPYTER_CONFIG_DIR": str(folder / ".config"),
        "JUPYTER_RUNTIME_DIR": str(folder / ".runtime"),
        "IPYTHONDIR": str(folder / ".ipython"),
        **variables,
    }
    news = folder / ".config/lab/user-settings/@jupyterlab/apputils-extension/notification.jupyterlab-settings"
    news.parent.mkdir(parents=True, exist_ok=True)
    news.write_text('{"fetchNews": "false"}')  # else JupyterLab asks, on top of the page
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1"]
    command += [f"--ServerApp.port={port}", "--ServerApp.port_retries=0", f"--IdentityProvider.token={token}"]
    command += [f"--ServerApp.root_dir={folder}", "--LabApp.expose_app_in_browser=True"]
    command += ["--LabApp.news_url=", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=folder)
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for(f"{address}/api/status?token={token}", server, folder / "server.log")
        yield address, token
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def wait_for(url: str, server: subprocess.Popen[bytes], log: Path, patience_s: float = 60) -> None:
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        if server.poll() is not None:
            raise RuntimeError(f"JupyterLab ended with {server.returncode}: {log.read_text()[-2000:]}")
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"JupyterLab did not answer in {patience_s} s: {log.read_text()[-2000:]}")


def write_notebook(path: Path, cells: Sequence[str]) -> None:
    code = [
        {
            "cell_type": "code",
            "id": f"cell-{i}",
            "metadata": {},
            "outputs": [],
            "execution_count": None,
            "source": source,
        }
        for i, source in enumerate(cells)
    ]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    path.write_text(json.dumps({"cells": code, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}))


@contextmanager
def notebook_page(address: str, token: str, name: str, width: int = 1360, height: int = 1500) -> Iterator[Any]:
    """The notebook ``name`` open in Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=_ARGUMENTS)
        try:
            page = browser.new_page(viewport={"width": width, "height": height})
            page.set_default_timeout(60_000)
            page.goto(f"{address}/lab/tree/{name}?reset&token={token}")  # no tabs of an earlier page
            page.wait_for_selector(".jp-Notebook .jp-CodeCell")
            page.wait_for_function("window.jupyterapp !== undefined")
            command(page, "application:toggle-left-area") if page.locator("#jp-left-stack").is_visible() else None
            yield page
        finally:
            browser.close()


def command(page: Any, name: str, **arguments: Any) -> None:
    """Runs one of JupyterLab's commands."""
    page.evaluate("([name, args]) => { window.jupyterapp.commands.execute(name, args); }", [name, arguments])


def wait_for_kernel(page: Any) -> None:
    """Waits until the kernel is there: cells that are run before have JupyterLab ask which kernel to take."""
    page.wait_for_function(
        "window.jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'", timeout=60_000
    )


def run_all(page: Any) -> None:
    """Runs every cell and waits until all have run."""
    wait_for_kernel(page)
    command(page, "notebook:run-all-cells")
    page.wait_for_function(
        """() => { const prompts = [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')];
        return prompts.length && prompts.every(p => /\\[\\d+\\]/.test(p.textContent)); }""",
        timeout=90_000,
    )
