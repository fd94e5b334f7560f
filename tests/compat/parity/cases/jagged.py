"""Jagged tensors: construction, reading, conversion."""

from typing import Any

import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from tests.compat.parity.case import case, raised

MODULE = "torchrec.sparse.jagged_tensor"


def batch() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys=["a", "b"], values=torch.arange(6), lengths=torch.tensor([1, 2, 0, 3]))


@case(f"{MODULE}.KeyedJaggedTensor")
def reading() -> Any:
    kjt = batch()
    return {
        "keys": kjt.keys(),
        "stride": kjt.stride(),
        "lengths": kjt.lengths(),
        "offsets": kjt.offsets(),
        "length_per_key": kjt.length_per_key(),
        "offset_per_key": kjt.offset_per_key(),
        "b": kjt["b"],
    }


@case(f"{MODULE}.KeyedJaggedTensor")
def an_unknown_key() -> Any:
    return raised(lambda: batch()["c"])


@case(f"{MODULE}.JaggedTensor")
def from_dense_lengths() -> Any:
    return JaggedTensor.from_dense_lengths(torch.arange(6).reshape(2, 3), torch.tensor([1, 3]))


@case(f"{MODULE}.KeyedTensor")
def keyed_tensor() -> Any:
    kt = KeyedTensor.from_tensor_list(["x", "y"], [torch.ones(2, 1), torch.zeros(2, 3)])
    return {"whole": kt, "y": kt["y"], "regrouped": KeyedTensor.regroup([kt], [["y", "x"]])}
