"""The cache of a table under TorchRec's names: parameters, and statistics that predict its misses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

from recshard_lab.compat.refusals import Refusal, refuses
from recshard_lab.sharding import CacheParams as OurCacheParams
from recshard_lab.sharding import PlanError

_NO_SETTING = Refusal("the cache does not have this setting", "omit it", (None,))


class CacheStatistics(ABC):
    """Predicts the cache misses of a table."""

    @property
    @abstractmethod
    def expected_lookups(self) -> float:
        """Distinct ids in a global batch."""

    @abstractmethod
    def expected_miss_rate(self, clf: float) -> float:
        """Misses / lookups if the share `clf` of the rows is cached."""

    @property
    @abstractmethod
    def cacheability(self) -> float:
        """Mean miss rate over all cache sizes: less is easier to cache."""


@dataclass(frozen=True, init=False)
class _Settings(OurCacheParams):
    """The fields that TorchRec adds. Frozen, because a subclass of a frozen dataclass must be."""

    prefetch_pipeline: bool | None = None
    stats: CacheStatistics | None = None


class CacheParams(_Settings):
    """This library's `CacheParams` with TorchRec's arguments in its order. Its fields can be assigned.

    Args:
        algorithm: "lru", "lfu" or fbgemm's ``CacheAlgorithm``. Default: "lru".
        load_factor: cached share of the rows. Default: 0.2.
        reserved_memory, precision, multipass_prefetch_config: None. The cache does not have these settings.
        prefetch_pipeline: whether estimates read rows at the bandwidth of device memory.
        stats: predicts misses for estimates.

    Raises:
        PlanError: a setting that the cache does not have, or as `recshard_lab.sharding.CacheParams`.

    >>> params = CacheParams(prefetch_pipeline=True)
    >>> params.load_factor = 0.5
    >>> params.rows(100)
    50
    """

    reserved_memory: ClassVar[None] = None
    precision: ClassVar[None] = None
    multipass_prefetch_config: ClassVar[None] = None

    @refuses(PlanError, reserved_memory=_NO_SETTING, precision=_NO_SETTING, multipass_prefetch_config=_NO_SETTING)
    def __init__(
        self,
        algorithm: Any = None,
        load_factor: float | None = None,
        reserved_memory: float | None = None,
        precision: Any = None,
        prefetch_pipeline: bool | None = None,
        stats: CacheStatistics | None = None,
        multipass_prefetch_config: Any = None,
        *,
        cost: Any = None,
    ) -> None:
        super().__init__("lru" if algorithm is None else algorithm, 0.2 if load_factor is None else load_factor, cost)
        object.__setattr__(self, "prefetch_pipeline", prefetch_pipeline)
        object.__setattr__(self, "stats", stats)

    def __setattr__(self, name: str, value: Any) -> None:
        """Assigns a field. A value that the constructor refuses raises the same error."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)} | {name: value}
        object.__setattr__(self, name, getattr(CacheParams(**values), name))

    def __hash__(self) -> int:
        return hash((self.algorithm, self.load_factor, self.prefetch_pipeline))


class EmbeddingOffloadStats(CacheStatistics):
    """Cache statistics from a histogram of a miss-ratio curve.

    Args:
        cacheability: the area under the curve.
        expected_lookups: distinct ids in a global batch.
        mrc_hist_counts: ``[n]`` lookups that hit only if at least this n-th of the rows is cached.
        height: rows of the table.

    >>> stats = EmbeddingOffloadStats(0.3, 1000, torch.tensor([5.0, 3.0, 2.0, 0.0]), 1001)
    >>> round(stats.expected_miss_rate(0.5), 3)
    0.2
    """

    def __init__(self, cacheability: float, expected_lookups: int, mrc_hist_counts: torch.Tensor, height: int) -> None:
        if mrc_hist_counts.dim() != 1:
            raise ValueError(
                f"mrc_hist_counts must have one dimension, got shape {list(mrc_hist_counts.shape)}. Fix: flatten it"
            )
        self._cacheability, self._expected_lookups, self.height = cacheability, expected_lookups, height
        self.hist = mrc_hist_counts.float()
        self.bins = torch.linspace(0, height, len(self.hist) + 1)

    @property
    def expected_lookups(self) -> int:
        """Distinct ids in a global batch."""
        return self._expected_lookups

    @property
    def cacheability(self) -> float:
        """The area under the miss-ratio curve."""
        return self._cacheability

    def expected_miss_rate(self, clf: float) -> float:
        """Misses / lookups if the share `clf` of the rows is cached."""
        rate = self.estimate_cache_miss_rate(torch.tensor([clf * self.height]), self.hist, self.bins)
        return float(rate[0])

    @staticmethod
    def estimate_cache_miss_rate(cache_sizes: torch.Tensor, hist: torch.Tensor, bins: torch.Tensor) -> torch.Tensor:
        """Miss rates ``[m]`` of caches of several sizes.

        Args:
            cache_sizes: ``[m]`` rows. hist: ``[n]`` lookups per bin. bins: ``[n + 1]`` ends of the bins, in rows.

        A cache holds the bins whose lower end is below its size.
        """
        hits = torch.cat([torch.zeros(1), hist.cumsum(0)]) / hist.sum()
        held = torch.bucketize(cache_sizes, bins, right=False).clamp(max=len(hist))
        return 1 - hits[held]
