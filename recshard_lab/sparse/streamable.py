"""Interfaces of batches in a training pipeline, with TorchRec's names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from recshard_lab.sparse.jagged_tensor import JaggedTensor
from recshard_lab.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recshard_lab.sparse.keyed_tensor import KeyedTensor


class Multistreamable(ABC):
    """A batch whose use by another stream can be recorded.

    >>> isinstance(KeyedJaggedTensor(["f"], torch.tensor([1]), lengths=torch.tensor([1])), Multistreamable)
    True
    """

    @abstractmethod
    def record_stream(self, stream: Any) -> None:
        """Prevents reuse of device memory before `stream` has finished with it."""


class Pipelineable(Multistreamable):
    """A batch that can be copied to another device, and pinned for the copy."""

    @abstractmethod
    def to(self, device: torch.device, non_blocking: bool = False) -> Any:
        """The same on another device."""

    def pin_memory(self) -> Any:
        """The same in page-locked memory.

        Raises:
            NotImplementedError: the class does not implement it.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define pin_memory()")


for _kind in (JaggedTensor, KeyedJaggedTensor, KeyedTensor):
    Pipelineable.register(_kind)
