"""TorchRec's names served for one test."""

from collections.abc import Iterator

import pytest

from recshard_lab.compat import torchrec as shim

collect_ignore = ["torchrec_plans.py", "behaviour.py"]  # run in processes that have or serve TorchRec
collect_ignore_glob = [
    "parity/cases/__init__.py",
    "parity/planner_models.py",
    "parity/sharded_tables.py",
    "scripts/[!_]*.py",
]


@pytest.fixture
def served() -> Iterator[None]:
    """``import torchrec`` gives this library's classes while the test runs, also where a TorchRec is installed."""
    shim.install(shadow=True)
    yield
    shim.uninstall()
