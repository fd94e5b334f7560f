"""Batches of random ids, for runs whose result does not matter. Arguments and numbers are TorchRec's.

Shape letters: B batch, F features, I dense features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, islice

import torch
from torch.utils.data import IterableDataset

from recshard_lab.data.batch import Batch
from recshard_lab.sparse import KeyedJaggedTensor


class RandomRecDataset(IterableDataset[Batch]):
    """Batches of random ids, dense features and labels. A seed gives the numbers of TorchRec's class.

    Ids are uniform, int64, with int32 lengths. Dense features are standard normal. Labels are 0 or 1, int64.

    Args:
        keys: the F features.
        batch_size: B.
        hash_size: ids are drawn from ``[0, hash_size)``, for every feature. Default: 100.
        hash_sizes: the same, one per feature.
        ids_per_feature: most ids of a sample, for every feature. Default: 2.
        ids_per_features: the same, one per feature.
        num_dense: I.
        manual_seed: the same seed gives the same batches. Default: torch's global generator.
        num_batches: number of batches in one iteration. Default: infinite.
        num_generated_batches: number of different batches, drawn in advance and repeated. Numbers below 1 draw each
            batch anew.
        min_ids_per_feature: fewest ids of a sample. Lengths are uniform from this to the most. Default:
            `ids_per_feature` if you pass it, otherwise 0.
        min_ids_per_features: the same, one per feature.

    Raises:
        ValueError: a list whose length is not F, both forms of one argument, or a size out of range.

    >>> batch = next(iter(RandomRecDataset(["f", "g"], batch_size=3, ids_per_feature=2, manual_seed=0)))
    >>> batch.dense_features.shape, batch.sparse_features.lengths().tolist()
    (torch.Size([3, 50]), [2, 2, 2, 2, 2, 2])
    """

    def __init__(
        self,
        keys: Sequence[str],
        batch_size: int,
        hash_size: int | None = None,
        hash_sizes: Sequence[int] | None = None,
        ids_per_feature: int | None = None,
        ids_per_features: Sequence[int] | None = None,
        num_dense: int = 50,
        manual_seed: int | None = None,
        num_batches: int | None = None,
        num_generated_batches: int = 10,
        min_ids_per_feature: int | None = None,
        min_ids_per_features: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.keys, self.batch_size, self.num_dense = list(keys), batch_size, num_dense
        sizes = {"batch_size": (batch_size, 1), "num_dense": (num_dense, 0), "num_batches": (num_batches, 0)}
        for name, (value, least) in sizes.items():
            if value is not None and (not isinstance(value, int) or value < least):
                raise ValueError(f"{name} must be an integer from {least}, got {value!r}")
        self.hash_sizes = self._per_key("hash_size", hash_size, hash_sizes, 100, 1)
        self.most = self._per_key("ids_per_feature", ids_per_feature, ids_per_features, 2, 0)
        least = ids_per_feature or 0
        self.least = self._per_key("min_ids_per_feature", min_ids_per_feature, min_ids_per_features, least, 0)
        for key, low, high in zip(self.keys, self.least, self.most, strict=True):
            if low > high:
                raise ValueError(
                    f"feature {key!r}: min_ids_per_feature {low} is more than ids_per_feature {high}. "
                    f"Fix: min_ids_per_feature={high}"
                )
        self.num_batches = num_batches
        self.generator = None if manual_seed is None else torch.Generator().manual_seed(manual_seed)
        self.ahead = [self._draw() for _ in range(max(0, num_generated_batches))]

    def _per_key(self, name: str, one: int | None, each: Sequence[int] | None, default: int, least: int) -> list[int]:
        if one is not None and each is not None:
            raise ValueError(f"{name}={one} and {name}s={list(each)} exclude each other. Fix: pass one of them")
        values = list(each) if each is not None else [default if one is None else one] * len(self.keys)
        if len(values) != len(self.keys):
            raise ValueError(f"{name}s has {len(values)} entries for {len(self.keys)} keys. Fix: pass one per key")
        for key, value in zip(self.keys, values, strict=True):
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} of {key!r} must be an integer from {least}, got {value!r}")
        return values

    def _draw(self) -> Batch:
        lengths, ids = [], []
        for rows, low, high in zip(self.hash_sizes, self.least, self.most, strict=True):
            bags = torch.randint(low, high + 1, (self.batch_size,), dtype=torch.int32, generator=self.generator)
            lengths.append(bags)
            ids.append(torch.randint(rows, (int(bags.sum()),), generator=self.generator))
        return Batch(
            dense_features=torch.randn(self.batch_size, self.num_dense, generator=self.generator),
            sparse_features=KeyedJaggedTensor(self.keys, torch.cat(ids), lengths=torch.cat(lengths)),
            labels=torch.randint(2, (self.batch_size,), generator=self.generator),
        )

    def __iter__(self) -> Iterator[Batch]:
        endless = (self.ahead[number % len(self.ahead)] if self.ahead else self._draw() for number in count())
        return islice(endless, self.num_batches)

    def __len__(self) -> int:
        """Batches of one iteration.

        Raises:
            TypeError: `num_batches` is None.
        """
        if self.num_batches is None:
            raise TypeError("the number of batches is infinite. Fix: pass num_batches")
        return self.num_batches
