"""One JupyterLab in a test process, over a folder of notebooks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.lab_server import chromium, jupyter_lab
from tests.patience import wait_until


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str, str]]:
    """Its folder, address and token. Nothing that it started is left when it ends."""
    folder = tmp_path_factory.mktemp("lab")
    with jupyter_lab(folder) as (address, token):
        yield folder, address, token
        assert processes_of(folder)  # the server at least: the search finds what there is
    wait_until(lambda: not processes_of(folder))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium."""
    with chromium() as opened:
        yield opened


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
    return found
