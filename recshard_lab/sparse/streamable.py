"""What a batch must be able to do to travel through a training pipeline, under TorchRec's names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from recshard_lab.sparse.jagged_tensor import JaggedTensor
from recshard_lab.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recshard_lab.sparse.keyed_tensor import KeyedTensor


class Multistreamable(ABC):
    """Its memory can be told that another stream uses it.

    >>> isinstance(KeyedJaggedTensor(["f"], torch.tensor([1]), lengths=torch.tensor([1])), Multistreamable)
    True
    """

    @abstractmethod
    def record_stream(self, stream: Any) -> None:
        """Keeps device memory from being reused before `stream` is done with it."""


class Pipelineable(Multistreamable):
    """It can be copied to another device, and pinned for that."""

    @abstractmethod
    def to(self, device: torch.device, non_blocking: bool = False) -> Any:
        """The same on another device."""

    def pin_memory(self) -> Any:
        """The same in page-locked memory.

        Raises:
            NotImplementedError: a class that does not say how.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define pin_memory()")


for _kind in (JaggedTensor, KeyedJaggedTensor, KeyedTensor):
    Pipelineable.register(_kind)
