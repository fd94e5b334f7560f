"""Tables for serving, in row-wise int8 or int4, looked up by torch's CPU kernels. They cannot be trained.

Every row has a scale and an offset, so that the relative error does not depend on the size of a row's numbers::

    INT8   [E, D] float  ->  [E, D + 8] uint8       code * scale + offset, both fp32     error at most scale / 2
    INT4   [E, D] float  ->  [E, D / 2 + 4] uint8   two codes a byte, both fp16          scale / 2 and their rounding

with ``scale = (max - min) / (2**bits - 1)`` and ``offset = min`` of the row; rows that are all within 1e-6 are
rounded more coarsely. A lookup decodes the rows that it reads and adds in fp32; the table is never whole in fp32.

Shape letters: B batch, E rows, D columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.embedding.collections import EmbeddingBagCollection, check_pooling
from recshard_lab.embedding.configs import (
    DataType,
    EmbeddingBagConfig,
    PoolingType,
    check_tables,
    embedding_names_by_table,
)
from recshard_lab.embedding.fused_base import FusedCollection
from recshard_lab.embedding.inputs import Fitted, check_weights, fit_features, to_samples
from recshard_lab.embedding.out_of_range import OutOfRange
from recshard_lab.sparse import KeyedJaggedTensor, KeyedTensor

_BYTES: dict[DataType, Any] = {DataType.INT8: lambda d: d + 8, DataType.INT4: lambda d: d // 2 + 4}
_OPS = torch.ops.quantized
_PACK = {DataType.INT8: _OPS.embedding_bag_byte_prepack, DataType.INT4: _OPS.embedding_bag_4bit_prepack}
_UNPACK = {DataType.INT8: _OPS.embedding_bag_byte_unpack, DataType.INT4: _OPS.embedding_bag_4bit_unpack}
_BAGS = {DataType.INT8: _OPS.embedding_bag_byte_rowwise_offsets, DataType.INT4: _OPS.embedding_bag_4bit_rowwise_offsets}
_NAMED = {torch.qint8: DataType.INT8, torch.quint8: DataType.INT8, torch.uint8: DataType.INT8}
_NAMED |= {torch.quint4x2: DataType.INT4}


@names_wrong_arguments
class QuantizedEmbeddingBagCollection(nn.Module):
    """An `EmbeddingBagCollection` for serving on CPU; weights are buffers ``embedding_bags.{table}.weight``, uint8.

    Args:
        tables: each of data type INT8, or INT4 with an even number of columns. All rows are zero until `from_float` or
            a state dict sets them.
        is_weighted, out_of_range: as of `EmbeddingBagCollection`.

    Raises:
        ValueError: tables that do not fit together or cannot be packed.

    >>> table = EmbeddingBagConfig(4, 2, "movies", DataType.INT8, ["seen"])
    >>> batch = KeyedJaggedTensor(["seen"], torch.tensor([0, 3]), lengths=torch.tensor([2, 0]))
    >>> QuantizedEmbeddingBagCollection([table])(batch)["seen"].tolist()
    [[0.0, 0.0], [0.0, 0.0]]
    """

    def __init__(
        self, tables: Sequence[EmbeddingBagConfig], is_weighted: bool = False, *, out_of_range: str = "error"
    ) -> None:
        super().__init__()
        if not isinstance(is_weighted, bool):
            raise ValueError(f"is_weighted must be True or False, got {is_weighted!r:.80}")
        self._policy = OutOfRange(out_of_range)
        check_tables(tables)
        check_pooling(tables)
        self._tables, self._is_weighted = list(tables), is_weighted
        self._names = embedding_names_by_table(tables)
        self.embedding_bags = nn.ModuleDict()
        for table in tables:
            width = _packed_width(table)
            self.embedding_bags[table.name] = nn.Module()
            packed = torch.zeros(table.num_embeddings, width, dtype=torch.uint8)
            self.embedding_bags[table.name].register_buffer("weight", packed)

    @classmethod
    def from_float(
        cls, collection: EmbeddingBagCollection, data_type: DataType = DataType.INT8
    ) -> QuantizedEmbeddingBagCollection:
        """The same tables, each row rounded to 256 or 16 steps.

        Raises:
            ValueError: not a trained collection on a CPU, weights that are not finite, or rows that cannot be packed.
        """
        if type(collection) is not EmbeddingBagCollection:
            raise ValueError(f"collection must be an EmbeddingBagCollection, got {type(collection).__name__}")
        if not isinstance(data_type, DataType):
            raise ValueError(f"data_type must be DataType.INT8 or INT4, got {data_type!r:.80}")
        tables = [replace(table, data_type=data_type) for table in collection.embedding_bag_configs()]
        made = cls(tables, collection.is_weighted(), out_of_range=collection.out_of_range)
        for table in tables:
            weight = cast(Tensor, collection.embedding_bags[table.name].weight).detach()
            if weight.device.type != "cpu":
                raise ValueError(f"table {table.name!r} is on {weight.device}; these kernels run on CPU. Fix: .cpu()")
            if not bool(weight.isfinite().all()):
                raise ValueError(f"table {table.name!r} has weights that are not finite, and these cannot be rounded")
            made._weight(table).copy_(_PACK[data_type](weight.float()))
            if not bool(made.dequantized(table.name).isfinite().all()):
                raise ValueError(
                    f"table {table.name!r} has weights up to {float(weight.abs().max()):.3g}, and scales and offsets "
                    f"of INT4 are fp16, at most 65,504. Fix: use INT8"
                )
        return made

    @torch.no_grad()
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Looks up one batch; arguments, errors and result ``[B, sum of D]`` as of `EmbeddingBagCollection`, fp32."""
        bags = fit_features(features, self._tables, self._policy)
        keys: list[str] = []
        pooled: list[Tensor] = []
        for table, names in zip(self._tables, self._names, strict=True):
            for feature, name in zip(table.feature_names, names, strict=True):
                pooled.append(self._pool(features, feature, table, bags[len(keys)]))
                keys.append(name)
        dims = [table.embedding_dim for table in self._tables for _ in table.feature_names]
        return KeyedTensor(keys, dims, torch.cat(pooled, dim=1))

    def _pool(self, features: KeyedJaggedTensor, feature: str, table: EmbeddingBagConfig, fitted: Fitted) -> Tensor:
        given, bags, _ = fitted
        # these operators refuse strided ids, and read strided weights as if they were contiguous
        per_id = check_weights(bags.weights_or_none(), [feature]).float().contiguous() if self._is_weighted else None
        ends = functional.pad(bags.lengths().long().cumsum(0), (1, 0))
        pooled = _BAGS[table.data_type](
            self._weight(table),
            bags.values().long().contiguous(),
            ends,
            per_sample_weights=per_id,
            include_last_offset=True,
        )
        if table.pooling is PoolingType.MEAN:
            pooled = pooled / given.lengths().clamp(min=1).unsqueeze(1)
        return to_samples(pooled, features, feature)

    def dequantized(self, name: str) -> Tensor:
        """The rows of a table as a lookup sees them, ``[E, D]`` fp32.

        Raises:
            ValueError: the collection has no table of that name.
        """
        for table in self._tables:
            if table.name == name:
                rows: Tensor = _UNPACK[table.data_type](self._weight(table))
                return rows
        raise ValueError(
            f"table {name!r} is unknown. Fix: use one of {', '.join(table.name for table in self._tables)}"
        )

    def weight_bytes(self) -> int:
        """Bytes of all tables, scales and offsets included."""
        return sum(self._weight(table).numel() for table in self._tables)

    def _weight(self, table: EmbeddingBagConfig) -> Tensor:
        return cast(Tensor, self.embedding_bags[table.name].weight)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables, in order."""
        return self._tables

    def is_weighted(self) -> bool:
        """Whether batches must carry weights."""
        return self._is_weighted

    def out_of_range_count(self) -> int:
        """Out-of-range ids so far, under ``"clamp"`` and ``"ignore"``."""
        return self._policy.count()


@names_wrong_arguments
def quantize_embeddings(
    module: nn.Module, dtype: torch.dtype | DataType = DataType.INT8, inplace: bool = False
) -> nn.Module:
    """Quantizes every `EmbeddingBagCollection` of a model for serving, and nothing else.

    Args:
        module: a trained model, not sharded; its dense part keeps its number format.
        dtype: INT8 or INT4, or torch's ``qint8``, ``quint8``, ``quint4x2``.
        inplace: change the model instead of a copy. The result is in eval mode either way.

    Raises:
        ValueError: another format, no collection to quantize, or a collection of another kind, which would stay fp32.

    >>> tables = [EmbeddingBagConfig(100, 16, "movies", feature_names=["seen"])]
    >>> small = quantize_embeddings(nn.Sequential(EmbeddingBagCollection(tables)))
    >>> small[0].weight_bytes()
    2400
    """
    data_type = _NAMED.get(dtype, dtype) if isinstance(dtype, torch.dtype) else dtype
    if data_type not in _PACK:
        raise ValueError(f"dtype must be DataType.INT8 or INT4, or torch's qint8 or quint4x2, got {dtype!r:.80}")
    if not isinstance(inplace, bool):
        raise ValueError(f"inplace must be True or False, got {inplace!r:.80}")
    found = {path: part for path, part in module.named_modules() if _holds_tables(part)}
    if not found:
        raise ValueError(f"{type(module).__name__} has no EmbeddingBagCollection to quantize")
    for path, part in found.items():
        if type(part) is not EmbeddingBagCollection:
            raise ValueError(
                f"{path or 'the module'} is a {type(part).__name__}, and only an EmbeddingBagCollection can be "
                f"quantized. Fix: save_checkpoint, then load_checkpoint into an unsharded model of these"
            )
    made = {path: QuantizedEmbeddingBagCollection.from_float(part, data_type) for path, part in found.items()}
    if "" in made:
        return made[""].eval()
    target = module if inplace else _copied(module, list(found.values()))
    for path, small in made.items():
        parent, _, name = path.rpartition(".")
        setattr(target.get_submodule(parent), name, small)
    return target.eval()


def _holds_tables(part: nn.Module) -> bool:
    kinds = ("EmbeddingBagCollection", "EmbeddingCollection", "FusedCollection", "ShardedCollection")
    return isinstance(part, FusedCollection) or any(base.__name__ in kinds for base in type(part).__mro__)


def _copied(module: nn.Module, without: Sequence[nn.Module]) -> nn.Module:
    """A copy without a second copy of the tables."""
    return deepcopy(module, {id(part): part for part in without})


def _packed_width(table: EmbeddingBagConfig) -> int:
    """Bytes of a packed row."""
    if table.data_type not in _BYTES:
        raise ValueError(f"table {table.name!r} is {table.data_type.value}: these kernels serve INT8 and INT4")
    if table.data_type is DataType.INT4 and table.embedding_dim % 2:
        raise ValueError(
            f"table {table.name!r} has {table.embedding_dim} columns, and INT4 packs two into a byte: use INT8"
        )
    width: int = _BYTES[table.data_type](table.embedding_dim)
    return width
