"""``recshard lab``: starts JupyterLab with a notebook of the checkout, on this machine only."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import recshard_lab


def notebook_folder() -> Path:
    """The folder ``notebooks`` of the checkout: beside the package, or in the working directory.

    Raises:
        FileNotFoundError: neither exists; an installed wheel has no notebooks.
    """
    places = [Path(recshard_lab.__file__).resolve().parent.parent / "notebooks", Path.cwd() / "notebooks"]
    for place in places:
        if place.is_dir() and any(place.glob("*.ipynb")):
            return place
    raise FileNotFoundError(
        f"no notebooks in {' or '.join(map(str, places))}: only the repository has them, not the installed package. "
        f"Fix: clone the repository, pip install -e '.[cpu]' in it, and run recshard lab there"
    )


def find_notebook(start: str) -> Path:
    """The first notebook whose name begins with `start`.

    Raises:
        FileNotFoundError: no notebook begins with it, or no notebooks exist.
    """
    folder = notebook_folder()
    names = sorted(path.name for path in folder.glob("*.ipynb"))
    for name in names:
        if name.startswith(start):
            return folder / name
    raise FileNotFoundError(f"no notebook starts with {start!r}; notebooks: {', '.join(names)}")


def copied(notebook: Path, folder: Path) -> Path:
    """Copies the notebooks and their pictures to another folder; existing files stay.

    Args:
        notebook: one of them.
        folder: created if it is missing.

    Returns:
        `notebook` in `folder`.
    """
    for path in sorted(notebook.parent.rglob("*")):
        within = path.relative_to(notebook.parent)
        hidden = any(part.startswith((".", "__")) for part in within.parts)
        target = folder / within
        if path.is_file() and not hidden and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    return folder.resolve() / notebook.name


def arguments(notebook: Path, port: int = 8888, browser: bool = True) -> list[str]:
    """JupyterLab's command line: loopback only, with its token, without news and checks for updates."""
    options = ["--LabApp.news_url=None", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
    options += ["--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}", f"--ServerApp.root_dir={notebook.parent}"]
    if not browser:
        options.append("--no-browser")
    if hasattr(os, "geteuid") and os.geteuid() == 0:  # in a container
        options.append("--allow-root")
    return [*options, f"--LabApp.default_url=/lab/tree/{notebook.name}"]


def serve(notebook: Path, port: int = 8888, browser: bool = True) -> None:
    """Runs JupyterLab in this process until it is stopped."""
    from jupyterlab.labapp import LabApp

    LabApp.launch_instance(argv=arguments(notebook, port, browser))
