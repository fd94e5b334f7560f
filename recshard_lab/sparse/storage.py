"""What JaggedTensor and KeyedJaggedTensor store alike: values, weights, and lengths or offsets.

Either of `lengths` and `offsets` may be missing; it is derived from the other when first asked for.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from recshard_lab.sparse.ops import complete_cumsum
from recshard_lab.sparse.tracing import Traceable

_INT32_MAX = 2**31 - 1

Device = torch.device | str | int


class JaggedStorage(metaclass=Traceable):
    """Values cut into bags, with optional weights. Abstract: use JaggedTensor or KeyedJaggedTensor.

    The metaclass lets torch.fx trace a constructor that is given proxies.
    """

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

    def size_in_bytes(self) -> int:
        """Bytes of the tensors that are there: values, weights, lengths, offsets, inverse indices."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors().values())

    def copy_(self, jt: Self, non_blocking: bool = False) -> Self:
        """Overwrites the tensors held here, in place, with those of a batch of the same shape; returns itself.

        For buffers that stay where they are, such as those of a CUDA graph; see `empty_like(..., device=)`.

        Raises:
            ValueError: shapes that differ, or weights in only one of the two.
        """
        if not isinstance(jt, type(self)):
            raise ValueError(f"copy_ takes a {type(self).__name__}, got {type(jt).__name__}")
        own = self._tensors()
        if "_lengths" in own:
            jt.lengths()
        if "_offsets" in own:
            jt.offsets()
        theirs = jt._tensors()
        for name in {**own, **theirs}:
            if name in ("_lengths", "_offsets") and name not in own:
                continue
            sizes = [list(held[name].shape) if name in held else None for held in (own, theirs)]
            if sizes[0] != sizes[1]:
                raise ValueError(
                    f"copy_ needs {name.lstrip('_')} of one shape, here {sizes[0]}, given {sizes[1]}: "
                    f"make the buffer with empty_like(batch, device)"
                )
        for name, tensor in own.items():
            tensor.copy_(theirs[name], non_blocking=non_blocking)
        return self

    def record_stream(self, stream: Any) -> None:
        """Prevents reuse of device memory before `stream` has finished with it. No effect on host memory."""
        record_stream(stream, *self._tensors().values())

    def _tensors(self) -> dict[str, Tensor]:
        """The tensors that are there, by attribute name."""
        return {name: getattr(self, name) for name in self._FIELDS if getattr(self, name) is not None}

    def __getstate__(self) -> dict[str, Any]:
        """The state to pickle: no cached views, and of a slice only its own elements."""
        state = {**self.__dict__, **{name: compact(tensor) for name, tensor in self._tensors().items()}}
        return {name: None if name == "_jt_dict" else value for name, value in state.items()}


def record_stream(stream: Any, *tensors: Tensor) -> None:
    """Registers the use of these tensors by `stream` with the device allocator."""
    for tensor in tensors:
        if tensor.device.type == "cpu":
            continue
        if not isinstance(stream, torch.Stream):
            raise ValueError(f"record_stream takes a stream such as torch.cuda.current_stream(), got {stream!r}")
        tensor.record_stream(stream)


def moved(tensor: Tensor, device: Device, non_blocking: bool) -> Tensor:
    """The tensor on a device; refuses what names none."""
    return tensor.to(device_named(device), non_blocking=non_blocking)


def device_named(device: Device) -> torch.device:
    """The device; refuses what names none."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must be one such as 'cpu' or 'cuda:0', got {device!r}") from error


def pinned(tensor: Tensor) -> Tensor:
    """The tensor in pinned host memory."""
    try:
        return tensor.pin_memory()
    except RuntimeError as error:
        raise ValueError(
            f"pin_memory needs an accelerator and a tensor on the CPU; this one is on {tensor.device}: {error}"
        ) from error


def compact(tensor: Tensor) -> Tensor:
    """The tensor without the rest of the storage it is a slice of; pickling would carry all of it along."""
    if tensor.is_meta or tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size():
        return tensor
    return tensor.clone()
