"""Runs of notebooks: one is made here by nbclient, or was made before, in a browser, and kept."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "notebooks"
_KEPT: dict[str, tuple[Any, float]] = {}


def keep(name: str, notebook: Any, seconds: float) -> None:
    """A run that another test of this session has made."""
    _KEPT[name] = (notebook, seconds)


def run(path: Path) -> tuple[Any, float]:
    """A notebook after a run in a fresh kernel, and its seconds; raises at the first cell that does."""
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    kept, seconds = _KEPT.get(path.stem, (None, 0.0))
    if kept is not None and [c.source for c in kept.cells] == [c.source for c in notebook.cells]:
        return kept, seconds
    for cell in code:
        cell.outputs = []
    client = NotebookClient(
        notebook, timeout=120, record_timing=False, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}
    )
    begun = time.perf_counter()
    client.execute()
    return notebook, time.perf_counter() - begun
