"""Zeros that cost nothing until they are written."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

_LARGE = 2**20
_ALIGNMENT = 64


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """``torch.zeros``; large ones on CPU are the system's untouched zero pages (``calloc``), huge where it has them.

    ``torch.zeros`` writes every page at once. A table that is about to be filled would be written twice: making
    kernels beside running ones took twice as long.

    >>> zeros((1000, 1000), torch.float16, torch.device("cpu")).sum().item()
    0.0
    """
    count = prod(shape)
    size = count * dtype.itemsize
    if device.type != "cpu" or size < _LARGE:
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    memory = torch.from_numpy(np.zeros(size + _ALIGNMENT, dtype=np.uint8))
    start = -memory.data_ptr() % _ALIGNMENT
    return memory[start : start + size].view(dtype).view(tuple(shape))
