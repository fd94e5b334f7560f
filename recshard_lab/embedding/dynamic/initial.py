"""Initial rows as a function of seed, table, id and column.

Neither the order of ids nor the number of ranks affects them. The generator is the finalizer of SplitMix64 (Steele et
al., Fast Splittable Pseudorandom Number Generators, OOPSLA 2014), over the id and the column.

Shape letters: M ids, D columns.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_GOLDEN, _FIRST, _SECOND = (value - (1 << 64) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def stream_of(seed: int, table: str) -> int:
    """A number of 63 bits for a seed and a table's name."""
    digest = hashlib.blake2b(f"{seed}/{table}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _mixed(values: Tensor) -> Tensor:
    """The finalizer of SplitMix64; shifts fill with zeros."""
    values = (values ^ ((values >> 30) & ((1 << 34) - 1))) * _FIRST
    values = (values ^ ((values >> 27) & ((1 << 37) - 1))) * _SECOND
    return values ^ ((values >> 31) & ((1 << 33) - 1))


def uniform(ids: Tensor, stream: int, columns: tuple[int, int]) -> Tensor:
    """``[M, columns]`` fp32 in [0, 1), with 24 random bits.

    Args:
        ids: ``[M]`` int64.
        stream: see `stream_of`.
        columns: first column and the one after the last.

    >>> ids = torch.tensor([5, -1])
    >>> bool((uniform(ids, 3, (0, 4))[:, 2:] == uniform(ids, 3, (2, 4))).all())
    True
    """
    first = _mixed(ids + stream)[:, None]
    at = torch.arange(*columns, device=ids.device, dtype=torch.int64) * _GOLDEN
    bits = _mixed(first + at) & ((1 << 24) - 1)
    return bits.to(torch.float32) * 2.0**-24


def initial_rows(ids: Tensor, stream: int, columns: tuple[int, int], init_range: tuple[float, float]) -> Tensor:
    """``[M, columns]`` fp32 initial rows, uniform in ``init_range``."""
    low, high = init_range
    return uniform(ids, stream, columns).mul_(high - low).add_(low)
