"""A test that lacks a program is skipped with the line that installs it. In the gate it fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import conftest, programs

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[1]
CASES = """
import pytest

@pytest.fixture
def started(request):
    raise AssertionError("a fixture was started")

@pytest.mark.parametrize("kind", ["disk", pytest.param("redis", marks=pytest.mark.needs("redis-server"))])
def test_tier(kind, request):
    if kind == "redis":
        request.getfixturevalue("started")

@pytest.mark.needs("node")
@pytest.mark.needs("redis-server", "the right to mount")
def test_both(started): ...

@pytest.mark.browser
def test_page(started): ...
"""


@pytest.fixture
def outcome(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.RunResult:
    """Of the cases, with the hooks of `tests/conftest.py`, where no program is installed."""
    pytester.makepyfile(CASES)
    monkeypatch.setenv("PATH", "")
    return pytester.runpytest_inprocess("-q", "-W", "ignore::pytest.PytestUnknownMarkWarning", plugins=[conftest])


@pytest.fixture
def in_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "ALL_PROGRAMS", True)


@pytest.fixture
def at_a_desk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "ALL_PROGRAMS", False)


@pytest.mark.usefixtures("at_a_desk")
def test_what_needs_a_missing_program_is_skipped_before_its_fixtures_and_counted(outcome: pytest.RunResult) -> None:
    outcome.assert_outcomes(passed=1, skipped=3)
    install = "Fix: apt-get install --no-install-recommends"
    assert [line for line in outcome.outlines if " skipped: " in line] == [
        f"1 skipped: needs chromium. {install} chromium",
        f"2 skipped: needs redis-server. {install} redis-server",
    ]


@pytest.mark.usefixtures("in_the_gate")
def test_where_every_program_must_be_there_it_fails(outcome: pytest.RunResult) -> None:
    outcome.assert_outcomes(passed=1, errors=3)
    outcome.stdout.fnmatch_lines(["needs redis-server. Fix: apt-get install --no-install-recommends redis-server"])
    outcome.stdout.no_fnmatch_line("*a fixture was started*")


def test_only_the_cases_of_redis_need_its_server() -> None:
    file, chosen = "tests/embedding/dynamic/test_tiers.py", "comes_back and ADAM and cache"
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-m", "", "-p", "no:cacheprovider", file, "-k", chosen]
    environment = {**os.environ, "PATH": "", "RECSHARD_ALL_PROGRAMS": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert "2 passed, 1 skipped" in done.stdout, done.stdout


def test_the_gate_installs_the_packages_and_lets_no_test_be_skipped() -> None:
    command = [sys.executable, "-S", "-m", "tests.programs"]  # without the packages that pip installed
    printed = subprocess.check_output(command, cwd=ROOT, env={"PATH": ""}, text=True)
    assert printed.split() == sorted(set(programs.PACKAGES.values()))
    gate = (ROOT / ".ci" / "environment").read_text()
    assert "export RECSHARD_ALL_PROGRAMS=1\nmissing=$(python3 -m tests.programs)\n" in gate
