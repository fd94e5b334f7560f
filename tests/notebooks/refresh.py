"""Runs notebooks and stores their outputs: ``python -m tests.notebooks.refresh 05 06``, or ``all``.

Stored are printed text, and the static form of tables, charts and widgets. A notebook is left as it is if one of its
outputs must not be stored: it names a path, a host or a process of this machine, holds a bitmap, or is too long.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient.exceptions import CellExecutionError

from tests.notebooks.outputs import MOST_BYTES, NotStorable, plain, problems, stored_forms
from tests.notebooks.runs import FOLDER, run


def keep_outputs(notebook: Any) -> None:
    """Replaces the outputs of a run by what is stored of them, and removes counts and the state of widgets.

    Raises:
        NotStorable: outputs that must not be stored; the message names each cell.
    """
    notebook.metadata.pop("widgets", None)
    found = []
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type != "code":
            continue
        try:
            cell.outputs = stored_forms(cell.outputs)
            wrong = [problem for form in cell.outputs for problem in problems(form)]
        except NotStorable as error:
            wrong = [str(error)]
        cell.execution_count = None
        cell.metadata.pop("execution", None)
        first = next(iter(cell.source.splitlines()), "")
        found += [f"cell {number} ({first[:60]!r}): {problem}" for problem in wrong]
    if found:
        raise NotStorable("\n".join(found))
    size = len(nbformat.writes(notebook).encode())
    if size > MOST_BYTES:
        parts = sorted(((len(str(cell.get("outputs"))), n) for n, cell in enumerate(notebook.cells)), reverse=True)[:5]
        largest = ", ".join(f"cell {number} {length:,}" for length, number in parts)
        raise NotStorable(f"the notebook has {size:,} bytes, {MOST_BYTES:,} are allowed; largest outputs: {largest}")


def store(path: Path) -> float:
    """Runs a notebook and writes it with its outputs; returns the seconds of the run.

    Raises:
        NotStorable: see `keep_outputs`. The file is not changed.
    """
    notebook, seconds = run(path)
    keep_outputs(notebook)
    nbformat.write(notebook, path)
    return seconds


def paths_of(names: list[str]) -> list[Path]:
    """The notebooks whose names begin so; all for ``all``.

    Raises:
        ValueError: no notebook has this name.
    """
    found: list[Path] = []
    for name in names:
        matching = sorted(FOLDER.glob("*.ipynb" if name == "all" else f"{Path(name).stem}*.ipynb"))
        if not matching:
            raise ValueError(f"no notebook begins with {name!r}. Fix: pass one of {[p.stem for p in _all()]}")
        found += matching
    return found


def _all() -> list[Path]:
    return sorted(FOLDER.glob("*.ipynb"))


def main(names: list[str]) -> int:
    """Refreshes the notebooks; 1 if one of them could not be stored."""
    failed = 0
    for path in paths_of(names):
        try:
            seconds = store(path)
        except (NotStorable, CellExecutionError) as error:
            failed = 1
            print(f"{path.name}: not stored\n{plain(str(error))}", file=sys.stderr)
        else:
            print(f"{path.name}: {seconds:.1f} s, {path.stat().st_size:,} bytes")
    return failed


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit(f"{__doc__}\nNotebooks: {', '.join(path.stem[:2] for path in _all())}")
    sys.exit(main(sys.argv[1:]))
