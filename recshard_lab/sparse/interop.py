"""Interfaces of batches in a training pipeline, with TorchRec's names."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import wrap

from recshard_lab.sparse.jagged_tensor import JaggedStorage, JaggedTensor
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


# Batches from a TensorDict (package ``tensordict``), which is not a dependency.


def maybe_td_to_kjt(features: Any, keys: list[str] | None = None) -> Any:
    """A TensorDict of jagged nested tensors as a KeyedJaggedTensor. Returns any other object unchanged.

    Args:
        features: a ``tensordict.TensorDict`` whose entries are nested tensors of layout ``torch.jagged``, ``[B, *]``,
            or another object.
        keys: the entries to take, in order. None takes all.

    Raises:
        ValueError: an entry is missing, or is not a jagged nested tensor.
    """
    tensordict = sys.modules.get("tensordict")  # an object of this type exists only if it is imported
    if tensordict is None or not isinstance(features, tensordict.TensorDict):
        return features
    names = list(features.keys()) if keys is None else keys
    parts = []
    for name in names:
        part = features.get(name, None)
        if getattr(part, "layout", None) is not torch.jagged:
            found = (
                "is missing" if part is None else f"is a {type(part).__name__}, not a nested tensor of layout jagged"
            )
            raise ValueError(f"entry {name!r} of the TensorDict {found}: a feature has one bag of ids for each sample")
        parts.append(part)
    return KeyedJaggedTensor(
        names,
        torch.cat([part.values() for part in parts]),
        lengths=torch.cat([part.offsets().diff() for part in parts]),
    )


# A batch of features to one JaggedTensor a feature and back, as modules.


class ComputeKJTToJTDict(nn.Module):
    """`KeyedJaggedTensor.to_dict` as a module.

    >>> import torch
    >>> kjt = KeyedJaggedTensor(["a"], torch.tensor([1, 2]), lengths=torch.tensor([2]))
    >>> ComputeJTDictToKJT()(ComputeKJTToJTDict()(kjt)).values()
    tensor([1, 2])
    """

    def forward(self, keyed_jagged_tensor: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Every feature's bags by name, as views."""
        return keyed_jagged_tensor.to_dict()


class ComputeJTDictToKJT(nn.Module):
    """`KeyedJaggedTensor.from_jt_dict` as a module."""

    def forward(self, jt_dict: dict[str, JaggedTensor]) -> KeyedJaggedTensor:
        """One feature from each JaggedTensor."""
        return KeyedJaggedTensor.from_jt_dict(jt_dict)


# Whether two jagged batches hold the same, however they were given.


@wrap
def jt_is_equal(jt_1: JaggedTensor, jt_2: JaggedTensor) -> bool:
    """Whether two JaggedTensors have the same bags and weights, to floating-point tolerance (`torch.allclose`).

    One may have lengths and the other offsets. False if an argument is not a JaggedTensor.

    >>> one = JaggedTensor(torch.tensor([1.0, 2.0]), lengths=torch.tensor([2, 0]))
    >>> jt_is_equal(one, JaggedTensor(torch.tensor([1.0, 2.0]), offsets=torch.tensor([0, 2, 2])))
    True
    """
    return isinstance(jt_1, JaggedTensor) and isinstance(jt_2, JaggedTensor) and _same_bags(jt_1, jt_2)


@wrap
def kjt_is_equal(kjt_1: KeyedJaggedTensor, kjt_2: KeyedJaggedTensor) -> bool:
    """Whether two KeyedJaggedTensors have the same keys in one order, the same bags, weights and inverse indices.

    As `jt_is_equal` otherwise.
    """
    if not isinstance(kjt_1, KeyedJaggedTensor) or not isinstance(kjt_2, KeyedJaggedTensor):
        return False
    for read in (
        KeyedJaggedTensor.keys,
        KeyedJaggedTensor.stride,
        KeyedJaggedTensor.stride_per_key,
    ):
        if read(kjt_1) != read(kjt_2):
            return False
    if kjt_1._inverse_keys != kjt_2._inverse_keys or not _same(kjt_1._inverse, kjt_2._inverse):
        return False
    return _same_bags(kjt_1, kjt_2)


def _same_bags(one: JaggedStorage, other: JaggedStorage) -> bool:
    return (
        _same(one.values(), other.values())
        and _same(one.weights_or_none(), other.weights_or_none())
        and _same(one.lengths().reshape(-1), other.lengths().reshape(-1))
    )


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return one is other
    return one.shape == other.shape and one.device == other.device and torch.allclose(one.to(other.dtype), other)
