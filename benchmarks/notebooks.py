"""Seconds that each notebook takes from top to bottom in a fresh kernel, and the memory that it takes meanwhile.

It ends with the rows of the table in ``notebooks/TEACHING.md``, with these figures in them.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path

import psutil

from benchmarks import Figure, note
from recshard_lab.shipped import notebook_folder

TARGET_S = 30.0
EVERY_S = 0.25  # between two looks at the memory


def figures(only: Sequence[str] = ()) -> list[Figure]:
    """A figure a notebook; peak MB is of kernel and ranks together, what they share counted once.

    Args:
        only: parts of notebooks' names; all when left out.

    Raises:
        ValueError: an `only` that no notebook has in its name.
        FileNotFoundError: the notebooks are not here; they come with the checkout.
    """
    paths = sorted(notebook_folder().glob("*.ipynb"))
    for part in only:
        if not any(part in path.name for path in paths):
            raise ValueError(f"no notebook has {part!r} in its name; there are: {', '.join(p.stem for p in paths)}")
    measured: dict[str, tuple[float, float]] = {}
    for path in paths:
        if not only or any(part in path.name for part in only):
            note(f"{path.stem} ...")
            measured[path.stem] = run_notebook(path)
    note("\n".join(["Rows of notebooks/TEACHING.md:", *rows(measured)]))
    return [
        Figure(name, seconds, "s", target=TARGET_S, beside={"peak MB": peak_mb})
        for name, (seconds, peak_mb) in measured.items()
    ]


def rows(measured: Mapping[str, tuple[float, float]]) -> list[str]:
    """The rows of the table in ``TEACHING.md`` with new seconds and memory; other columns are as in the page.

    Args:
        measured: a notebook's name without its ending -> seconds, and peak megabytes.
    """
    page = (notebook_folder() / "TEACHING.md").read_text()
    found = []
    for name, (seconds, peak_mb) in measured.items():
        row = rf"^\| \[(.+?)\]\({name}\.ipynb\) \| \S+ s \| (\d+) min \| \S+ GB \|(.*)\|$"
        title, minutes, before = next(iter(re.findall(row, page, re.MULTILINE)), (name, "?", " "))
        times = f"{max(1, round(seconds))} s | {minutes} min | {peak_mb / 1e3:.1f} GB"
        found.append(f"| [{title}]({name}.ipynb) | {times} |{before}|")
    return found


def run_notebook(path: Path) -> tuple[float, float]:
    """Seconds and peak megabytes of one; a cell that fails raises."""
    nbformat, client = import_module("nbformat"), import_module("nbclient")
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    with _peak_mb() as peaks:
        begun = time.perf_counter()
        client.NotebookClient(notebook, timeout=120, kernel_name="python3", resources=resources).execute()
        seconds = time.perf_counter() - begun
    return seconds, max(peaks, default=0.0)


@contextmanager
def _peak_mb() -> Iterator[list[float]]:
    """Megabytes of all processes below this one, again and again."""
    seen: list[float] = []
    done = threading.Event()

    def look() -> None:
        while not done.wait(EVERY_S):
            total = 0.0
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    memory = process.memory_full_info()
                    total += getattr(memory, "pss", memory.rss) / 1e6
            seen.append(total)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()
