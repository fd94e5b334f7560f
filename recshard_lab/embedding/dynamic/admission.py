"""Which absent ids get a row.

Shape letters: M distinct absent ids of a batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recshard_lab.embedding.dynamic.config import DynamicEmbeddingConfig
from recshard_lab.embedding.dynamic.index import ScoredIndex

# Initial rows as a function of seed, table, id and column.
#
# Neither the order of ids nor the number of ranks affects them. The generator is the finalizer of SplitMix64 (Steele et
# al., Fast Splittable Pseudorandom Number Generators, OOPSLA 2014), over the id and the column.
#
# Shape letters: M ids, D columns.


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


class Admission:
    """Decides which absent ids get a row, as ``DynamicEmbeddingConfig(admit=)`` requires.

    A number of occurrences counts ids without a row in a separate index, which forgets the rarest ids when it is full.
    Shards of a table count the ids of their partitions, so that counts move with the rows. The draws of a probability
    are a function of seed, table, id and step.

    Args:
        config: of the table, with ``admit``.
        index: of the table or of a shard. Its steps are those of the counts, so that shards agree on them.

    Attributes:
        counts: the occurrences of ids without a row, if decisions depend on them.

    >>> index = ScoredIndex(128)
    >>> admit = Admission(DynamicEmbeddingConfig("user", 4, 128, admit=2), index)
    >>> admit(torch.tensor([7, 8]), torch.tensor([1, 2])).tolist()
    [False, True]
    >>> index.step += 1
    >>> admit(torch.tensor([7]), torch.tensor([1])).tolist()
    [True]
    """

    counts: ScoredIndex | None = None

    def __init__(self, config: DynamicEmbeddingConfig, index: ScoredIndex) -> None:
        self.config, self.index = config, index
        if config.counts_absent_ids:
            self.counts = ScoredIndex(config.max_capacity, evict="lfu", device=index.device, shard=index.shard)

    def __call__(self, ids: Tensor, counts: Tensor) -> Tensor:
        """``[M]`` bool of distinct ids ``[M]`` that occur ``counts [M]`` times in a batch.

        Raises:
            ValueError: a function that fails, or does not return ``[M]`` bool.
        """
        admit, name, step = self.config.admit, self.config.name, self.index.step
        if callable(admit):
            return of_ids(admit, ids, torch.bool, f"table {name!r}: admit(ids)")
        assert admit is not None
        if self.counts is None:
            draw = uniform(ids, stream_of(self.config.seed, f"{name}/admit"), (step, step + 1)).squeeze(1)
            return draw < 1 - (1 - admit) ** counts
        self.counts.step = step - 1
        slots = self.counts.find_or_insert(ids.repeat_interleave(counts)).slots[counts.cumsum(0) - 1]
        admitted = torch.where(slots < 0, counts, self.counts.scores[slots]) >= int(admit)
        self.counts.erase(ids[admitted])
        return admitted


def of_ids(function: Callable[[Tensor], Any], ids: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """What a user's function returns for ids: one value for each.

    Raises:
        ValueError: it fails, or returns something else.
    """
    try:
        found = function(ids)
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"{name} failed on ids {list(ids.shape)}: {error}") from error
    if not isinstance(found, Tensor) or found.dtype != dtype or found.shape != ids.shape:
        what = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(f"{name} must return {dtype} {list(ids.shape)}, got {what}")
    return found
