"""Runs mutants: ``python -m tests.mutants [part of a name ...]``. Never part of the normal run.

A copy of the tree is made, and for each mutant one text in one file is replaced there, its tests run until one fails,
and the file is restored. A mutant is killed if a test fails. It survives if all tests pass: a test is missing.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.mutants.mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
FAILED, PASSED = 1, 0  # exit codes of pytest; any other one says that the tests could not run
LIMIT_S = 300


def judged(mutant: Mutant, tree: Path) -> str:
    """ "killed", "SURVIVED", or why the tests say nothing about this mutant."""
    path = tree / mutant.file
    before = path.read_text()
    if (count := before.count(mutant.old)) != 1:
        return f"STALE: {mutant.file} has the old text {count} times"
    shutil.copy2(path, tree / "before")
    path.write_text(before.replace(mutant.old, mutant.new))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly"]
    environment = os.environ | {"PYTHONPATH": str(tree), "CI": "1"}  # CI: the same examples every time
    try:
        run = subprocess.run(
            [*command, *mutant.tests.split()],
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return f"killed (over {LIMIT_S} s)"
    finally:
        shutil.copy2(tree / "before", path)
    if run.returncode not in (PASSED, FAILED):
        return f"NOT RUN: pytest ended with {run.returncode}: {run.stdout[-300:]}{run.stderr[-300:]}"
    if run.returncode == PASSED:
        return "SURVIVED"
    by = [line.split(" ")[1] for line in run.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return f"killed by {by[0] if by else '?'}"


def main(parts: list[str]) -> int:
    """The number of mutants that no test killed."""
    chosen = [mutant for mutant in MUTANTS if not parts or any(part in mutant.name for part in parts)]
    alive = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        ignored = shutil.ignore_patterns(".git", "__pycache__")
        shutil.copytree(ROOT, tree, ignore=ignored)
        for mutant in chosen:
            begun = time.monotonic()
            said = judged(mutant, tree)
            alive += not said.startswith("killed")
            print(f"{mutant.name:<52} {time.monotonic() - begun:5.1f} s  {said}", flush=True)
    print(f"{len(chosen)} mutants, {len(chosen) - alive} killed")
    return alive


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1:])))
