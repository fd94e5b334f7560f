"""A batch of samples, and the ways to select samples by number.

Shape letters: b samples of one rank, B of the global batch, I dense features, W ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recshard_lab.sparse import KeyedJaggedTensor, Pipelineable, record_stream
from recshard_lab.sparse.trees import register

Samples = range | NDArray[np.int64]
"""Numbers of samples: a range, read at once, or any numbers ``[b]`` in any order."""


@dataclass
class Batch:
    """One rank's share of a global batch: b samples of B.

    Args:
        dense_features: float ``[b, I]``; I may be 0.
        sparse_features: one bag per feature and sample, stride b.
        labels: ``[b]`` of any dtype, 1 for a click. The library's sources give float, `RandomRecDataset` int64.
        global_size: B, the samples of all ranks together; b when left out.
        world_size: W, the ranks that share the global batch.
    """

    dense_features: Tensor
    sparse_features: KeyedJaggedTensor
    labels: Tensor
    global_size: int = -1
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.global_size < 0:
            self.global_size = self.labels.shape[0]  # len() would fix it in an exported program

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same batch on another device."""
        return replace(
            self,
            dense_features=self.dense_features.to(device, non_blocking=non_blocking),
            sparse_features=self.sparse_features.to(torch.device(device), non_blocking=non_blocking),
            labels=self.labels.to(device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: Any) -> None:
        """Prevents reuse of device memory before `stream` has finished with it."""
        record_stream(stream, self.dense_features, self.labels)
        self.sparse_features.record_stream(stream)

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory. Copies from it to a GPU overlap with computation."""
        return replace(
            self,
            dense_features=self.dense_features.pin_memory(),
            sparse_features=self.sparse_features.pin_memory(),
            labels=self.labels.pin_memory(),
        )


Pipelineable.register(Batch)


def _flatten(batch: Batch) -> tuple[list[Any], tuple[int | None, int]]:
    shape: Sequence[Any] = getattr(batch.labels, "shape", ())
    follows = len(shape) > 0 and batch.global_size == shape[0]
    return [batch.dense_features, batch.sparse_features, batch.labels], (
        None if follows else batch.global_size,
        batch.world_size,
    )


def _unflatten(leaves: Iterable[Any], context: tuple[int | None, int]) -> Batch:
    dense, sparse, labels = leaves
    size = context[0]
    if size is None:  # a tree of something other than tensors has no size
        size = labels.shape[0] if isinstance(labels, Tensor) else 0
    return Batch(dense, sparse, labels, size, context[1])


register(Batch, _flatten, _unflatten, lambda _: ("dense_features", "sparse_features", "labels"))


def check_samples(samples: Samples, size: int) -> None:
    """Checks that these are samples of a source with `size` samples.

    >>> check_samples(range(3, 9), 8)
    Traceback (most recent call last):
    ...
    ValueError: samples must lie in [0, 8), got 3 to 8
    """
    if isinstance(samples, range):
        if samples.step != 1:
            raise ValueError(f"a range of samples must have step 1, got {samples!r}. Fix: pass an array of numbers")
        lowest, highest = samples.start, samples.stop - 1
    elif isinstance(samples, np.ndarray) and samples.ndim == 1 and samples.dtype == np.int64:
        lowest, highest = (int(samples.min()), int(samples.max())) if len(samples) else (0, -1)
    else:
        raise ValueError(f"samples must be a range or an int64 array [b], got {type(samples).__name__}")
    if len(samples) and not 0 <= lowest <= highest < size:
        raise ValueError(f"samples must lie in [0, {size}), got {lowest} to {highest}")
