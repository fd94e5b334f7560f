"""Runs mutants: ``python -m tests.mutants [part of a name ...]``, each against tests that ``.ci/run`` runs.

In a copy of the tree one text in one file is replaced, and the mutant's tests run until one fails. A mutant is killed
if a test fails that passes without it. It survives if all its tests pass: then a test is missing.
"""

import sys
import time

from tests.mutants.mutants import MUTANTS
from tests.mutants.running import ROOT, Copy


def main(parts: list[str]) -> int:
    """1 if a mutant was not killed."""
    chosen = [mutant for mutant in MUTANTS if not parts or any(part in mutant.name for part in parts)]
    killed = 0
    with Copy() as copy:
        for mutant in chosen:
            begun = time.monotonic()
            text = (ROOT / mutant.file).read_text()
            count = text.count(mutant.old)
            words = f"STALE: {mutant.file} has the old text {count} times"
            if count == 1:
                words = copy.judged(mutant.file, text.replace(mutant.old, mutant.new), mutant.tests)
            killed += words.startswith("killed")
            print(f"{mutant.name}  ({time.monotonic() - begun:.0f} s)\n    {words}", flush=True)
    print(f"{len(chosen)} mutants: {killed} killed, {len(chosen) - killed} not")
    return int(killed < len(chosen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
