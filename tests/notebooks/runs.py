"""Runs of notebooks in fresh kernels, and what must hold of each."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from tests.notebooks.outputs import difference, stored_forms

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
FIRST = [path for path in NOTEBOOKS if path.stem[:2] in ("01", "06")]
"""Every change runs these, and the gate runs the others."""
OTHERS = [path for path in NOTEBOOKS if path not in FIRST]


def run(path: Path) -> tuple[Any, float]:
    """A notebook after a run in a fresh kernel, and its seconds; raises at the first cell that does."""
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for cell in code:
        cell.outputs = []
    client = NotebookClient(
        notebook, timeout=120, record_timing=False, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}
    )
    begun = time.perf_counter()
    client.execute()
    return notebook, time.perf_counter() - begun


def check_run(notebook: Any) -> None:
    """Every cell ran and wrote nothing to stderr."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source]
    assert all(cell.execution_count for cell in code)
    assert not [cell.source for cell in code for out in cell.get("outputs", []) if out.get("name") == "stderr"]


def check_outputs(path: Path, notebook: Any) -> None:
    """The outputs are those that are stored. Of cells tagged ``timed`` their kinds and words; of others everything."""
    stored = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    ran = [cell for cell in notebook.cells if cell.cell_type == "code"]
    found = [
        f"cell {cell.source.splitlines()[:1]}: {apart}"
        for cell, now in zip(stored, ran, strict=True)
        if (
            apart := difference(
                stored_forms(cell.outputs), stored_forms(now.outputs), "timed" in cell.metadata.get("tags", [])
            )
        )
    ]
    assert not found, f"Fix: python -m tests.notebooks.refresh {path.stem[:2]}\n" + "\n".join(found)
