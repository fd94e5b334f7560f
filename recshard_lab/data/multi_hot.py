"""Replaces the one id of each feature by a bag of fixed size, as in MLPerf's multi-hot Criteo.

Source: MLPerf Training's ``recommendation_v2``, where a bag is the sample's own id and further ones looked up in a
table of random numbers with one row per id. Here a hash replaces the table, so nothing is stored.

Shape letters: b samples, F features, M ids of a bag.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from recshard_lab import mlperf
from recshard_lab.arguments import checks_arguments
from recshard_lab.data.batch import Batch
from recshard_lab.data.clicks import mixed, uniform
from recshard_lab.sparse import KeyedJaggedTensor

_MOST_ROWS = 1 << 31
_PARETO_SHAPE = 0.25


class MultiHot:
    """A transform of batches with one id a feature into batches with bags; equal ids have equal bags.

    Args:
        sizes: M of each feature; MLPerf's when left out.
        rows: ids of each feature; the first id of a bag is the sample's own, the others are among these.
        distribution: of the others: "uniform", as in MLPerf's data set, or "pareto" (shape 0.25, floored, modulo rows).
        seed: of the others.

    Raises:
        ValueError: lists of unequal length, sizes below 1, another distribution.

    >>> from recshard_lab.data import SyntheticClicks
    >>> wide = MultiHot([1, 3], rows=[50, 60])(SyntheticClicks(8, rows=[50, 60]).batch(range(8)))
    >>> wide.sparse_features.length_per_key()
    [8, 24]
    """

    @checks_arguments
    def __init__(
        self,
        sizes: Sequence[int] = mlperf.MULTI_HOT_SIZES,
        *,
        rows: Sequence[int],
        distribution: str = "uniform",
        seed: int = 0,
    ) -> None:
        if len(sizes) != len(rows):
            raise ValueError(f"sizes has {len(sizes)} entries, rows {len(rows)}. Fix: pass one per feature")
        if not all(0 < size <= 1 << 16 for size in sizes) or not all(0 < own < _MOST_ROWS for own in rows):
            raise ValueError(f"sizes must be from 1 to 65,536 and rows from 1 to 2**31, got {sizes} and {rows}")
        if distribution not in ("uniform", "pareto") or not 0 <= seed < 1 << 62:
            raise ValueError(f"distribution must be 'uniform' or 'pareto', seed from 0, got {distribution!r}, {seed}")
        self.sizes, self.rows, self.distribution, self.seed = list(sizes), list(rows), distribution, seed
        self._lengths = lru_cache(4)(self._lengths_of)

    @checks_arguments
    def __call__(self, batch: Batch) -> Batch:
        """The batch with bags.

        Raises:
            ValueError: another number of features, or a bag that has not exactly one id.
        """
        sparse = batch.sparse_features
        keys, size = sparse.keys(), len(batch.labels)
        if len(keys) != len(self.sizes):
            raise ValueError(f"the batch has {len(keys)} features, sizes and rows are for {len(self.sizes)}")
        ids = sparse.values()
        if len(ids) != len(keys) * size or not bool((sparse.lengths() == 1).all()):
            raise ValueError("every sample must have exactly one id a feature before it gets its bags")
        bags = [self._bags(feature, own) for feature, own in enumerate(ids.view(len(keys), size).numpy())]
        wide = KeyedJaggedTensor(keys, torch.cat(bags), lengths=self._lengths(size), stride=size)
        return replace(batch, sparse_features=wide)

    def _bags(self, feature: int, ids: np.ndarray) -> Tensor:
        """int64 ``[b * M]``: the bags of one feature."""
        width, rows = self.sizes[feature], self.rows[feature]
        bags = np.empty((len(ids), width), np.int64)
        bags[:, 0] = ids
        if width > 1:
            slots = mixed(np.arange(1, width, dtype=np.uint64) + np.uint64((self.seed << 20) + feature * 65_536))
            drawn = uniform(mixed(ids.astype(np.uint64)[:, None] + slots))
            if self.distribution == "uniform":
                bags[:, 1:] = drawn * rows
            else:
                bags[:, 1:] = np.fmod(np.floor((1 - drawn) ** (-1 / _PARETO_SHAPE) - 1), rows)
        return torch.from_numpy(bags).view(-1)

    def _lengths_of(self, size: int) -> Tensor:
        return torch.tensor(self.sizes, dtype=torch.int32).repeat_interleave(size)
