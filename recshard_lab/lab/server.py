"""``recshard lab``: copies the notebooks, and starts JupyterLab on one of them, on this machine only."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

DEFAULT_FOLDER = Path("recshard_notebooks")
"""Where an installed package copies the notebooks to, below the working directory."""


def find_notebook(folder: Path, start: str) -> Path:
    """The first notebook of a folder whose name starts so.

    Raises:
        FileNotFoundError: there is no such notebook.
    """
    names = sorted(path.name for path in folder.glob("*.ipynb"))
    for name in names:
        if name.startswith(start):
            return folder / name
    near = get_close_matches(start, names, n=1, cutoff=0.3)
    meant = f" (did you mean {near[0]!r}?)" if near else ""
    raise FileNotFoundError(f"no notebook starts with {start!r}{meant}. Fix: use one of {', '.join(names)}")


def copy_notebooks(
    files: Mapping[Path, bytes], folder: Path, overwrite: Callable[[Sequence[Path]], bool]
) -> list[Path]:
    """Copies the notebooks, their pictures, examples and pages to a folder, which is made if it is missing.

    Args:
        files: path below the folder -> content, as `recshard_lab.shipped.shipped_files` returns them.
        folder: of the copies. Equal files are left alone.
        overwrite: called once with the copies that differ from their source, if any. False keeps all of them.

    Returns:
        The written copies, relative to `folder`.
    """
    changed = [path for path in files if (folder / path).exists() and (folder / path).read_bytes() != files[path]]
    replace = bool(changed) and overwrite(changed)
    written = [path for path in files if not (folder / path).exists() or (replace and path in changed)]
    for path in written:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(files[path])
    return written


def arguments(notebook: Path, port: int = 8888, browser: bool = True) -> list[str]:
    """JupyterLab's command line: loopback only, its token left on, no news and no check for updates.

    In a checkout, its files begin at the checkout, so that links from notebooks to ``docs`` open.
    """
    beside = notebook.parent.parent
    root = beside if (beside / "docs").is_dir() and notebook.parent.name == "notebooks" else notebook.parent
    wanted = ["--LabApp.news_url=None", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
    wanted += ["--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}", f"--ServerApp.root_dir={root}"]
    if not browser:
        wanted.append("--no-browser")
    if hasattr(os, "geteuid") and os.geteuid() == 0:  # in a container; JupyterLab refuses root unless told
        wanted.append("--allow-root")
    return [*wanted, f"--LabApp.default_url=/lab/tree/{notebook.relative_to(root).as_posix()}"]


def serve(notebook: Path, port: int = 8888, browser: bool = True) -> None:
    """Runs JupyterLab here until it is stopped."""
    from jupyterlab.labapp import LabApp

    LabApp.launch_instance(argv=arguments(notebook, port, browser))
