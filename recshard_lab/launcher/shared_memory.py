"""Sends large tensors between notebook and ranks through anonymous shared memory, which is written once.

The memory has no name and no file. Its descriptor is sent over the control channel. Each process maps a private
copy-on-write view: writes stay private, and pages that are only read exist once.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

__all__ = ["Shelved", "is_large", "shelve", "shelving", "take"]

LARGE_BYTES = 1 << 20
_ALIGN = 64

shelving = sys.platform == "linux" and hasattr(os, "memfd_create")


class Shelved(NamedTuple):
    """Offset and type of a tensor in the shared memory."""

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
    """The place of each tensor, and the total size in bytes."""
    import torch

    found, end = [], 0
    for tensor in tensors:
        parameter = type(tensor) is torch.nn.Parameter
        found.append(Shelved(end, tensor.dtype, tuple(tensor.shape), tensor.requires_grad, parameter))
        end += -(-tensor.numel() * tensor.element_size() // _ALIGN) * _ALIGN
    return found, end


def shelve(tensors: Sequence[torch.Tensor]) -> tuple[int, list[Shelved]]:
    """Copies tensors into new shared memory. Returns its descriptor, which the caller closes, and their places."""
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
    """The tensors at `places`, writable and private. They keep the memory alive, so `fd` may be closed."""
    import torch

    mapped = _mapping(fd, os.fstat(fd).st_size)
    tensors = []
    for place in places:
        tensor = _at(mapped, place)
        if place.parameter:
            tensor = torch.nn.Parameter(tensor, requires_grad=place.requires_grad)
        tensors.append(tensor.requires_grad_(place.requires_grad))
    return tensors


def _mapping(fd: int, size: int) -> Any:
    """A private copy-on-write view of a file, which keeps no descriptor (Python's own `mmap` keeps one before 3.13)."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, f"mapping {size:,} bytes: {os.strerror(number)}")
    view = (ctypes.c_char * size).from_address(address)
    weakref.finalize(view, libc.munmap, address, size).atexit = False  # tensors may outlive the interpreter
    return view


def _at(memory: Any, place: Shelved) -> torch.Tensor:
    import torch

    count = torch.Size(place.shape).numel()
    return torch.frombuffer(memory, dtype=place.dtype, count=count, offset=place.offset).view(place.shape)
