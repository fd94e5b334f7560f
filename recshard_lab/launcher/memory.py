"""Large tensors between notebook and ranks: written once into anonymous shared memory, mapped where they are needed.

The memory has no name and no file: its descriptor travels over the control channel. Whoever maps it gets a private
copy-on-write view, so that nobody sees what another writes, and pages that are only read exist once.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

__all__ = ["Shelved", "is_large", "shelve", "shelving", "take"]

LARGE_BYTES = 1 << 20
_ALIGN = 64

shelving = sys.platform == "linux" and hasattr(os, "memfd_create")


class Shelved(NamedTuple):
    """Where a tensor lies in the shared memory, and what it is."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool
    parameter: bool


def is_large(value: Any) -> bool:
    """Whether `value` is a plain dense tensor of more than a megabyte on the CPU; others are pickled."""
    torch = sys.modules.get("torch")  # the notebook need not have imported it to talk to ranks
    return (
        torch is not None
        and type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and value.numel() * value.element_size() > LARGE_BYTES
        and value.grad_fn is None
        and not (value.is_quantized or value.is_conj() or value.is_neg() or vars(value))
    )


def placed(tensors: Sequence[torch.Tensor]) -> tuple[list[Shelved], int]:
    """A place for each tensor, and the bytes of them all."""
    import torch

    found, end = [], 0
    for tensor in tensors:
        parameter = type(tensor) is torch.nn.Parameter
        found.append(Shelved(end, tensor.dtype, tuple(tensor.shape), tensor.requires_grad, parameter))
        end += -(-tensor.numel() * tensor.element_size() // _ALIGN) * _ALIGN
    return found, end


def shelve(tensors: Sequence[torch.Tensor]) -> tuple[int, list[Shelved]]:
    """Copies tensors into fresh shared memory; its descriptor, which the caller closes, and what lies where."""
    places, size = placed(tensors)
    fd = os.memfd_create("recshard", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
        with mmap.mmap(fd, size) as shared:
            for tensor, place in zip(tensors, places, strict=True):
                _at(shared, place).copy_(tensor.detach())
    except BaseException:
        os.close(fd)
        raise
    return fd, places


def take(fd: int, places: Sequence[Shelved]) -> list[torch.Tensor]:
    """The tensors that lie there, writable and private; closes `fd`, the memory lives as long as they do.

    Before Python 3.13 each mapping also keeps a descriptor of its own for as long.
    """
    import torch

    untracked: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
    size = os.fstat(fd).st_size
    try:
        mapped = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE, **untracked)
    finally:
        os.close(fd)
    tensors = []
    for place in places:
        tensor = _at(mapped, place)
        if place.parameter:
            tensor = torch.nn.Parameter(tensor, requires_grad=place.requires_grad)
        tensors.append(tensor.requires_grad_(place.requires_grad))
    return tensors


def _at(memory: mmap.mmap, place: Shelved) -> torch.Tensor:
    import torch

    count = torch.Size(place.shape).numel()
    return torch.frombuffer(memory, dtype=place.dtype, count=count, offset=place.offset).view(place.shape)
