"""Ranks for tests: one fresh world a test, and a check that nothing of it is left."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from recshard_lab.launcher import Ranks, launch


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """Three ranks, more than the cores of a small machine and not a power of two."""
    with launch(3) as world:
        processes = [psutil.Process(pid) for pid in world.pids]
        yield world
    _gone, alive = psutil.wait_procs(processes, timeout=2)
    assert not alive
