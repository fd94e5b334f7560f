"""Chapters of random cells with faults injected: the same ones at night, others for `RECSHARD_FUZZ` seconds.

RECSHARD_FUZZ_FROM is the first seed of a long run.
"""

from __future__ import annotations

import os
import time
from itertools import count

import pytest

from tests.fuzz.launcher import CELLS, play

SECONDS = float(os.environ.get("RECSHARD_FUZZ", "0"))
FROM = int(os.environ.get("RECSHARD_FUZZ_FROM", "1000"))


@pytest.mark.nightly
@pytest.mark.timeout(SECONDS + 1200)
def test_ranks_keep_to_the_model() -> None:
    until = time.monotonic() + SECONDS
    for seed in count(FROM) if SECONDS else range(4):
        if SECONDS and time.monotonic() > until:
            break
        assert sum(play(seed).values()) == CELLS
        print(f"seed {seed}")
