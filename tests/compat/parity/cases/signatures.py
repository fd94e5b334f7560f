"""Names, kinds and defaults of the parameters of every public method of the jagged classes."""

import inspect
from typing import Any

from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.sparse.jagged_tensor_validator import validate_keyed_jagged_tensor

from tests.compat.parity.case import case

JAGGED = (
    "copy_ device empty empty_like from_dense from_dense_lengths lengths lengths_or_none offsets offsets_or_none "
    "record_stream size_in_bytes to to_dense to_dense_weights to_padded_dense to_padded_dense_weights values weights "
    "weights_or_none"
)
KEYED_JAGGED = (
    "clear_storage concat copy_ device empty empty_like flatten_lengths "
    "from_jt_dict from_lengths_sync from_offsets_sync index_per_key inverse_indices inverse_indices_or_none keys "
    "length_per_key length_per_key_or_none lengths lengths_offset_per_key lengths_or_none offset_per_key "
    "offset_per_key_or_none offsets offsets_or_none permute pin_memory record_stream size_in_bytes split stride "
    "stride_per_key stride_per_key_per_rank sync to to_dict unsync values variable_stride_per_key weights "
    "weights_or_none"
)
KEYED = (
    "device from_tensor_list key_dim keys length_per_key offset_per_key record_stream regroup regroup_as_dict "
    "size_in_bytes to to_dict values"
)


def signature(function: Any) -> str:
    parameters = inspect.signature(function).parameters.values()
    return ", ".join(
        f"{one.name} {one.kind.name}" + ("" if one.default is one.empty else f" = {one.default!r}")
        for one in parameters
    )


def signatures(kind: type, names: str) -> Any:
    return {
        name: signature(getattr(kind, name))
        for name in ["__init__", "__getitem__", *names.split()]
        if hasattr(kind, name)
    }


@case("torchrec.sparse.jagged_tensor.JaggedTensor")
def of_one_feature() -> Any:
    return signatures(JaggedTensor, JAGGED)


@case("torchrec.sparse.jagged_tensor.KeyedJaggedTensor")
def of_several_features() -> Any:
    return signatures(KeyedJaggedTensor, KEYED_JAGGED)


@case("torchrec.sparse.jagged_tensor.KeyedTensor")
def of_dense_columns() -> Any:
    return signatures(KeyedTensor, KEYED)


@case("torchrec.sparse.jagged_tensor_validator.validate_keyed_jagged_tensor")
def of_the_validator() -> Any:
    return signature(validate_keyed_jagged_tensor)
