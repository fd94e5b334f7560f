"""Number formats and poolings, translated: to torch's, to text, to bits."""

from __future__ import annotations

import torch

from recshard_lab.embedding.configs import DataType, PoolingType
from recshard_lab.embedding.kernels import TORCH_DTYPES

DATA_TYPE_NUM_BITS: dict[DataType, int] = {kind: int(8 * kind.bytes_per_element) for kind in DataType}
"""Bits of one weight."""

_DTYPES = {**TORCH_DTYPES, DataType.INT8: torch.uint8, DataType.INT4: torch.quint4x2, DataType.INT2: torch.quint2x4}
_DTYPES[DataType.FP8] = torch.float8_e4m3fn


def data_type_to_dtype(data_type: DataType) -> torch.dtype:
    """torch's number format of a table's.

    >>> data_type_to_dtype(DataType.BF16)
    torch.bfloat16
    """
    return _DTYPES[data_type]


def dtype_to_data_type(dtype: torch.dtype) -> DataType:
    """A table's number format from torch's.

    Raises:
        ValueError: a format that no table can have.

    >>> dtype_to_data_type(torch.float16)
    <DataType.FP16: 'FP16'>
    """
    for data_type, known in _DTYPES.items():
        if dtype == known:
            return data_type
    raise ValueError(f"no table has weights of {dtype}: use one of {', '.join(map(str, _DTYPES.values()))}")


def pooling_type_to_str(pooling_type: PoolingType) -> str:
    """The mode of ``torch.nn.EmbeddingBag`` that pools so.

    Raises:
        ValueError: NONE, which does not pool.

    >>> pooling_type_to_str(PoolingType.MEAN)
    'mean'
    """
    if pooling_type is PoolingType.NONE:
        raise ValueError("PoolingType.NONE does not pool: use SUM or MEAN")
    return pooling_type.value.lower()
