"""The one place in a step where the host reads numbers of the device."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class HostRead:
    """Collects integer tensors of one device, and reads all of them at once.

    >>> read = HostRead()
    >>> counts, flag = read.add(torch.tensor([3, 1])), read.add(torch.tensor([True]))
    >>> found = read.now()
    >>> found[counts].tolist(), found[flag].tolist()
    ([3, 1], [1])
    """

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []

    def add(self, numbers: Tensor) -> int:
        """Adds ``[n]``; returns its place in what `now` returns."""
        self._tensors.append(numbers)
        return len(self._tensors) - 1

    def now(self) -> list[NDArray[np.int64]]:
        """Each tensor as an array. Waits for a GPU once."""
        if not self._tensors:
            return []
        if len(self._tensors) == 1:
            return [self._tensors[0].long().cpu().numpy()]
        flat = torch.cat([own.long() for own in self._tensors]).cpu().numpy()
        ends = np.cumsum([own.numel() for own in self._tensors])
        return np.split(flat, ends[:-1])
