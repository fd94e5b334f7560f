"""Ratings as samples of a model: one label, and a bag of ids per feature, in batches by rank.

Shape letters: n samples, B samples of one global batch, F features, I dense features, W ranks.

A *global batch* is what all ranks train on in one step. Rank r gets a contiguous share of it, so that W ranks
together get the samples of one process, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from recshard_lab.arguments import checks_arguments, names_wrong_arguments
from recshard_lab.data.batch import Batch, Samples, check_samples
from recshard_lab.sparse import JaggedTensor, KeyedJaggedTensor, gather_segments

Column = Tensor | JaggedTensor
"""The ids of one feature: a tensor [n] where every sample has exactly one, else one bag per sample."""


def rank_slice(size: int, rank: int, world_size: int) -> tuple[int, int]:
    """Begin and end of a rank's share of `size` samples: as even as possible, with longer shares first.

    >>> [rank_slice(10, rank, 4) for rank in range(4)]
    [(0, 3), (3, 6), (6, 8), (8, 10)]
    """
    each, left = divmod(size, world_size)
    begin = rank * each + min(rank, left)
    return begin, begin + each + (rank < left)


class RatingsDataset:
    """Samples of (features, click), with the splits and batches that training needs.

    Args:
        columns: the ids of each feature: an integer tensor ``[n]``, one id a sample, or a `JaggedTensor` of
            n bags.
        features: how many ids each feature has (`num_embeddings` of its table); same keys as `columns`.
        label: ``[n]``, 0 or 1.
        source: names the data in figures.
        origin: the place of the data: a path, the cache, the network, or a generator with the reason.
        timestamps: int64 ``[n]``, needed for the split by time.
        dense: float ``[n, I]``; no dense features when left out.
        names: the meaning of the ids of a feature, e.g. the movies' titles.

    Raises:
        ValueError: columns of unequal length, ids outside their feature, labels other than 0 and 1.

    >>> data = RatingsDataset({"user": torch.tensor([0, 1, 0])}, {"user": 2}, torch.tensor([1., 0., 1.]),
    ...                       source="three ratings by hand")
    >>> data
    RatingsDataset(three ratings by hand; 3 samples, 66.7% clicks; user: 2)
    >>> [batch.sparse_features.values().tolist() for batch in data.batches(2)]
    [[0, 1], [0]]
    """

    def __init__(
        self,
        columns: Mapping[str, Column],
        features: Mapping[str, int],
        label: Tensor,
        *,
        source: str,
        origin: str = "",
        timestamps: Tensor | None = None,
        dense: Tensor | None = None,
        names: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        self.columns = dict(columns)
        self.features = dict(features)
        self.label = label.float()
        self.source = source
        self.origin = origin
        self.timestamps = timestamps
        self.dense = torch.zeros(len(label), 0) if dense is None else dense.float()
        self.names = dict(names or {})
        self._check()

    def _check(self) -> None:
        if not self.features or set(self.columns) != set(self.features):
            raise ValueError(
                f"columns {sorted(self.columns)} and features {sorted(self.features)} must have the same names"
            )
        sized = {name: len(_lengths(column)) for name, column in self.columns.items()}
        sized["dense"] = len(self.dense)
        if self.timestamps is not None:
            sized["timestamps"] = len(self.timestamps)
        for name, size in sized.items():
            if size != len(self.label):
                raise ValueError(f"{name} has {size} samples, label has {len(self.label)}")
        for name, column in self.columns.items():
            ids = _ids(column)
            if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.features[name]:
                raise ValueError(
                    f"feature {name!r}: ids must lie in [0, {self.features[name]}), "
                    f"got {int(ids.min())} to {int(ids.max())}"
                )
        if not bool(((self.label == 0) | (self.label == 1)).all()):
            raise ValueError("labels must be 0 or 1")

    def __len__(self) -> int:
        return len(self.label)

    def __repr__(self) -> str:
        clicks = 100 * float(self.label.mean()) if len(self) else 0.0
        sizes = ", ".join(f"{name}: {count:,}" for name, count in self.features.items())
        return f"RatingsDataset({self.source}; {len(self):,} samples, {clicks:.1f}% clicks; {sizes})"

    @property
    def feature_names(self) -> list[str]:
        """The features in the order in which batches hold them."""
        return list(self.columns)

    @property
    def num_dense_features(self) -> int:
        """I, the width of a batch's dense features; 0 for MovieLens."""
        return self.dense.shape[1]

    @checks_arguments
    def select(self, samples: Tensor) -> RatingsDataset:
        """The samples at these positions, in this order.

        Args:
            samples: integers ``[m]``.

        Raises:
            ValueError: another shape or dtype, or positions that do not exist.
        """
        if samples.dim() != 1 or samples.is_floating_point() or samples.dtype == torch.bool or samples.is_meta:
            raise ValueError(
                f"samples must be positions, integers [m], got {samples.dtype} {list(samples.shape)} on "
                f"{samples.device}"
            )
        if samples.numel() and not 0 <= int(samples.min()) <= int(samples.max()) < len(self):
            raise ValueError(f"samples must lie in [0, {len(self)}), got {samples.min()} to {samples.max()}")
        return RatingsDataset(
            {name: _take(column, samples) for name, column in self.columns.items()},
            self.features,
            self.label[samples],
            source=self.source,
            origin=self.origin,
            timestamps=None if self.timestamps is None else self.timestamps[samples],
            dense=self.dense[samples],
            names=self.names,
        )

    @names_wrong_arguments
    def split(
        self, by: str = "random", test_fraction: float = 0.2, seed: int = 0
    ) -> tuple[RatingsDataset, RatingsDataset]:
        """(train, test): a seeded random draw, or the latest ratings as the test set.

        Args:
            by: "random" or "time".
            test_fraction: share of the samples in the test set.
            seed: of the random draw; the split by time draws nothing.

        Raises:
            ValueError: another `by`, a fraction outside (0, 1), or no timestamps to split by.
        """
        if not 0.0 < test_fraction < 1.0:
            raise ValueError(f"test_fraction must be between 0 and 1, got {test_fraction}")
        if by == "random":
            order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        elif by == "time":
            if self.timestamps is None:
                raise ValueError("this dataset has no timestamps. Fix: split by 'random'")
            order = torch.argsort(self.timestamps, stable=True)
        else:
            raise ValueError(f"split by 'random' or 'time', got {by!r}")
        train = len(self) - round(len(self) * test_fraction)
        return self.select(order[:train]), self.select(order[train:])

    def batch(self, samples: Samples) -> Batch:
        """These samples, in this order, as one batch. A `BatchLoader` calls it."""
        check_samples(samples, len(self))
        numbers = torch.arange(samples.start, samples.stop) if isinstance(samples, range) else torch.from_numpy(samples)
        columns = [_take(column, numbers) for column in self.columns.values()]
        sparse = KeyedJaggedTensor(
            keys=self.feature_names,
            values=torch.cat([_ids(column) for column in columns]),
            lengths=torch.cat([_lengths(column) for column in columns]),
            stride=len(numbers),
        )
        return Batch(self.dense[numbers], sparse, self.label[numbers])

    @checks_arguments
    def num_batches(self, batch_size: int, drop_last: bool = False) -> int:
        """How many global batches (steps) one pass takes.

        Raises:
            ValueError: a batch size below 1.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        return len(self) // batch_size if drop_last else -(-len(self) // batch_size)

    @checks_arguments
    def batches(
        self,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
    ) -> Iterator[Batch]:
        """One pass over the samples, as the shares of one rank.

        Every rank gets the same number of batches, because the ranks of a sharded model step together. The shares of
        one step, in the order of ranks, are the batch of ``world_size=1``.

        Args:
            batch_size: B, samples of a *global* batch, shared by all ranks.
            rank, world_size: the contiguous share of each batch to return.
            shuffle: visit the samples in an order drawn from `seed`.
            drop_last: leave out a last batch of fewer than B samples. It is kept otherwise, and split as evenly
                as can be: a rank may get an empty batch.

        Raises:
            ValueError: a batch size below 1 or a rank outside the world.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must lie in [0, {world_size}), got {rank}")
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed)) if shuffle else None
        return self._pieces(order, batch_size, rank, world_size, self.num_batches(batch_size, drop_last))

    def _pieces(self, order: Tensor | None, batch_size: int, rank: int, world_size: int, steps: int) -> Iterator[Batch]:
        """Gathers this rank's samples once, so that every batch is a slice of each column."""
        sizes = [min(batch_size, len(self) - step * batch_size) for step in range(steps)]
        slices = [rank_slice(size, rank, world_size) for size in sizes]
        mine = torch.cat(
            [
                torch.arange(step * batch_size + begin, step * batch_size + end)
                for step, (begin, end) in enumerate(slices)
            ]
            or [torch.arange(0)]
        )
        samples = mine if order is None else order[mine]
        label, dense = self.label[samples], self.dense[samples]
        columns = [_take(column, samples) for column in self.columns.values()]
        ends = torch.tensor([end - begin for begin, end in slices], dtype=torch.int64).cumsum(0).tolist()
        cuts = [_cuts(column, [0, *ends]) for column in columns]
        lengths = [_lengths(column) for column in columns]
        for step, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
            values = [_ids(column)[cut[step] : cut[step + 1]] for column, cut in zip(columns, cuts, strict=True)]
            sparse = KeyedJaggedTensor(
                keys=self.feature_names,
                values=torch.cat(values),
                lengths=torch.cat([length[begin:end] for length in lengths]),
                stride=end - begin,
            )
            yield Batch(dense[begin:end], sparse, label[begin:end], sizes[step], world_size)


def _ids(column: Column) -> Tensor:
    return column if isinstance(column, Tensor) else column.values()


def _lengths(column: Column) -> Tensor:
    if isinstance(column, Tensor):
        return torch.ones(len(column), dtype=torch.int32)
    return column.lengths()


def _take(column: Column, samples: Tensor) -> Column:
    """The bags at these positions, in this order."""
    if isinstance(column, Tensor):
        return column[samples]
    values, lengths, _ = gather_segments(column.values(), column.lengths(), samples)
    return JaggedTensor(values, lengths=lengths)


def _cuts(column: Column, bounds: list[int]) -> list[int]:
    """Where the bags at `bounds` begin among the ids."""
    if isinstance(column, Tensor):
        return bounds
    picked: list[int] = column.offsets()[torch.tensor(bounds)].tolist()
    return picked
