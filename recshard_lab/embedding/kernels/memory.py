"""Large CPU tensors whose pages cost nothing until they are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

_LARGE = 2**20
_ALIGNMENT = 64


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """``torch.zeros``; large ones on CPU are the system's untouched zero pages (``calloc``), huge pages if it has them.

    ``torch.zeros`` writes every page. A table that is filled next is then written twice, which doubled the time to make
    kernels beside running ones.

    >>> zeros((1000, 1000), torch.float16, torch.device("cpu")).sum().item()
    0.0
    """
    if device.type != "cpu" or prod(shape) * dtype.itemsize < _LARGE:
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    return _aligned(np.zeros, shape, dtype)


def empty(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """``torch.empty`` on CPU; large ones on huge pages if the system has them, which numpy requests.

    A batch's output is written once. With 4 KB pages, allocating it takes as long as writing it.

    >>> empty((2, 3)).shape
    torch.Size([2, 3])
    """
    if prod(shape) * dtype.itemsize < _LARGE:
        return torch.empty(tuple(shape), dtype=dtype)
    return _aligned(np.empty, shape, dtype)


def _aligned(make: Callable[..., Any], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    size = prod(shape) * dtype.itemsize
    memory = torch.from_numpy(make(size + _ALIGNMENT, dtype=np.uint8))
    start = -memory.data_ptr() % _ALIGNMENT
    return memory[start : start + size].view(dtype).view(tuple(shape))
