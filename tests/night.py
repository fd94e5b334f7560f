"""``.ci/night``: everything about one room, in parts of at most 30 minutes.

A room is a folder of ``tests``; the files beside these folders are the room ``project``. A part is a list of test
files, then the room's mutants. `.ci/durations.json` says how long each takes.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tests import durations
from tests.mutants.mutants import MUTANTS

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
PART_S = 25 * 60
NO_TESTS = 5
"""What pytest exits with when no test is selected."""
UNKNOWN_S = 30.0
"""Of a file that has never run at night."""
MUTANT_S = 60.0
"""Of a mutant: the tests that kill it."""


@dataclass
class Part:
    """What runs in one go: test files, or mutants by name."""

    files: list[str] = field(default_factory=list)
    mutants: list[str] = field(default_factory=list)
    seconds: float = 0.0


@cache
def rooms() -> list[str]:
    """All rooms.

    >>> "planner" in rooms(), "project" in rooms()
    (True, True)
    """
    folders = {path.relative_to(TESTS).parts[0] for path in TESTS.rglob("test_*.py")}
    return [*sorted(name for name in folders if not name.endswith(".py")), "project"]


def parts(room: str) -> list[Part]:
    """The room's parts, in order. A file is never divided.

    >>> all(part.seconds <= PART_S or len(part.files + part.mutants) == 1 for part in parts("planner"))
    True
    """
    found = TESTS.glob("test_*.py") if room == "project" else (TESTS / room).rglob("test_*.py")
    known = durations.read().get("night", {"files": {}})["files"]
    names = sorted(str(path.relative_to(ROOT)) for path in found)
    files = [(known.get(name, UNKNOWN_S), Part([name])) for name in names]
    mutants = [(MUTANT_S, Part(mutants=[mutant.name])) for mutant in MUTANTS if _room_of(mutant.file) == room]
    divided = [Part()]
    for seconds, one in files + mutants:
        if divided[-1].seconds and divided[-1].seconds + seconds > PART_S:
            divided.append(Part())
        divided[-1].files += one.files
        divided[-1].mutants += one.mutants
        divided[-1].seconds += seconds
    return divided


def _room_of(file: str) -> str:
    room = Path(file).parts[1] if file.startswith("recshard_lab/") else Path(file).parts[0]
    return room if room in rooms() else "project"


def run(part: Part) -> int:
    """Runs a part: two files at a time, then tests with clocks one at a time, then mutants. 0 if all pass."""
    environment = os.environ | {"RECSHARD_NIGHT": "1"}
    commands = []
    if part.files:
        tests = ["-m", "pytest", "-q", "--durations=20", *part.files]
        commands += [[*tests, "-m", "not clock"], [*tests, "-m", "clock", "-n", "0"]]
    if part.mutants:
        commands.append(["-m", "tests.mutants", *part.mutants])
    codes = [subprocess.run([sys.executable, *command], cwd=ROOT, env=environment).returncode for command in commands]
    return int(any(code not in (0, NO_TESTS) for code in codes))


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if all tests pass; 1 if not."""
    parser = argparse.ArgumentParser(prog=".ci/night", description=__doc__)
    parser.add_argument("--rooms", action="store_true", help="print the rooms as JSON")
    parser.add_argument("room", nargs="?", choices=rooms(), help="all rooms with their parts are listed without it")
    parser.add_argument("part", nargs="?", type=int, help="1, 2, ...; all of them without it")
    chosen = parser.parse_args(arguments)
    if chosen.rooms:
        print(json.dumps(rooms()))
        return 0
    if chosen.room is None:
        for room in rooms():
            for number, part in enumerate(parts(room), 1):
                content = f"{len(part.files)} files" + f", {len(part.mutants)} mutants" * bool(part.mutants)
                print(f"{room} {number}: {content}, about {part.seconds / 60:.0f} minutes")
        return 0
    every = parts(chosen.room)
    if chosen.part is not None and not 1 <= chosen.part <= len(every):
        parser.error(f"room {chosen.room} has parts 1 to {len(every)}, got {chosen.part}")
    numbers = [chosen.part] if chosen.part else range(1, len(every) + 1)
    return max(run(every[number - 1]) for number in numbers)


if __name__ == "__main__":
    sys.exit(main())
