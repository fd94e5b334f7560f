"""Runs of notebooks, and what must hold of each. One kernel runs several, each in a fresh namespace without ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
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


FRESH = """
def fresh(shell):
    import os

    from ipywidgets import Widget

    Widget.close_all()
    shell.extension_manager.unload_extension("recshard_lab")
    shell.reset()
    os.chdir({folder!r})

fresh(get_ipython())
"""


@contextmanager
def kernel() -> Iterator[NotebookClient]:
    """A client whose kernel starts once and runs notebook after notebook."""
    client = NotebookClient(
        nbformat.v4.new_notebook(),
        timeout=120,
        record_timing=False,
        kernel_name="python3",
        resources={"metadata": {"path": str(FOLDER)}},
    )
    with client.setup_kernel():
        yield client


def run(path: Path, client: NotebookClient | None = None) -> tuple[Any, float]:
    """A notebook after a run, and its seconds; raises at the first cell that does.

    Args:
        path: of the notebook.
        client: of `kernel`; a fresh kernel if it is left out.
    """
    if client is None:
        with kernel() as client:
            return run(path, client)
    notebook = nbformat.read(path, as_version=4)
    begun = time.perf_counter()
    fresh = nbformat.v4.new_code_cell(FRESH.format(folder=str(FOLDER)))
    client.nb = nbformat.v4.new_notebook(cells=[fresh])
    client.execute_cell(fresh, 0, store_history=False)
    client.nb = notebook
    client.reset_execution_trackers()
    for index, cell in enumerate(notebook.cells):
        if cell.cell_type == "code":
            cell.outputs = []
        client.execute_cell(cell, index, execution_count=client.code_cells_executed + 1)
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
