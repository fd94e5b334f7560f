"""The random numbers of a rank: which stream torch, numpy and Python's `random` draw from."""

from __future__ import annotations

import random
from typing import Any

from .errors import LaunchError

__all__ = ["check_seed", "seed_rank"]


def check_seed(call: str, seed: Any) -> None:
    """Raises LaunchError if ``seed=`` of `call` is neither a whole number of at least 0 nor None."""
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
        raise LaunchError(f"{call}(seed={seed!r}): expected a whole number of at least 0, or None. Fix: seed=0.")


def seed_rank(seed: int | None, rank: int) -> None:
    """Seeds torch (CPU and every GPU), numpy's global generator and `random` of this process.

    With None each is seeded by the operating system. Otherwise by a hash of seed and rank, so that no rank of one seed
    has the numbers of a rank of another seed, as with seed + rank. CUDA is not started: torch delays its part.
    """
    import numpy
    import torch

    if seed is None:
        torch.seed()  # after a fork torch and numpy have the parent's generator; `random` seeds itself
        numpy.random.seed()
        random.seed()
        return
    source = random.Random(f"recshard_lab {seed} {rank}")
    torch.manual_seed(source.getrandbits(63))
    numpy.random.seed(source.getrandbits(32))
    random.seed(source.getrandbits(64))
