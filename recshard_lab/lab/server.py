"""``recshard lab``: JupyterLab on a notebook of the checkout, on this machine only."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import recshard_lab


def notebook_folder() -> Path:
    """The folder ``notebooks`` of the checkout: beside the package, or below the working directory.

    Raises:
        FileNotFoundError: it is at neither; notebooks are not part of an installed wheel.
    """
    places = [Path(recshard_lab.__file__).resolve().parent.parent / "notebooks", Path.cwd() / "notebooks"]
    for place in places:
        if place.is_dir() and any(place.glob("*.ipynb")):
            return place
    raise FileNotFoundError(
        f"no notebooks at {' or '.join(map(str, places))}: they come with the checkout, not with the installed "
        f"package. Fix: clone the repository, pip install -e '.[cpu]' there, and run recshard lab in it"
    )


def find_notebook(start: str) -> Path:
    """The first notebook whose name starts so.

    Raises:
        FileNotFoundError: there is no such notebook, or no notebooks at all.
    """
    folder = notebook_folder()
    names = sorted(path.name for path in folder.glob("*.ipynb"))
    for name in names:
        if name.startswith(start):
            return folder / name
    raise FileNotFoundError(f"no notebook starts with {start!r}; there are: {', '.join(names)}")


def copied(notebook: Path, folder: Path) -> Path:
    """Copies the notebooks and their pictures to another folder; files that are there already are kept.

    Args:
        notebook: one of them.
        folder: made where it is missing.

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
    """JupyterLab's command line: loopback only, its token left on, no news and no check for updates."""
    wanted = ["--LabApp.news_url=None", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
    wanted += ["--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}", f"--ServerApp.root_dir={notebook.parent}"]
    if not browser:
        wanted.append("--no-browser")
    if hasattr(os, "geteuid") and os.geteuid() == 0:  # in a container; JupyterLab refuses root unless told
        wanted.append("--allow-root")
    return [*wanted, f"--LabApp.default_url=/lab/tree/{notebook.name}"]


def serve(notebook: Path, port: int = 8888, browser: bool = True) -> None:
    """Runs JupyterLab here until it is stopped."""
    from jupyterlab.labapp import LabApp

    LabApp.launch_instance(argv=arguments(notebook, port, browser))
