"""Checks that need a checkout of the repository: its tests that need a GPU, and its notebooks."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import recshard_lab
from recshard_lab.launcher.devices import SHARE_VARIABLE
from recshard_lab.selftest.checks import Check, NotApplicable, Seen

__all__ = ["checkout", "checkout_checks"]

TESTS_S = 1800
CELL_S = 300
SHARED = {SHARE_VARIABLE: "1"}


def checkout() -> Path:
    """The repository that this package was imported from.

    Raises:
        NotApplicable: the package is installed from a wheel.
    """
    root = Path(recshard_lab.__file__).resolve().parents[1]
    if not (root / "tests").is_dir() or not (root / "notebooks").is_dir():
        raise NotApplicable(f"needs a checkout of the repository, and this package is in {root}")
    return root


def checkout_checks(stop: Callable[[], None]) -> list[Check]:
    """The tests, then every notebook as it is and with ranks that share the GPU.

    Args:
        stop: ends the ranks of other checks, whose memory notebooks need.
    """
    try:
        notebooks = sorted((checkout() / "notebooks").glob("*.ipynb"))
    except NotApplicable:
        return [Check(name, _of_checkout) for name in ("tests marked cuda", "notebooks")]
    found = [Check("tests marked cuda", partial(check_tests, stop))]
    for name, variables in (("default ranks", {}), ("ranks share the GPU", SHARED)):
        found += [Check(f"notebook {p.stem}: {name}", partial(check_notebook, stop, p, variables)) for p in notebooks]
    return found


def _of_checkout() -> Seen:
    checkout()
    raise AssertionError("there is a checkout")


def check_tests(stop: Callable[[], None], marker: str = "cuda", *paths: str) -> Seen:
    """All tests with a marker, by pytest. A skipped test is listed with its reason.

    Args:
        stop: ends the ranks of other checks.
        marker: the tests' marker.
        paths: files or folders of tests; all tests without them.
    """
    stop()
    root = checkout()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marker, f"--junitxml={file}"]
        done = subprocess.run(
            [*command, *(paths or ("tests",))], cwd=root, capture_output=True, text=True, timeout=TESTS_S, check=False
        )
        if not file.is_file():
            raise RuntimeError(f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-500:]}")
        cases = ElementTree.parse(file).getroot().findall(".//testcase")
    names = {kind: [case for case in cases if case.find(kind) is not None] for kind in ("failure", "error", "skipped")}
    bad = [f"{case.get('classname')}.{case.get('name')}" for kind in ("failure", "error") for case in names[kind]]
    if bad:
        raise RuntimeError(f"{len(bad)} of {len(cases)} tests failed: {', '.join(bad)}")
    ran = len(cases) - len(names["skipped"])
    if not ran:
        raise RuntimeError(f"none of {len(cases)} tests ran: {(done.stdout + done.stderr)[-300:]}")
    reasons = {found.get("message", "") for case in names["skipped"] if (found := case.find("skipped")) is not None}
    skipped = f", {len(names['skipped'])} skipped ({'; '.join(sorted(reasons))})" if reasons else ""
    return Seen(f"{ran} passed{skipped}")


def check_notebook(stop: Callable[[], None], path: Path, variables: dict[str, str]) -> Seen:
    """A notebook from top to bottom in a fresh kernel, its exercises included.

    Args:
        stop: ends the ranks of other checks.
        path: the notebook; it is not changed.
        variables: added to the kernel's environment.
    """
    import nbformat
    from nbclient import NotebookClient

    stop()
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(notebook, timeout=CELL_S, kernel_name="python3", resources=resources)
    client.execute(env={**os.environ, **variables})
    texts = [output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", [])]
    launched = [line for text in texts for line in text.splitlines() if " ready in " in line]
    return Seen(
        f"{len(notebook.cells)} cells; {launched[0].split(' ready in ')[0] if launched else 'no ranks launched'}"
    )
