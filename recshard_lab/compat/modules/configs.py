"""TorchRec's table configs: all its fields, and its first weights for a random seed.

TorchRec builds a table as a ``torch.nn.Embedding``, which draws normal weights, and draws it again by its config. The
normal weights are lost, and the random numbers are used. Tables of these configs use them too.

TorchRec's collections read none of ``need_pos``, ``input_dim`` and ``total_num_buckets``; the configs keep them for
your code. The fields of virtual tables are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar

import torch

from recshard_lab import embedding
from recshard_lab.compat.refusals import Refusal, refused
from recshard_lab.embedding import DataType, PoolingType
from recshard_lab.sharding import ShardingType

_DYNAMIC = "use recshard_lab.DynamicEmbeddingConfig with evict= and tiers="
_REFUSED = {
    "use_virtual_table": Refusal("virtual tables need CUDA kernels over SSD or DRAM", _DYNAMIC),
    "virtual_table_eviction_policy": Refusal("it belongs to virtual tables, which need CUDA kernels", _DYNAMIC),
    "enable_embedding_update": Refusal(
        "a forward that writes rows needs the CUDA kernels of virtual tables",
        "write to embedding_bags[table].weight",
    ),
    "stash_weights": Refusal("it moves weights between GPU and host memory", "leave it out"),
    "num_embeddings_post_pruning": Refusal(
        "a table is served with all its rows",
        "set num_embeddings, and load the pruned weights",
        accepted=(None,),
        same_as="num_embeddings",
    ),
}


@dataclass
class BaseEmbeddingConfig(embedding.BaseEmbeddingConfig):
    """One table, with TorchRec's fields. Pass the fields after ``weight_init_min`` by name.

    Args:
        num_embeddings, embedding_dim, name, data_type, feature_names, weight_init_max, weight_init_min, init_fn: as of
            `recshard_lab.embedding.BaseEmbeddingConfig`.
        num_embeddings_post_pruning: None, or ``num_embeddings``: tables are served with all their rows.
        need_pos, input_dim, total_num_buckets: kept, and read by no collection.
        use_virtual_table, virtual_table_eviction_policy, enable_embedding_update, stash_weights: False or None.

    Raises:
        ValueError: another value of these fields.

    >>> EmbeddingBagConfig(100, 8, "t", feature_names=["f"], need_pos=True).need_pos
    True
    """

    drawn_twice: ClassVar[bool] = True
    refused_values: ClassVar[Mapping[str, Refusal]] = _REFUSED

    num_embeddings_post_pruning: int | None = None
    need_pos: bool = False
    input_dim: int | None = None
    total_num_buckets: int | None = None
    use_virtual_table: bool = False
    virtual_table_eviction_policy: Any = None
    enable_embedding_update: bool = False
    stash_weights: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if (found := refused(_REFUSED, vars(self))) is not None:
            raise ValueError(f"table {self.name!r}: {found[1]}")


@dataclass
class EmbeddingBagConfig(BaseEmbeddingConfig, embedding.EmbeddingBagConfig):
    """A pooled table, with TorchRec's fields and ``pooling``.

    >>> EmbeddingBagConfig(num_embeddings=100, embedding_dim=8, name="t").pooling
    <PoolingType.SUM: 'SUM'>
    """


@dataclass
class EmbeddingConfig(BaseEmbeddingConfig, embedding.EmbeddingConfig):
    """A table of sequence embeddings, with TorchRec's fields.

    >>> EmbeddingConfig(num_embeddings=100, embedding_dim=8, name="t").weight_bytes
    3200
    """


@dataclass
class EmbeddingTableConfig(BaseEmbeddingConfig):
    """A table and how a lookup kernel reads it.

    Args:
        pooling: how a bag's rows become one vector.
        is_weighted: whether ids have weights.
        has_feature_processor: whether a feature processor computes the weights.
        embedding_names: a name for the output of each feature.

    >>> EmbeddingTableConfig(100, 8, "t", is_weighted=True).embedding_names
    []
    """

    pooling: PoolingType = PoolingType.SUM
    is_weighted: bool = False
    has_feature_processor: bool = False
    embedding_names: list[str] = field(default_factory=list)


def data_type_to_dtype(data_type: DataType) -> torch.dtype:
    """torch's number format of a table's. INT8 is ``torch.int8``; this library stores it as ``torch.uint8``.

    >>> data_type_to_dtype(DataType.INT8)
    torch.int8
    """
    return torch.int8 if data_type is DataType.INT8 else embedding.data_type_to_dtype(data_type)


_INTEGERS = (torch.int8, torch.qint8, torch.quint8)


def dtype_to_data_type(dtype: torch.dtype) -> DataType:
    """A table's number format from torch's. Also accepts ``torch.int8`` and the quantized 8-bit formats.

    Raises:
        ValueError: a format that no table can have.

    >>> dtype_to_data_type(torch.int8)
    <DataType.INT8: 'INT8'>
    """
    return DataType.INT8 if dtype in _INTEGERS else embedding.dtype_to_data_type(dtype)


class PoolingMode(IntEnum):
    """fbgemm's numbers of the poolings."""

    SUM = 0
    MEAN = 1
    NONE = 2


def pooling_type_to_pooling_mode(pooling_type: PoolingType, sharding_type: ShardingType | None = None) -> PoolingMode:
    """fbgemm's number of a pooling. Row shards of a MEAN table sum: the mean is taken after their outputs are added.

    Args:
        pooling_type: of the table.
        sharding_type: of the table.

    >>> pooling_type_to_pooling_mode(PoolingType.MEAN, ShardingType.ROW_WISE).name
    'SUM'
    """
    by_row = sharding_type in (ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE)
    return PoolingMode.SUM if by_row and pooling_type is PoolingType.MEAN else PoolingMode[pooling_type.name]
