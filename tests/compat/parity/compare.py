"""Runs cases in another process, and compares results."""

import json
import math
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CASES = sorted(path for path in (HERE / "cases").glob("*.py") if path.stem != "__init__")
RECORDED = HERE / "recorded"
MARK = "OBSERVED "


class Observer:
    """A process that runs cases under one library.

    Args:
        python: an interpreter that has it. library: "torchrec" or "recshard_lab".
    """

    def __init__(self, python: str, library: str) -> None:
        self.library, self._errors = library, tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [python, "-W", "ignore", "-m", "tests.compat.parity.observe", library],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=HERE.parents[2],
            env={**os.environ, "PYTHONPATH": str(HERE.parents[2])},
        )

    def results(self, file: str) -> dict[str, Any]:
        """Results of all cases of a file.

        Raises:
            RuntimeError: the process died, with the end of what it printed.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(file, file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith(MARK):
                found: dict[str, Any] = json.loads(line.removeprefix(MARK))
                return found
        self._errors.seek(0)
        raise RuntimeError(f"{self.library} printed no results:\n{self._errors.read()[-3000:]}")

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()
        self._errors.close()


def names_of(path: Path) -> list[str]:
    """Names of the cases of a file, in its order, from its text."""
    return re.findall(r"^@case\(.*?^def (\w+)", path.read_text(), re.MULTILINE | re.DOTALL)


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
