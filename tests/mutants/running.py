"""Runs tests on a copy of the tree in which one file is changed."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PASSED, FAILED = 0, 1  # exit codes of pytest; any other one says that the tests could not run
LIMIT_S = 900


class Copy:
    """A copy of the tree, until the end of the block."""

    def __enter__(self) -> "Copy":
        self.folder = tempfile.TemporaryDirectory()
        self.tree = Path(self.folder.name) / "tree"
        shutil.copytree(ROOT, self.tree, ignore=shutil.ignore_patterns(".git", "__pycache__"))
        return self

    def __exit__(self, *error: object) -> None:
        self.folder.cleanup()

    def judged(self, file: str, text: str, tests: list[str]) -> str:
        """What tests say of a changed file; begins with "killed" if one fails on it that passes without the change."""
        path = self.tree / file
        before = path.read_text()
        path.write_text(text)
        try:
            code, printed = self._run(tests)
        finally:
            path.write_text(before)
        if code == PASSED:
            return "SURVIVED"
        if code == -1:
            return f"NOT JUDGED: no answer within {LIMIT_S} s"
        heads = [line for line in printed.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        failed = [head.partition(" ")[2].partition(" - ")[0] for head in heads]
        if code not in (FAILED, 2) or not failed:
            return f"NOT JUDGED: pytest ended with {code}: {printed[-400:]}"
        if self._run([failed[0]])[0] != PASSED:
            return f"NOT JUDGED: {failed[0]} fails without the mutant, too"
        return f"killed by {failed[0]}"

    def _run(self, tests: list[str]) -> tuple[int, str]:
        """Exit code of pytest, and what it printed; -1 after `LIMIT_S`. The tests are those that ``.ci/run`` runs."""
        command = [sys.executable, "-m", "pytest", "-qx", "-n0", "-pno:cacheprovider", "-mnot nightly", *tests]
        environment = os.environ | {"PYTHONPATH": str(self.tree)}
        try:
            done = subprocess.run(
                command, cwd=self.tree, env=environment, capture_output=True, text=True, timeout=LIMIT_S
            )
        except subprocess.TimeoutExpired:
            return -1, ""
        return done.returncode, done.stdout + done.stderr
