"""A batch of features to one JaggedTensor a feature and back, as modules."""

from __future__ import annotations

from torch import nn

from recshard_lab.sparse.jagged_tensor import JaggedTensor
from recshard_lab.sparse.keyed_jagged_tensor import KeyedJaggedTensor


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
