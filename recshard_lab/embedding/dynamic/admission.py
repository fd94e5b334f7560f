"""Which absent ids get a row.

Shape letters: M distinct absent ids of a batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Protocol

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


class Admission(Protocol):
    """Decides which absent ids get a row."""

    @property
    def counts(self) -> ScoredIndex | None:
        """The occurrences of ids without a row, if decisions depend on them."""

    def __call__(self, ids: Tensor, counts: Tensor) -> Tensor:
        """``[M]`` bool of distinct ids ``[M]`` that occur ``counts [M]`` times in a batch."""


class FrequentIds:
    """Admits ids that occurred ``threshold`` times.

    The counts of ids without a row are a separate index, which forgets the rarest ids when it is full. Shards of a
    table count the ids of their partitions, so that counts move with the rows.

    Args:
        threshold: occurrences, those of the current batch included.
        capacity: ids of the whole table that are counted at a time.
        shard: as of `ScoredIndex`.
        clock: the index whose steps the counts have, so that shards agree on them. Default: every call is a step.

    >>> admit = FrequentIds(2, 128)
    >>> admit(torch.tensor([7, 8]), torch.tensor([1, 2])).tolist()
    [False, True]
    >>> admit(torch.tensor([7]), torch.tensor([1])).tolist()
    [True]
    """

    def __init__(
        self,
        threshold: int,
        capacity: int,
        device: torch.device | str = "cpu",
        shard: tuple[int, int] | None = None,
        clock: ScoredIndex | None = None,
    ) -> None:
        self.threshold, self.clock = threshold, clock
        self.counts: ScoredIndex = ScoredIndex(capacity, evict="lfu", device=device, shard=shard)

    def __call__(self, ids: Tensor, counts: Tensor) -> Tensor:
        """``[M]`` bool of ids ``[M]`` that occur ``counts [M]`` times in a batch."""
        if self.clock is not None:
            self.counts.step = self.clock.step - 1
        found = self.counts.find_or_insert(ids.repeat_interleave(counts)).slots
        slots = found[counts.cumsum(0) - 1]
        scores = torch.where(slots < 0, counts, self.counts.scores[slots])
        admitted = scores >= self.threshold
        self.counts.erase(ids[admitted])
        return admitted


class RandomIds:
    """Admits each occurrence with a probability. The draws are a function of seed, table, id and step.

    Args:
        probability: above 0, below 1.
        stream: see `stream_of`.
        index: that of the table, whose steps are counted.
    """

    counts = None

    def __init__(self, probability: float, stream: int, index: ScoredIndex) -> None:
        self.probability, self.stream, self.index = probability, stream, index

    def __call__(self, ids: Tensor, counts: Tensor) -> Tensor:
        """``[M]`` bool of ids ``[M]`` that occur ``counts [M]`` times in a batch."""
        step = self.index.step
        draw = uniform(ids, self.stream, (step, step + 1)).squeeze(1)
        return draw < 1 - (1 - self.probability) ** counts


class ChosenIds:
    """Admits the ids for which a function of ids ``[M]`` is True."""

    counts = None

    def __init__(self, function: Callable[[Tensor], Any], table: str) -> None:
        self.function, self.table = function, table

    def __call__(self, ids: Tensor, counts: Tensor) -> Tensor:
        """``[M]`` bool.

        Raises:
            ValueError: the function fails, or does not return ``[M]`` bool.
        """
        return of_ids(self.function, ids, torch.bool, f"table {self.table!r}: admit(ids)")


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


def admission_of(config: DynamicEmbeddingConfig, index: ScoredIndex) -> Admission | None:
    """The admission of a table or of a shard, whose index this is. None admits all."""
    if config.admit is None:
        return None
    if callable(config.admit):
        return ChosenIds(config.admit, config.name)
    if config.admit < 1:
        return RandomIds(config.admit, stream_of(config.seed, f"{config.name}/admit"), index)
    return FrequentIds(int(config.admit), config.max_capacity, index.device, index.shard, index)
