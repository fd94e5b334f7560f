"""Chapters of random cells with faults injected: the same ones on CI, others for `RECSHARD_FUZZ` seconds.

RECSHARD_FUZZ_FROM is the first seed of a long run.
"""

from __future__ import annotations

import os
import time
from collections import Counter

import pytest

from .launcher import play

SECONDS = float(os.environ.get("RECSHARD_FUZZ", "0"))
FROM = int(os.environ.get("RECSHARD_FUZZ_FROM", "1000"))


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(4))
def test_ranks_keep_to_the_model(seed: int) -> None:
    assert sum(play(seed).values()) == 40


@pytest.mark.skipif(SECONDS == 0, reason="RECSHARD_FUZZ is not set: the seconds of a long run")
@pytest.mark.timeout(SECONDS + 600)
def test_ranks_keep_to_the_model_for_long() -> None:
    until, seed = time.monotonic() + SECONDS, FROM
    played: Counter[str] = Counter()
    while time.monotonic() < until:
        played += play(seed)
        seed += 1
    print(f"{sum(played.values())} cells, seeds {FROM} to {seed - 1}: {dict(played)}")
    assert played
