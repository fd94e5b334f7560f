"""``recshard lab``: JupyterLab on the notebooks. `lab.server` copies them and starts the server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from recshard_lab.cli.options import note_on_stderr, sizes_text, stderr


def lab(
    notebook: Annotated[str, typer.Argument(help="A notebook, by its first letters.")] = "00",
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Copy the notebooks to this folder and open the copies. Default: ./recshard_notebooks. "
            "In a checkout the default is the checkout's own notebooks, not copied."
        ),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Overwrite changed copies without a question, for scripts.")
    ] = False,
    copy_only: Annotated[bool, typer.Option("--copy-only", help="Copy the notebooks and exit.")] = False,
    port: Annotated[int, typer.Option(help="Port to listen on. If it is taken, the next free one is used.")] = 8888,
    browser: Annotated[bool, typer.Option(help="Open a browser window.")] = True,
) -> None:
    """Open JupyterLab on the notebooks. Only this machine can connect (loopback)."""
    from recshard_lab.lab.server import DEFAULT_FOLDER, copy_notebooks, find_notebook, serve
    from recshard_lab.shipped import in_checkout, notebook_folder, shipped_files

    source = notebook_folder()
    name = find_notebook(source, notebook).name
    if folder is None and (copy_only or not in_checkout()):
        folder = DEFAULT_FOLDER
    if folder is not None:
        ask: Callable[[Sequence[Path]], bool] = _always if yes else partial(_overwrite, folder)
        written = copy_notebooks(shipped_files(), folder, ask)
        if written:
            stderr().print(escape(f"Wrote {folder} ({sizes_text([folder / path for path in written])})"))
        source = folder
    if not copy_only:
        serve(source.resolve() / name, port, browser)


def _always(changed: Sequence[Path]) -> bool:
    return True


def _overwrite(folder: Path, changed: Sequence[Path]) -> bool:
    """Asks whether to overwrite changed copies. No answer is a no, and a note."""
    words = f"{len(changed)} file{'s' * (len(changed) != 1)} in {folder}"
    names = ", ".join(map(str, changed[:5])) + (", ..." if len(changed) > 5 else "")
    try:
        answer = input(f"{words} changed since the shipped version: {names}. Overwrite? Your changes are lost. [y/N] ")
    except EOFError:
        answer = ""
    if answer.strip().lower() in ("y", "yes"):
        return True
    note_on_stderr(f"kept {words} with your changes. --yes overwrites them.")
    return False
