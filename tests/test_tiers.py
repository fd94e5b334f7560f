"""The tiers of tests: each fits its minutes, and no test file is outside of them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import durations, night
from tests.grid import grid, pairwise

ROOT = Path(__file__).parents[1]
MINUTES = {"pytest": 10, "gate": 12}
WORKERS = 2


@pytest.mark.parametrize("tier", MINUTES)
def test_a_tier_by_day_fits_its_minutes(tier: str) -> None:
    seconds = sum(durations.read()[tier]["files"].values())
    assert seconds <= MINUTES[tier] * 60 * WORKERS


def test_every_part_of_the_night_ends_in_30_minutes() -> None:
    for room in night.rooms():
        for part in night.parts(room):
            assert part.seconds <= 30 * 60, (room, part)


def test_the_night_runs_every_test_file() -> None:
    files = [file for room in night.rooms() for part in night.parts(room) for file in part.files]
    assert sorted(files) == sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))


def test_the_night_lists_its_parts_without_an_installation() -> None:
    printed = subprocess.check_output([sys.executable, "-S", "-m", "tests.night"], cwd=ROOT, text=True)
    assert re.search(r"^planner 1: \d+ files.*, about \d+ minutes$", printed, re.MULTILINE)


def test_every_pair_is_in_a_case_by_day() -> None:
    axes = [list(range(size)) for size in (8, 4, 2, 3)]
    rows = pairwise(axes)
    for a in range(len(axes)):
        for b in range(a):
            assert {(row[a], row[b]) for row in rows} == {(x, y) for x in axes[a] for y in axes[b]}
    assert len(rows) < 8 * 4 * 2


def test_values_of_the_gate_are_not_in_cases_of_the_day() -> None:
    _, cases = grid(gate={"ranks": [1, 3]}, scheme=["a", "b", "c"], ranks=[1, 2, 3])
    by_day = [case.values for case in cases if not case.marks]
    assert by_day == [("a", 2), ("b", 2), ("c", 2)]
    in_the_gate = [case.values for case in cases if [mark.name for mark in case.marks] == ["gate"]]
    assert sorted(in_the_gate) == sorted((scheme, ranks) for scheme in "abc" for ranks in (1, 3))


def test_pre_commit_has_the_ruff_of_the_gate() -> None:
    (pinned,) = re.findall(r"^ruff==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert f"rev: v{pinned}\n" in (ROOT / ".pre-commit-config.yaml").read_text()
