"""What every test shares: its tier, hypothesis without a clock, one thread, programs, the real ratings if any."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from recshard_lab.data import MovieLens, RatingsDataset
from tests import durations, programs
from tests.grid import NIGHT, examples
from tests.patience import scaled

# the same examples in every run: the same code has the same verdict. At night more of them, drawn anew
settings.register_profile(
    "recshard",
    deadline=None,
    max_examples=examples(20, 200),
    derandomize=not NIGHT,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("recshard")
torch.set_num_threads(1)  # as on a rank

LIMIT_S = 300
_RATINGS = os.environ.get("RECSHARD_MOVIELENS")  # read before any test changes the environment


# rooms whose faults explain those of others come first; what starts kernels and browsers comes last
FIRST = ("sparse", "comm", "sharding", "embedding", "planner", "distributed")
LAST = ("notebooks", "browser")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Orders the rooms, and marks: clocks are nightly, browsers in the gate, limits against hangs scaled."""

    def place(item: pytest.Item) -> int:
        room = item.path.relative_to(item.config.rootpath).parts[:2][-1]
        return FIRST.index(room) if room in FIRST else len(FIRST) + (1 + LAST.index(room) if room in LAST else 0)

    items.sort(key=place)
    for item in items:
        if item.get_closest_marker("clock"):
            item.add_marker(pytest.mark.nightly)
        if item.get_closest_marker("browser"):
            item.add_marker(pytest.mark.gate)
        limit = item.get_closest_marker("timeout")
        item.add_marker(pytest.mark.timeout(scaled(limit.args[0] if limit else LIMIT_S)), append=False)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test that lacks a program or a right, before its fixtures start. Where all must be there, it fails."""
    needs = [need for marker in item.iter_markers("needs") for need in marker.args]
    if item.get_closest_marker("browser"):
        needs.append("chromium")
    if reason := programs.missing(needs):
        if programs.ALL_PROGRAMS:
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Counts the skipped tests by what they need. Records durations if they are wanted."""
    durations.at_the_end(terminalreporter.stats)
    reports = terminalreporter.stats.get("skipped", [])
    lines = programs.summary(report.longrepr[2].removeprefix("Skipped: ") for report in reports)
    if lines:
        terminalreporter.section("skipped tests")
        terminalreporter.write_line("\n".join(lines))


@pytest.fixture(scope="session")
def movielens_path() -> Path:
    """Where the real MovieLens 100K is; skips where nobody said."""
    if not _RATINGS:
        pytest.skip("RECSHARD_MOVIELENS is not set: no real ratings to test on")
    return Path(_RATINGS)


@pytest.fixture(scope="session")
def movielens(movielens_path: Path) -> RatingsDataset:
    """The real MovieLens 100K ratings."""
    return MovieLens.load(movielens_path, "100k")
