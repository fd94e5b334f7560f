"""Runs mutants: ``python -m tests.mutants [part of a name ...]``. Never part of the normal run.

The tree is copied. For each mutant one text in one file of the copy is replaced, its tests run until one fails, and the
file is restored. A mutant is killed if a test fails that passes without it. It survives if all its tests pass: then a
test is missing.
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
PASSED, FAILED = 0, 1  # exit codes of pytest; any other one says that the tests could not run
LIMIT_S = 600


def run(tree: Path, tests: list[str]) -> tuple[int, str]:
    """Exit code of pytest, and what it printed; -1 after `LIMIT_S`."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(tree), "CI": "1"}  # CI: hypothesis draws the same examples every time
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return -1, ""
    return done.returncode, done.stdout + done.stderr


def judged(mutant: Mutant, tree: Path) -> str:
    """What becomes of a mutant; begins with "killed" if a test fails on it and on nothing else."""
    path, before = tree / mutant.file, tree / "before"
    text = path.read_text()
    if (count := text.count(mutant.old)) != 1:
        return f"STALE: {mutant.file} has the old text {count} times"
    shutil.copy2(path, before)
    path.write_text(text.replace(mutant.old, mutant.new))
    try:
        code, printed = run(tree, mutant.tests)
    finally:
        shutil.copy2(before, path)
    if code == PASSED:
        return "SURVIVED"
    if code == -1:
        return f"NOT JUDGED: no answer within {LIMIT_S} s"
    heads = [line for line in printed.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    failed = [head.partition(" ")[2].partition(" - ")[0] for head in heads]
    if code != FAILED or not failed:
        return f"NOT JUDGED: pytest ended with {code}: {printed[-400:]}"
    if run(tree, [failed[0]])[0] != PASSED:
        return f"NOT JUDGED: {failed[0]} fails without the mutant, too"
    return f"killed by {failed[0]}"


def main(parts: list[str]) -> int:
    """1 if a mutant was not killed."""
    chosen = [mutant for mutant in MUTANTS if not parts or any(part in mutant.name for part in parts)]
    killed = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", "__pycache__"))
        for mutant in chosen:
            begun = time.monotonic()
            words = judged(mutant, tree)
            killed += words.startswith("killed")
            print(f"{mutant.name}  ({time.monotonic() - begun:.0f} s)\n    {words}", flush=True)
    print(f"{len(chosen)} mutants: {killed} killed, {len(chosen) - killed} not")
    return int(killed < len(chosen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
