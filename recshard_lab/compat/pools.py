"""TorchRec's object pools: rows of a tensor, or samples of a KeyedJaggedTensor, that are read and written by id.

    id   row of a TensorPool       sample of a KeyedJaggedTensorPool
    0    [0.1, 0.2]                "movie" [7, 8]   "genre" [1]
    1    [0.3, 0.4]                "movie" []       "genre" [2, 3]

`sharded_pools` has their sharded forms.

Shape letters: P pool size, n ids of a call, D columns, F features, L sum of the features' longest bags, N values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from recshard_lab.arguments import device_named
from recshard_lab.compat.refusals import Refusal, refuses
from recshard_lab.sparse import JaggedTensor, KeyedJaggedTensor, gather_segments


class ObjectPool(nn.Module, ABC):
    """Objects by id."""

    @property
    @abstractmethod
    def pool_size(self) -> int:
        """P, the number of ids."""

    @abstractmethod
    def lookup(self, ids: Tensor) -> Any:
        """The objects of ids ``[n]``."""

    @abstractmethod
    def update(self, ids: Tensor, values: Any) -> None:
        """Overwrites the objects of ids ``[n]``. Of an id that occurs several times, the last object stays."""


def check_ids(ids: Tensor, pool_size: int) -> Tensor:
    """Ids as int64.

    Raises:
        ValueError: no integers, or an id outside of the pool.
    """
    if not isinstance(ids, Tensor) or ids.is_floating_point():
        raise ValueError(f"ids must be a tensor of integers, got {ids!r}"[:200])
    outside = ((ids < 0) | (ids >= pool_size)).nonzero()
    if not ids.is_meta and outside.numel():
        wrong = int(ids[tuple(outside[0])])
        raise ValueError(f"id {wrong} is not in the pool, which has ids 0 to {pool_size - 1}")
    return ids.long()


def check_size(name: str, value: Any) -> int:
    """A whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    return value


no_uvm = refuses(enable_uvm=Refusal("unified memory needs a GPU and fbgemm", "leave enable_uvm out"))
"""Refuses unified memory."""


class TensorPool(ObjectPool):
    """Rows ``[P, D]``, zero at first.

    Args:
        pool_size: P.
        dim: D.
        dtype: of the rows.
        device: of the rows; default ``meta``, which stores nothing.
        loaded_values: first rows ``[P, D]``.
        enable_uvm: must be False.

    Raises:
        ValueError: sizes below 1, rows of another shape or dtype, or ids outside of the pool.

    >>> pool = TensorPool(pool_size=4, dim=2, dtype=torch.float32, device=torch.device("cpu"))
    >>> pool.update(torch.tensor([3, 1]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    >>> pool.lookup(torch.tensor([1, 0])).tolist()
    [[3.0, 4.0], [0.0, 0.0]]
    """

    _pool: Tensor

    @no_uvm
    def __init__(
        self,
        pool_size: int,
        dim: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
        loaded_values: Tensor | None = None,
        enable_uvm: bool = False,
    ) -> None:
        super().__init__()
        shape = (check_size("pool_size", pool_size), check_size("dim", dim))
        there = device_named("meta" if device is None else device)
        self.register_buffer("_pool", torch.zeros(shape, dtype=dtype, device=there))
        if loaded_values is not None:
            if loaded_values.shape != shape:
                raise ValueError(f"loaded_values must be {list(shape)}, got {list(loaded_values.shape)}")
            self._pool = loaded_values.to(there, dtype)

    @property
    def pool_size(self) -> int:
        """P, the number of rows."""
        return self._pool.shape[0]

    @property
    def dim(self) -> int:
        """D, the columns of a row."""
        return self._pool.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Of the rows."""
        return self._pool.dtype

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self._pool.device

    def lookup(self, ids: Tensor) -> Tensor:
        """Rows ``[n, D]`` of ids ``[n]``."""
        return self._pool[check_ids(ids, self.pool_size)]

    def forward(self, ids: Tensor) -> Tensor:
        """As `lookup`."""
        return self.lookup(ids)

    def update(self, ids: Tensor, values: Tensor) -> None:
        """Overwrites the rows of ids ``[n]`` with values ``[n, D]``. Of an id that occurs twice, the last row stays."""
        ids = check_ids(ids, self.pool_size)
        self._pool[ids] = check_rows(values, ids, self.dim, self.dtype)


def check_rows(values: Tensor, ids: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Rows ``[n, D]`` for ids ``[n]``.

    Raises:
        ValueError: another shape or dtype.
    """
    expected = (ids.shape[0], dim)
    if values.shape != expected or values.dtype != dtype:
        raise ValueError(
            f"values must be {list(expected)} of {dtype}, got {list(values.shape)} of {values.dtype}: pass one row for "
            f"each id"
        )
    return values


class PaddedSamples:
    """Samples of a KeyedJaggedTensor as rows of one width, and back.

    Args:
        longest: feature -> the most values that a sample has of it.

    Attributes:
        keys: the features in order.
        width: L, columns of a row: all features' values one after the other, then zeros.
    """

    def __init__(self, longest: Mapping[str, int]) -> None:
        if not longest:
            raise ValueError("feature_max_lengths is empty. Fix: pass {feature: length of its longest bag}")
        self.longest = {key: check_size(f"feature_max_lengths of {key!r}", size) for key, size in longest.items()}
        self.keys, self.width = list(longest), sum(longest.values())

    def add_buffers(
        self, pool: nn.Module, size: int, dtype: torch.dtype, is_weighted: bool, device: torch.device
    ) -> None:
        """Registers ``values``, ``key_lengths`` and ``weights`` of `size` samples with a pool."""
        pool.register_buffer("values", torch.zeros(size, self.width, dtype=dtype, device=device))
        pool.register_buffer("key_lengths", torch.zeros(size, len(self.keys), dtype=torch.int32, device=device))
        pool.register_buffer("weights", torch.zeros(size, self.width, device=device) if is_weighted else None)

    def rows(self, kjt: KeyedJaggedTensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Values ``[n, L]``, lengths ``[n, F]`` int32, and weights ``[n, L]`` or None.

        Raises:
            ValueError: a feature is missing, or a bag is longer than its feature's longest.
        """
        index = kjt.index_per_key()
        missing = [key for key in self.keys if key not in index]
        if missing:
            raise ValueError(f"features {missing} of the pool are not in the batch, which has {kjt.keys()}")
        kjt = kjt.permute([index[key] for key in self.keys])
        lengths = kjt.lengths().reshape(len(self.keys), -1).T
        limits = torch.tensor(list(self.longest.values()), device=lengths.device)
        if not lengths.is_meta and bool((lengths > limits).any()):
            sample, feature = (lengths > limits).nonzero()[0].tolist()
            key = self.keys[feature]
            raise ValueError(
                f"feature {key!r} has {int(lengths[sample, feature])} values in sample {sample}, the pool keeps at "
                f"most {self.longest[key]}. Fix: build it with a larger feature_max_lengths"
            )
        by_sample = torch.arange(lengths.numel(), device=lengths.device).reshape(len(self.keys), -1).T.reshape(-1)
        values, _, weights = gather_segments(kjt.values(), kjt.lengths().reshape(-1), by_sample, kjt.weights_or_none())
        bags = JaggedTensor(values, weights, lengths.sum(1))
        return bags.to_padded_dense(self.width), lengths.int(), bags.to_padded_dense_weights(self.width)

    def batch(self, values: Tensor, lengths: Tensor, weights: Tensor | None) -> KeyedJaggedTensor:
        """The samples whose rows are values ``[n, L]``, lengths ``[n, F]`` and weights ``[n, L]``."""
        used = torch.arange(self.width, device=values.device) < lengths.sum(1, keepdim=True)
        by_key = torch.arange(lengths.numel(), device=values.device).reshape(-1, len(self.keys)).T.reshape(-1)
        flat, counts, flat_weights = gather_segments(
            values[used], lengths.reshape(-1), by_key, None if weights is None else weights[used]
        )
        return KeyedJaggedTensor(self.keys, flat, flat_weights, counts, stride=lengths.shape[0])


class KeyedJaggedTensorPool(ObjectPool):
    """Samples of a KeyedJaggedTensor, with empty bags at first. A sample is stored as one padded row.

    Args:
        pool_size: P.
        feature_max_lengths: feature -> the most values that a sample has of it.
        values_dtype: of the values.
        is_weighted: whether values have weights (float32).
        device: of the rows; default ``meta``, which stores nothing.
        enable_uvm: must be False.

    Raises:
        ValueError: sizes below 1, a batch with other features, longer bags or another number of samples, or ids outside
            of the pool.

    >>> pool = KeyedJaggedTensorPool(3, {"movie": 2}, device=torch.device("cpu"))
    >>> batch = KeyedJaggedTensor(["movie"], torch.tensor([7, 8, 9]), lengths=torch.tensor([2, 1]))
    >>> pool.update(torch.tensor([2, 0]), batch)
    >>> pool.lookup(torch.tensor([0, 1, 2]))
    KeyedJaggedTensor(1 feature x 3 samples, 3 ids, int64)
      movie  [9] [] [7 8]
    """

    values: Tensor
    key_lengths: Tensor
    weights: Tensor | None

    @no_uvm
    def __init__(
        self,
        pool_size: int,
        feature_max_lengths: dict[str, int],
        values_dtype: torch.dtype = torch.int64,
        is_weighted: bool = False,
        device: torch.device | None = None,
        enable_uvm: bool = False,
    ) -> None:
        super().__init__()
        self._samples = PaddedSamples(feature_max_lengths)
        there = device_named("meta" if device is None else device)
        self._samples.add_buffers(self, check_size("pool_size", pool_size), values_dtype, is_weighted, there)

    @property
    def pool_size(self) -> int:
        """P, the number of samples."""
        return self.values.shape[0]

    @property
    def feature_max_lengths(self) -> dict[str, int]:
        """Feature -> the most values that a sample has of it."""
        return self._samples.longest

    @property
    def values_dtype(self) -> torch.dtype:
        """Of the values."""
        return self.values.dtype

    @property
    def is_weighted(self) -> bool:
        """Whether values have weights."""
        return self.weights is not None

    def lookup(self, ids: Tensor) -> KeyedJaggedTensor:
        """The samples of ids ``[n]``: a batch of stride n with int32 lengths."""
        ids = check_ids(ids, self.pool_size)
        return self._samples.batch(*(None if part is None else part[ids] for part in self._parts()))  # type: ignore[arg-type]

    def forward(self, ids: Tensor) -> KeyedJaggedTensor:
        """As `lookup`."""
        return self.lookup(ids)

    def update(self, ids: Tensor, values: KeyedJaggedTensor) -> None:
        """Overwrites the samples of ids ``[n]`` with those of a batch of stride n. Other features are not read."""
        ids = check_ids(ids, self.pool_size)
        for part, rows in zip(self._parts(), check_samples(self._samples, ids, values, self.weights), strict=True):
            if part is not None and rows is not None:
                part[ids] = rows.to(part.dtype)

    def _parts(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.values, self.key_lengths, self.weights


def check_samples(
    samples: PaddedSamples, ids: Tensor, kjt: KeyedJaggedTensor, weights: Tensor | None
) -> Sequence[Tensor | None]:
    """Rows of a batch for ids ``[n]``; see `PaddedSamples.rows`.

    Raises:
        ValueError: another number of samples, or weights in only one of pool and batch.
    """
    if kjt.stride() != ids.shape[0]:
        raise ValueError(f"the batch has {kjt.stride()} samples for {ids.shape[0]} ids: pass one sample for each id")
    if weights is not None and kjt.weights_or_none() is None:
        raise ValueError("the pool has is_weighted=True, and the batch has no weights. Fix: pass weights")
    values, lengths, own = samples.rows(kjt)
    return values, lengths, own if weights is not None else None
