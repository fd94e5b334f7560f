"""What JaggedTensor and KeyedJaggedTensor store alike: values, weights, and lengths or offsets.

Either of `lengths` and `offsets` may be missing; it is derived from the other when first asked for.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from recshard_lab.sparse.ops import complete_cumsum

_INT32_MAX = 2**31 - 1

Device = torch.device | str | int


class JaggedStorage:
    """Values cut into bags, with optional weights. Abstract: use JaggedTensor or KeyedJaggedTensor."""

    _FIELDS: ClassVar[tuple[str, ...]] = ("_values", "_weights", "_lengths", "_offsets")

    _values: Tensor
    _weights: Tensor | None
    _lengths: Tensor | None
    _offsets: Tensor | None

    def device(self) -> torch.device:
        """Where the values are."""
        return self._values.device

    def values(self) -> Tensor:
        """All ids (or vectors) one after the other, `[N, ...]`."""
        return self._values

    def weights(self) -> Tensor:
        """One weight a value, `[N]`; ValueError when there are none."""
        if self._weights is None:
            raise ValueError(
                f"this {type(self).__name__} has no weights: pass weights= when building it, or ask weights_or_none()"
            )
        return self._weights

    def weights_or_none(self) -> Tensor | None:
        """The weights, or None."""
        return self._weights

    def lengths(self) -> Tensor:
        """How many values each bag holds."""
        if self._lengths is None:
            assert self._offsets is not None
            self._lengths = self._offsets[1:] - self._offsets[:-1]
        return self._lengths

    def lengths_or_none(self) -> Tensor | None:
        """The lengths if they are known already, else None; derives nothing."""
        return self._lengths

    def offsets(self) -> Tensor:
        """Where each bag starts, and at last N; int32 where lengths are int32 and N fits, else int64."""
        if self._offsets is None:
            assert self._lengths is not None
            narrow = self._lengths.dtype == torch.int32 and self._values.shape[0] <= _INT32_MAX
            self._offsets = complete_cumsum(self._lengths, torch.int32 if narrow else torch.int64)
        return self._offsets

    def offsets_or_none(self) -> Tensor | None:
        """The offsets if they are known already, else None; derives nothing."""
        return self._offsets

    def record_stream(self, stream: Any) -> None:
        """Keeps the memory from being reused before `stream` is done with it (CUDA tensors)."""
        for tensor in self._tensors().values():
            tensor.record_stream(stream)

    def _tensors(self) -> dict[str, Tensor]:
        """The tensors that are there, by attribute name."""
        return {name: getattr(self, name) for name in self._FIELDS if getattr(self, name) is not None}

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: no caches of views, and no storage beyond what a slice shows."""
        state = {**self.__dict__, **{name: compact(tensor) for name, tensor in self._tensors().items()}}
        return {name: None if name == "_jt_dict" else value for name, value in state.items()}


def compact(tensor: Tensor) -> Tensor:
    """The tensor without the rest of the storage it is a slice of; pickling would carry all of it along."""
    if tensor.is_meta or tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size():
        return tensor
    return tensor.clone()
