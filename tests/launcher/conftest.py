"""Ranks for tests: one fresh world a test, and a check that nothing of it is left."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from recshard_lab.launcher import Ranks, launch
from tests.launcher.waiting import left


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """Three ranks, more than the cores of a small machine and not a power of two."""
    with launch(3) as world:
        processes = [psutil.Process(pid) for pid in world.pids]
        yield world
    assert not left(processes)
