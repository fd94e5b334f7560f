"""KeyedJaggedTensor: every public method and keyword, variable batches, other devices, torch's trees and pickles."""

import pickle
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torchrec.sparse.jagged_tensor import (
    ComputeJTDictToKJT,
    ComputeKJTToJTDict,
    JaggedTensor,
    KeyedJaggedTensor,
    kjt_is_equal,
)
from torchrec.sparse.jagged_tensor_validator import validate_keyed_jagged_tensor

from tests.compat.parity.case import case, raised

MODULE = "torchrec.sparse.jagged_tensor"
KJT = f"{MODULE}.KeyedJaggedTensor"


def batch() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys=["a", "b"], values=torch.arange(6), lengths=torch.tensor([1, 2, 0, 3]))


def weighted() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.arange(6),
        weights=torch.arange(6.0) / 2,
        offsets=torch.tensor([0, 1, 3, 3, 6]),
    )


def variable(**more: Any) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.arange(6),
        lengths=torch.tensor([1, 2, 3]),
        stride_per_key_per_rank=[[1], [2]],
        **more,
    )


@case(KJT)
def every_reader() -> Any:
    kjt = weighted()
    return {
        "values": kjt.values(),
        "weights": kjt.weights(),
        "offsets": kjt.offsets(),
        "lengths": kjt.lengths(),
        "lengths_or_none": kjt.lengths_or_none(),
        "offsets_or_none": kjt.offsets_or_none(),
        "weights_or_none": kjt.weights_or_none(),
        "length_per_key": kjt.length_per_key(),
        "offset_per_key": kjt.offset_per_key(),
        "length_per_key_or_none": kjt.length_per_key_or_none(),
        "offset_per_key_or_none": kjt.offset_per_key_or_none(),
        "lengths_offset_per_key": kjt.lengths_offset_per_key(),
        "index_per_key": kjt.index_per_key(),
        "stride": kjt.stride(),
        "stride_per_key": kjt.stride_per_key(),
        "variable": kjt.variable_stride_per_key(),
        "inverse": kjt.inverse_indices_or_none(),
        "device": kjt.device(),
        "bytes": kjt.size_in_bytes(),
    }


@case(KJT)
def every_reader_of_a_variable_batch() -> Any:
    kjt = variable(inverse_indices=(["a", "b"], torch.tensor([[0, 0, 0], [1, 0, 1]])))
    keys, index = kjt.inverse_indices()
    return {
        "stride": kjt.stride(),
        "stride_per_key": kjt.stride_per_key(),
        "stride_per_key_per_rank": kjt.stride_per_key_per_rank(),
        "lengths_offset_per_key": kjt.lengths_offset_per_key(),
        "variable": kjt.variable_stride_per_key(),
        "length_per_key": kjt.length_per_key(),
        "inverse": [keys, index],
        "b": kjt["b"],
        "dict": kjt.to_dict(),
    }


@case(KJT)
def nothing_is_derived_before_it_is_read() -> Any:
    kjt = batch()
    before = [kjt.offsets_or_none(), kjt.length_per_key_or_none(), kjt.offset_per_key_or_none()]
    kjt.sync()
    after = [kjt.length_per_key_or_none(), kjt.offset_per_key_or_none()]
    kjt.unsync()
    return [before[0], after, kjt.length_per_key_or_none(), kjt.offset_per_key_or_none()]


@case(KJT)
def errors_of_readers() -> Any:
    kjt = batch()
    return {
        "key": raised(lambda: kjt["nothing"]),
        "concat": raised(lambda: KeyedJaggedTensor.concat([])),
    }


@case(KJT, differs="a missing part and a wrong count raise ValueError with the value, not AssertionError or IndexError")
def errors_of_missing_parts() -> Any:
    kjt = batch()
    return [raised(kjt.weights), raised(kjt.inverse_indices), raised(lambda: kjt.split([1, 1, 1]))]


@case(KJT)
def from_lengths_and_from_offsets() -> Any:
    lengths = KeyedJaggedTensor.from_lengths_sync(["a", "b"], torch.arange(6), torch.tensor([1, 2, 0, 3]))
    offsets = KeyedJaggedTensor.from_offsets_sync(
        keys=["a", "b"], values=torch.arange(6), offsets=torch.tensor([0, 1, 3, 3, 6]), weights=torch.ones(6)
    )
    return [lengths, offsets, lengths.offset_per_key_or_none(), offsets.length_per_key_or_none()]


@case(KJT)
def from_lengths_with_strides() -> Any:
    kjt = KeyedJaggedTensor.from_lengths_sync(
        keys=["a", "b"],
        values=torch.arange(6),
        lengths=torch.tensor([1, 2, 3]),
        stride_per_key_per_rank=[[1], [2]],
        inverse_indices=(["a", "b"], torch.tensor([[0, 0], [0, 1]])),
    )
    return [kjt, kjt.stride(), kjt.stride_per_key(), kjt.inverse_indices()[0]]


@case(KJT)
def from_jt_dict_with_weights() -> Any:
    parts = {
        "a": JaggedTensor(torch.arange(3), lengths=torch.tensor([1, 2]), weights=torch.ones(3)),
        "b": JaggedTensor(torch.arange(2), lengths=torch.tensor([0, 2]), weights=torch.zeros(2)),
    }
    return KeyedJaggedTensor.from_jt_dict(parts)


@case(KJT)
def from_jt_dict_with_different_strides() -> Any:
    parts = {
        "a": JaggedTensor(torch.arange(3), lengths=torch.tensor([1, 2, 0])),
        "b": JaggedTensor(torch.arange(2), lengths=torch.tensor([2])),
    }
    kjt = KeyedJaggedTensor.from_jt_dict(parts)
    return [kjt, kjt.stride_per_key(), kjt.variable_stride_per_key()]


@case(KJT)
def splitting() -> Any:
    return {
        "plain": batch().split([1, 1]),
        "empty first": batch().split([0, 2])[1],
        "weighted": weighted().split([1, 1]),
        "variable": variable().split([1, 1])[1].lengths(),
    }


@case(KJT)
def permuting() -> Any:
    return {
        "plain": batch().permute([1, 0]),
        "weighted": weighted().permute([1]),
        "repeated": batch().permute([0, 1, 0]).values(),
        "with a tensor": batch().permute([1, 0], torch.tensor([1, 0], dtype=torch.int32)),
        "variable": variable().permute([1, 0]),
    }


@case(KJT)
def joining() -> Any:
    other = KeyedJaggedTensor(["c"], torch.tensor([9, 8]), lengths=torch.tensor([2, 0]))
    joined = KeyedJaggedTensor.concat([batch(), other])
    return [joined, joined.length_per_key(), KeyedJaggedTensor.concat([weighted(), weighted().split([1, 1])[1]]).keys()]


@case(KJT)
def joining_variable_batches() -> Any:
    other = KeyedJaggedTensor(["c"], torch.tensor([9]), lengths=torch.tensor([1]), stride_per_key_per_rank=[[1]])
    joined = KeyedJaggedTensor.concat([variable(), other])
    return [joined, joined.stride_per_key()]


@case(KJT)
def empty_batches() -> Any:
    empty = KeyedJaggedTensor.empty(is_weighted=True, values_dtype=torch.int32, lengths_dtype=torch.int64)
    return [empty, empty.stride(), KeyedJaggedTensor.empty_like(weighted()), KeyedJaggedTensor.empty().length_per_key()]


@case(KJT)
def empty_like_on_a_device() -> Any:
    there = KeyedJaggedTensor.empty_like(weighted(), torch.device("meta"))
    return [there.keys(), there.values(), there.weights(), there.offsets_or_none(), there.stride()]


@case(KJT)
def empty_like_of_a_variable_batch() -> Any:
    kjt = variable(inverse_indices=(["a", "b"], torch.tensor([[0, 0], [0, 1]])))
    there = KeyedJaggedTensor.empty_like(kjt, torch.device("cpu"))
    filled = there.copy_(kjt)
    return [filled, filled.stride_per_key(), filled.stride_per_key_per_rank(), filled.variable_stride_per_key()]


@case(KJT)
def copying_into_buffers() -> Any:
    buffer = KeyedJaggedTensor.empty_like(weighted(), torch.device("cpu"))
    returned = buffer.copy_(weighted(), non_blocking=True)
    return [buffer, returned is buffer]


@case(KJT)
def on_the_meta_device() -> Any:
    kjt = KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.empty(6, dtype=torch.int64, device="meta"),
        lengths=torch.empty(4, dtype=torch.int64, device="meta"),
    )
    return [kjt.keys(), kjt.stride(), kjt.values(), kjt.lengths(), kjt.offsets(), kjt.device(), kjt.stride_per_key()]


@case(KJT)
def moving_to_the_meta_device() -> Any:
    moved = weighted().to(torch.device("meta"))
    return [moved.values(), moved.weights(), moved.stride(), moved.keys()]


@case(KJT)
def moving_with_a_dtype() -> Any:
    kjt = weighted().to(torch.device("cpu"), non_blocking=False, dtype=torch.float64)
    return [kjt.weights(), kjt.values(), kjt.lengths()]


@case(KJT)
def flattening_lengths() -> Any:
    kjt = KeyedJaggedTensor(["a", "b"], torch.arange(6), lengths=torch.tensor([[1, 2], [0, 3]]))
    return [kjt.lengths(), kjt.stride(), kjt.flatten_lengths().lengths()]


@case(KJT)
def clearing_the_storage() -> Any:
    kjt = weighted()
    kjt.clear_storage()
    return [kjt.keys(), kjt.values().untyped_storage().nbytes(), kjt.weights().untyped_storage().nbytes()]


@case(KJT)
def values_beyond_the_bags() -> Any:
    kjt = KeyedJaggedTensor(["a", "b"], torch.arange(9), lengths=torch.tensor([1, 2, 0, 3]))
    return [kjt["a"], kjt["b"], kjt.length_per_key(), kjt.offsets(), kjt.permute([1, 0]), kjt.split([1, 1])]


@case(KJT, differs="values beyond the bags are left out when the batch is made")
def all_values_of_a_batch_with_more_values() -> Any:
    kjt = KeyedJaggedTensor(["a"], torch.arange(5), lengths=torch.tensor([1, 2]))
    return [kjt.values(), raised(lambda: validate_keyed_jagged_tensor(kjt))]


@case(KJT)
def pickled() -> Any:
    kjt = variable(inverse_indices=(["a", "b"], torch.tensor([[0, 0], [0, 1]])))
    back = [pickle.loads(pickle.dumps(one)) for one in (batch(), weighted(), kjt)]
    return [*back, back[2].stride_per_key(), back[2].inverse_indices()[1]]


@case(KJT)
def as_a_tree() -> Any:
    leaves, spec = pytree.tree_flatten(weighted())
    doubled = pytree.tree_map(lambda leaf: leaf * 2 if isinstance(leaf, torch.Tensor) else leaf, batch())
    back = pytree.tree_unflatten(leaves, spec)
    return [back, doubled.values(), doubled.keys(), [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)][:2]]


@case(KJT, f"{MODULE}.kjt_is_equal")
def equality() -> Any:
    return [
        kjt_is_equal(batch(), batch()),
        kjt_is_equal(batch(), weighted()),
        kjt_is_equal(batch(), batch().permute([1, 0])),
        kjt_is_equal(variable(), variable()),
        kjt_is_equal(batch(), 1),
    ]


@case(f"{MODULE}.ComputeJTDictToKJT", f"{MODULE}.ComputeKJTToJTDict")
def modules_over_dicts() -> Any:
    parts = ComputeKJTToJTDict()(weighted())
    return [parts, ComputeJTDictToKJT()(parts)]


@case("torchrec.sparse.jagged_tensor_validator.validate_keyed_jagged_tensor")
def the_validator_of_valid_batches() -> Any:
    from torchrec.modules.embedding_configs import EmbeddingBagConfig

    def table(rows: int) -> EmbeddingBagConfig:
        return EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=rows, feature_names=["a", "b"])

    return [
        validate_keyed_jagged_tensor(batch()),
        validate_keyed_jagged_tensor(weighted(), configs=[table(6)]),
        validate_keyed_jagged_tensor(batch(), [table(5)]),
        validate_keyed_jagged_tensor(variable()),
    ]


@case("torchrec.sparse.jagged_tensor_validator.validate_keyed_jagged_tensor")
def the_validator_of_wrong_batches() -> Any:
    def attempt(**arguments: Any) -> str:
        return raised(lambda: validate_keyed_jagged_tensor(KeyedJaggedTensor(**arguments)))

    ids = torch.arange(3)
    return {
        "lengths": attempt(keys=["a"], values=ids, lengths=torch.tensor([1, 3])),
        "offsets": attempt(keys=["a"], values=ids, offsets=torch.tensor([1, 3])),
        "both": attempt(keys=["a"], values=ids, lengths=torch.tensor([1, 2]), offsets=torch.tensor([0, 2, 3])),
        "twice": attempt(keys=["a", "a"], values=ids, lengths=torch.tensor([1, 2])),
        "bags": attempt(keys=["a", "b"], values=ids, lengths=torch.tensor([1, 1, 1])),
        "weights": attempt(keys=["a"], values=ids, lengths=torch.tensor([3]), weights=torch.ones(2)),
    }
