"""The same bags arranged in another way: features split off, reordered, on another device.

Inverse indices name their features, so they stay with every part.

Shape letters: F features (keys), B samples (stride), B_f bags of feature f, N values.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor

from recshard_lab.sparse import checks
from recshard_lab.sparse.keyed_storage import KeyedStorage
from recshard_lab.sparse.storage import Device, moved, pinned


class KeyedArrangement(KeyedStorage):
    """Split, permute and move the features of a batch. Abstract: use KeyedJaggedTensor."""

    def split(self, segments: list[int]) -> list[Self]:
        """Consecutive groups of features, as views.

        Args:
            segments: number of features in each group; they sum to F.

        >>> from recshard_lab import KeyedJaggedTensor
        >>> kjt = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
        >>> [part.keys() for part in kjt.split([1, 0, 1])]
        [['a'], [], ['b']]
        """
        segments = checks.check_list("segments", segments)
        for segment in segments:
            checks.check_count("each of segments", segment)
        if sum(segments) != len(self._keys):
            raise ValueError(
                f"segments {segments} sum to {sum(segments)}, but there are {len(self._keys)} keys: "
                f"every key belongs to one segment"
            )
        ends = list(accumulate(segments))
        return [self._slice(end - segment, end) for segment, end in zip(segments, ends, strict=True)]

    def _slice(self, start: int, end: int) -> Self:
        offsets, bags = self.offset_per_key(), self.lengths_offset_per_key()
        lower, upper = offsets[start], offsets[end]
        return type(self)._unchecked(
            self._keys[start:end],
            self._values[lower:upper],
            None if self._weights is None else self._weights[lower:upper],
            self.lengths().reshape(-1)[bags[start] : bags[end]],
            None,
            self.stride(),
            self.length_per_key()[start:end],
            None if self._strides is None else self._strides[start:end],
            self._inverse,
            self._inverse_keys,
        )

    def permute(self, indices: list[int], indices_tensor: Tensor | None = None) -> Self:
        """Features in another order; repeats and omissions are fine.

        Args:
            indices: positions of the features to keep.
            indices_tensor: the same as a tensor on this device. If you pass it, no copy to a GPU is needed.

        >>> from recshard_lab import KeyedJaggedTensor
        >>> kjt = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 2]))
        >>> kjt.permute([1, 0]).values()
        tensor([2, 3, 1])
        """
        indices = checks.check_list("indices", indices)
        for index in indices:
            if not isinstance(index, int | torch.SymInt) or not 0 <= index < len(self._keys):
                raise ValueError(f"index {index} in permute({indices}) is not one of 0 to {len(self._keys) - 1}")
        if indices_tensor is not None:
            checks.check_twin(indices_tensor, indices, self.device())
        offsets, counts = self.offset_per_key(), self.length_per_key()
        slices = [(offsets[index], offsets[index + 1]) for index in indices] or [(0, 0)]
        return type(self)._unchecked(
            [self._keys[index] for index in indices],
            torch.cat([self._values[lower:upper] for lower, upper in slices]),
            None if self._weights is None else torch.cat([self._weights[a:b] for a, b in slices]),
            self._permuted_lengths(indices, indices_tensor),
            None,
            self.stride(),
            [counts[index] for index in indices],
            None if self._strides is None else [self._strides[index] for index in indices],
            self._inverse,
            self._inverse_keys,
        )

    def _permuted_lengths(self, indices: list[int], indices_tensor: Tensor | None) -> Tensor:
        lengths = self.lengths()
        if self._strides is not None:
            bags = self.lengths_offset_per_key()
            parts = [lengths[bags[index] : bags[index + 1]] for index in indices]
            return torch.cat(parts or [lengths[:0]])
        if indices_tensor is None:
            indices_tensor = torch.tensor(indices, dtype=torch.int64, device=self.device())
        return lengths.reshape(len(self._keys), self.stride()).index_select(0, indices_tensor).reshape(-1)

    def flatten_lengths(self) -> Self:
        """The same with lengths as `[F * B]`, where they were given as `[F, B]`."""
        flat = self._apply(lambda tensor: tensor)
        flat._lengths, flat._offsets = self.lengths().reshape(-1), None
        return flat

    def pin_memory(self) -> Self:
        """The same in pinned host memory, from which a copy to a GPU can run beside computation."""
        return self._apply(pinned)

    def to(self, device: Device, non_blocking: bool = False, dtype: torch.dtype | None = None) -> Self:
        """The same on another device; `dtype` is for the weights."""
        there = self._apply(lambda tensor: moved(tensor, device, non_blocking))
        if dtype is not None and there._weights is not None:
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                raise ValueError(f"dtype is that of the weights, such as torch.float32, got {dtype!r}")
            there._weights = there._weights.to(dtype)
        return there

    def _apply(self, move: Callable[[Tensor], Tensor]) -> Self:
        tensors = {name.lstrip("_"): move(tensor) for name, tensor in self._tensors().items()}
        return type(self)._unchecked(
            self._keys,
            **tensors,
            stride=self._stride,
            length_per_key=self._length_per_key,
            strides=self._strides,
            inverse_keys=self._inverse_keys,
        )
