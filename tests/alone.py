"""Which test files need the machine for themselves.

``.ci/run`` runs ``pytest -m "not alone"`` first, two files at a time, and then ``pytest -m alone``, one file at a time.
A file is alone if its own text does one of these things:

- it reads a clock to measure. CPU time is no clock, as other processes do not add to it. Neither is a deadline, as in
  ``end = time.monotonic() + 20``;
- it interrupts ranks or kills other processes, which must answer within limits of time;
- it starts a kernel, JupyterLab or a browser, itself or through a module of ``tests``.

A file that measures in a way that its text does not show has the line ``pytestmark = pytest.mark.alone``.
"""

import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent

MEASURES = re.compile(
    r"\b(perf_counter|timeit|time\.time|time_cases)\b|monotonic\(\) -|= time\.monotonic\(\)$", re.MULTILINE
)
STOPS_OTHERS = re.compile(r"\b(SIGINT|SIGSTOP|killpg|interrupt|interrupt_main)\b|os\.kill\((?!os\.getpid\(\))")
STARTS_A_KERNEL = re.compile(
    r"\b(import playwright|from playwright|importorskip\(\"playwright\"|import jupyter_client|from jupyter_client"
    r"|import nbclient|from nbclient|jupyterlab --|apparatus\.kernel|kernel import Kernel)"
)
_HELPERS = re.compile(r"^\s*from (tests(?:\.\w+)*) import ([\w, ()\n]+?)$", re.MULTILINE)


@cache
def is_alone(path: Path) -> bool:
    """Whether the tests of this file are; doctests of the library are not.

    >>> is_alone(TESTS / "browser/test_every_widget.py"), is_alone(TESTS / "sparse/test_jagged_tensor.py")
    (True, False)
    """
    return path.is_relative_to(TESTS) and bool(why_alone(path))


def why_alone(path: Path) -> str:
    """What the file does that needs the machine; empty if nothing does.

    >>> why_alone(TESTS / "notebooks/test_notebooks.py")
    'starts a kernel (notebooks/runs.py)'
    """
    text = path.read_text()
    for why, pattern in (("measures", MEASURES), ("stops others", STOPS_OTHERS)):
        if found := pattern.search(text):
            return f"{why} ({found[0].strip()})"
    for module in (path, *helpers_of(path)):
        if STARTS_A_KERNEL.search(module.read_text()):
            return f"starts a kernel ({module.relative_to(TESTS).as_posix()})"
    return ""


@cache
def helpers_of(path: Path) -> tuple[Path, ...]:
    """The modules of ``tests`` that a file imports, and those that they import."""
    found: dict[Path, None] = {}
    waiting = [path]
    while waiting:
        for module, names in _HELPERS.findall(waiting.pop().read_text()):
            place = TESTS.joinpath(*module.split(".")[1:])
            parts = [name.strip(" ()\n").partition(" as ")[0] for name in names.split(",")]
            for file in (place.with_suffix(".py"), *(place / f"{part}.py" for part in parts)):
                if file.is_file() and file not in found:
                    found[file] = None
                    waiting.append(file)
    return tuple(found)
