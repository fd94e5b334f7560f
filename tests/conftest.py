"""What every test shares: hypothesis without a clock, one thread, the programs it needs, the real ratings if any."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from recshard_lab.data import MovieLens, RatingsDataset
from tests import programs
from tests.alone import is_alone
from tests.sweep import SWEEP

# examples are drawn anew at a desk and repeat on CI, where a failure must be reproducible by the log alone
settings.register_profile(
    "recshard",
    deadline=None,
    derandomize="CI" in os.environ,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("recshard")
torch.set_num_threads(1)  # as on a rank

_RATINGS = os.environ.get("RECSHARD_MOVIELENS")  # read before any test changes the environment


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what needs the machine for itself; leaves to the whole sweep what only the sweep runs."""
    for item in items:
        if is_alone(item.path):
            item.add_marker(pytest.mark.alone)
    if not SWEEP and (left_out := [item for item in items if item.get_closest_marker("sweep")]):
        items[:] = [item for item in items if not item.get_closest_marker("sweep")]
        config.hook.pytest_deselected(items=left_out)


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
    """Counts the skipped tests by what they need."""
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
