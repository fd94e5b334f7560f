"""Runs cases in another process, and compares results."""

import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CASES = sorted(path for path in (HERE / "cases").glob("*.py") if path.stem != "__init__")
RECORDED = HERE / "recorded"


def run(python: str, library: str, files: list[str], timeout: float = 1200) -> dict[str, dict[str, Any]]:
    """Results of all cases of the files under one library.

    Raises:
        RuntimeError: the process died, with the end of what it printed.
    """
    done = subprocess.run(
        [python, "-W", "ignore", "-m", "tests.compat.parity.observe", library, *files],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
        cwd=HERE.parents[2],
        env={**os.environ, "PYTHONPATH": str(HERE.parents[2])},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("OBSERVED ")]
    if not lines:
        raise RuntimeError(f"{library} printed no results:\n{done.stderr[-3000:]}")
    found: dict[str, dict[str, Any]] = json.loads(lines[0].removeprefix("OBSERVED "))
    return found


def recorded(file: str) -> dict[str, Any]:
    """TorchRec's stored results of a file."""
    found: dict[str, Any] = json.loads((RECORDED / f"{file}.json").read_text())
    return found


def difference(theirs: Any, ours: Any, where: str = "result") -> str:
    """The first place where two results differ; empty if there is none. Numbers may differ by 1e-5 of their size."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        if theirs.keys() != ours.keys():
            return f"{where}: TorchRec has {sorted(theirs)}, this library {sorted(ours)}"
        return next(filter(None, (difference(theirs[k], ours[k], f"{where}[{k!r}]") for k in theirs)), "")
    if isinstance(theirs, list) and isinstance(ours, list):
        if len(theirs) != len(ours):
            return f"{where}: {len(theirs)} entries under TorchRec, {len(ours)} here"
        pairs = enumerate(zip(theirs, ours, strict=True))
        return next(filter(None, (difference(a, b, f"{where}[{i}]") for i, (a, b) in pairs)), "")
    if all(isinstance(side, int | float) and not isinstance(side, bool) for side in (theirs, ours)):
        same = math.isclose(theirs, ours, rel_tol=1e-5, abs_tol=1e-6) or (math.isnan(theirs) and math.isnan(ours))
    else:
        same = type(theirs) is type(ours) and theirs == ours
    return "" if same else f"{where}: {theirs!r} under TorchRec, {ours!r} here"
