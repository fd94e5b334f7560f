"""Runs of notebooks: one is made here by nbclient, or was made before, in a browser, and kept.

``python -m tests.notebooks.runs NAME...`` runs notebooks and stores the outputs of their figures.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "notebooks"
STATIC = {"text/html", "text/plain", "image/svg+xml"}
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


def store(path: Path) -> None:
    """Runs a notebook and keeps what the repository keeps of it: static outputs of its figures, and no counts."""
    notebook, _ = run(path)
    notebook.metadata.pop("widgets", None)
    for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
        shown = [out for out in cell.outputs if "data" in out] if "figure" in cell.metadata.get("tags", []) else []
        cell.outputs, cell.execution_count = shown, None
        for output in shown:
            output.data = {kind: data for kind, data in output.data.items() if kind in STATIC}
            if "execution_count" in output:
                output.execution_count = None
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        store(FOLDER / f"{name.removesuffix('.ipynb')}.ipynb")
