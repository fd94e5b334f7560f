"""Whether two jagged batches hold the same, however they were given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import wrap

from recshard_lab.sparse.jagged_tensor import JaggedTensor
from recshard_lab.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recshard_lab.sparse.storage import JaggedStorage


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
