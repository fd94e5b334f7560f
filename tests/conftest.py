"""What every test shares: hypothesis without a clock, one thread, the real ratings where there are any."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from recshard_lab.data import MovieLens, RatingsDataset
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
