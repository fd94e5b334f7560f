"""Jagged tensors: construction, reading, conversion."""

import pickle
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torchrec.sparse.jagged_tensor import JaggedTensor, JaggedTensorMeta, KeyedJaggedTensor, KeyedTensor, jt_is_equal

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


def weighted() -> JaggedTensor:
    return JaggedTensor(
        values=torch.arange(3.0), weights=torch.tensor([0.5, 1.0, 2.0]), offsets=torch.tensor([0, 1, 1, 3])
    )


@case(f"{MODULE}.JaggedTensor")
def every_reader_of_one_feature() -> Any:
    jt = weighted()
    return {
        "before": jt.lengths_or_none(),
        "values": jt.values(),
        "weights": jt.weights(),
        "weights_or_none": jt.weights_or_none(),
        "lengths": jt.lengths(),
        "lengths_or_none": jt.lengths_or_none(),
        "offsets": jt.offsets(),
        "offsets_or_none": jt.offsets_or_none(),
        "device": jt.device(),
        "bytes": jt.size_in_bytes(),
    }


@case(f"{MODULE}.JaggedTensor")
def offsets_from_lengths() -> Any:
    jt = JaggedTensor(torch.arange(3), lengths=torch.tensor([1, 0, 2], dtype=torch.int32))
    return [jt.offsets_or_none(), jt.offsets()]


@case(f"{MODULE}.JaggedTensor")
def dense_forms() -> Any:
    jt = weighted()
    return {
        "dense": jt.to_dense(),
        "dense weights": jt.to_dense_weights(),
        "padded": jt.to_padded_dense(),
        "cut": jt.to_padded_dense(1),
        "wide": jt.to_padded_dense(desired_length=4, padding_value=-1.0),
        "padded weights": jt.to_padded_dense_weights(desired_length=3, padding_value=9.0),
    }


@case(f"{MODULE}.JaggedTensor")
def dense_forms_of_vectors() -> Any:
    jt = JaggedTensor(torch.arange(6.0).reshape(3, 2), lengths=torch.tensor([1, 0, 2]))
    return [jt.to_dense(), jt.to_padded_dense(2, 0.5)]


@case(f"{MODULE}.JaggedTensor")
def from_dense_lists() -> Any:
    bags = [torch.tensor([1.0, 2.0]), torch.tensor([]), torch.tensor([3.0])]
    return [
        JaggedTensor.from_dense(values=bags),
        JaggedTensor.from_dense(values=bags, weights=[2 * bag for bag in bags]),
        JaggedTensor.from_dense_lengths(torch.ones(2, 2), torch.tensor([1, 2]), weights=torch.ones(2, 2) * 3),
    ]


@case(f"{MODULE}.JaggedTensor")
def empty_tensors() -> Any:
    return [
        JaggedTensor.empty(is_weighted=True, values_dtype=torch.int64, lengths_dtype=torch.int64),
        JaggedTensor.empty_like(weighted()),
        JaggedTensor.empty_like(weighted(), torch.device("meta")).values(),
    ]


@case(f"{MODULE}.JaggedTensor")
def copying_into_a_buffer() -> Any:
    buffer = JaggedTensor.empty_like(weighted(), torch.device("cpu"))
    return [buffer.copy_(weighted()) is buffer, buffer.values(), buffer.weights()]


@case(f"{MODULE}.JaggedTensor")
def one_feature_pickled_and_as_a_tree() -> Any:
    leaves, spec = pytree.tree_flatten(weighted())
    back = pytree.tree_unflatten(leaves, spec)
    return [pickle.loads(pickle.dumps(weighted())), back.values(), back.offsets()]


@case(f"{MODULE}.JaggedTensor", f"{MODULE}.jt_is_equal")
def equality_of_one_feature() -> Any:
    other = JaggedTensor(torch.arange(3.0), lengths=torch.tensor([1, 0, 2]))
    return [jt_is_equal(weighted(), weighted()), jt_is_equal(weighted(), other), jt_is_equal(other, 1)]


@case(f"{MODULE}.JaggedTensor")
def one_feature_without_weights() -> Any:
    jt = JaggedTensor(torch.arange(3), lengths=torch.tensor([1, 0, 2]))
    return [jt.weights_or_none(), jt.to_dense_weights(), jt.to_padded_dense_weights()]


@case(f"{MODULE}.JaggedTensorMeta")
def the_metaclass() -> Any:
    return [issubclass(JaggedTensorMeta, type), isinstance(JaggedTensor, JaggedTensorMeta)]
