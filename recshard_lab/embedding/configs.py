"""What a table is: names, sizes, number format, pooling. Importing it loads no torch, so that the planner needs none.

Shape letters: E rows (num_embeddings), D columns (embedding_dim).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, unique
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch


@unique
class DataType(Enum):
    """Number format of a table's weights. FP64 is for checking gradients. The integers and FP8 are for serving.

    >>> DataType.FP16.bytes_per_element
    2.0
    """

    FP64 = "FP64"
    FP32 = "FP32"
    FP16 = "FP16"
    BF16 = "BF16"
    INT8 = "INT8"
    INT4 = "INT4"
    INT2 = "INT2"
    FP8 = "FP8"

    @property
    def bytes_per_element(self) -> float:
        """Bytes of one weight; below one for INT4 and INT2."""
        return _BYTES[self.name]

    def __str__(self) -> str:
        return self.value


_BYTES = {"FP64": 8.0, "FP32": 4.0, "FP16": 2.0, "BF16": 2.0, "INT8": 1.0, "INT4": 0.5, "INT2": 0.25, "FP8": 1.0}


DATA_TYPE_NUM_BITS: dict[DataType, int] = {kind: int(8 * kind.bytes_per_element) for kind in DataType}
"""Bits of one weight."""

ROW_HEADER_BYTES = 4
"""Of a row of INT8, INT4 or INT2: scale and bias in fp16."""


@unique
class PoolingType(Enum):
    """How a bag's rows become one vector. NONE returns every row (sequence embeddings)."""

    SUM = "SUM"
    MEAN = "MEAN"
    NONE = "NONE"


_TORCH_NAMES = {"FP64": "float64", "FP32": "float32", "FP16": "float16", "BF16": "bfloat16", "INT8": "uint8"}
_TORCH_NAMES |= {"INT4": "quint4x2", "INT2": "quint2x4", "FP8": "float8_e4m3fn"}


def data_type_to_dtype(data_type: DataType) -> "torch.dtype":
    """torch's number format of a table's.

    >>> data_type_to_dtype(DataType.BF16)
    torch.bfloat16
    """
    import torch

    dtype: torch.dtype = getattr(torch, _TORCH_NAMES[data_type.name])
    return dtype


def dtype_to_data_type(dtype: "torch.dtype") -> DataType:
    """A table's number format from torch's.

    Raises:
        ValueError: a format that no table can have.

    >>> import torch
    >>> dtype_to_data_type(torch.float16)
    <DataType.FP16: 'FP16'>
    """
    known = {data_type_to_dtype(data_type): data_type for data_type in DataType}
    if dtype not in known:
        raise ValueError(f"no table has weights of {dtype}: use one of {', '.join(map(str, known))}")
    return known[dtype]


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


@dataclass
class BaseEmbeddingConfig:
    """One embedding table.

    Args:
        num_embeddings: rows E; ids run from 0 to E - 1.
        embedding_dim: columns D.
        name: unique among the tables of a collection; it names the table in plans, state dicts and errors.
        data_type: number format of the weights.
        feature_names: the features looked up in this table; several features share its rows.
        weight_init_max: upper end of the uniform initial weights; ``1 / sqrt(E)`` when left out.
        weight_init_min: lower end; ``-1 / sqrt(E)`` when left out.
        init_fn: called with the weight tensor ``[E, D]`` instead of the uniform draw; fills it in place.

    Raises:
        ValueError: a size that is not a positive integer.
    """

    dynamic: ClassVar[bool] = False  # whether ids have any value, see `DynamicEmbeddingConfig`
    drawn_twice: ClassVar[bool] = False  # whether a new weight is normal, as torch.nn.Embedding's, before its draw

    num_embeddings: int
    embedding_dim: int
    name: str = ""
    data_type: DataType = DataType.FP32
    feature_names: list[str] = field(default_factory=list)
    weight_init_max: float | None = None
    weight_init_min: float | None = None
    init_fn: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        for field_name in ("num_embeddings", "embedding_dim"):
            value = getattr(self, field_name)
            positive = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            self._require(field_name, positive, "be a positive integer")
        if not isinstance(self.name, str):
            raise ValueError(f"a table's name must be a string, got {self.name!r}")
        formats = ", ".join(f"DataType.{kind.name}" for kind in DataType)
        self._require("data_type", isinstance(self.data_type, DataType), f"be one of {formats}")
        names = self.feature_names
        strings = isinstance(names, list | tuple) and all(isinstance(feature, str) for feature in names)
        self._require("feature_names", strings, "be a list of strings")
        self._require("init_fn", self.init_fn is None or callable(self.init_fn), "be called with a tensor")

    def _require(self, name: str, right: bool, expected: str) -> None:
        if not right:
            raise ValueError(f"table {self.name!r}: {name} must {expected}, got {getattr(self, name)!r}")

    def get_weight_init_max(self) -> float:
        """Upper end of the uniform initial weights."""
        return self.num_embeddings**-0.5 if self.weight_init_max is None else self.weight_init_max

    def get_weight_init_min(self) -> float:
        """Lower end of the uniform initial weights."""
        return -(self.num_embeddings**-0.5) if self.weight_init_min is None else self.weight_init_min

    @property
    def row_unit(self) -> int:
        """Row shards have a multiple of this many rows: more than 1 for dynamic tables."""
        return 1

    @property
    def least_equal_rows(self) -> int:
        """If above 0, row shards have equal sizes, of at least this many rows."""
        return 0

    @property
    def index_bytes_per_row(self) -> int:
        """Bytes of the index that a dynamic table stores with each row of each shard; 0 for static tables."""
        return 0

    def num_features(self) -> int:
        """How many features read this table."""
        return len(self.feature_names)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the whole table ``[E, D]``; of INT8, INT4 and INT2 with the scale and bias of each row.

        >>> BaseEmbeddingConfig(10, 64, "movies", DataType.INT8).weight_bytes
        680
        """
        header = ROW_HEADER_BYTES if self.data_type in (DataType.INT8, DataType.INT4, DataType.INT2) else 0
        return self.num_embeddings * (int(self.embedding_dim * self.data_type.bytes_per_element) + header)


@dataclass
class EmbeddingBagConfig(BaseEmbeddingConfig):
    """A table whose bags are pooled: one vector a sample and feature.

    >>> EmbeddingBagConfig(name="movies", num_embeddings=1682, embedding_dim=16).weight_bytes
    107648
    """

    pooling: PoolingType = PoolingType.SUM


@dataclass
class EmbeddingConfig(BaseEmbeddingConfig):
    """A table that returns one row per id (sequence embeddings)."""


def check_tables(tables: Sequence[BaseEmbeddingConfig]) -> None:
    """Checks the tables of a collection.

    Raises:
        ValueError: no tables, a table without a name or with a dot in it, two tables of one name, a table that no
            feature reads or that one reads twice.
    """
    if not tables:
        raise ValueError("tables is empty: give at least one EmbeddingBagConfig or EmbeddingConfig")
    seen: set[str] = set()
    for position, table in enumerate(tables):
        if not table.name:
            raise ValueError(f"table number {position} has no name: set name='...'")
        if table.name in seen:
            raise ValueError(
                f"two tables are named {table.name!r}: rename one, or list both features in one "
                f"table's feature_names to share its rows"
            )
        if "." in table.name:
            raise ValueError(f"table {table.name!r}: a name with a dot cannot be part of a state dict's key")
        if not table.feature_names:
            raise ValueError(f"table {table.name!r} has no feature_names: name the feature(s) that read it")
        if len(set(table.feature_names)) < len(table.feature_names):
            raise ValueError(f"table {table.name!r} names a feature twice: {table.feature_names}")
        seen.add(table.name)


def embedding_names_by_table(tables: Sequence[BaseEmbeddingConfig]) -> list[list[str]]:
    """For each table the key of each of its features' output: the feature, or feature@table if several read it.

    >>> movies = EmbeddingBagConfig(9, 4, "movies", feature_names=["liked", "seen"])
    >>> genres = EmbeddingBagConfig(9, 4, "genres", feature_names=["seen"])
    >>> embedding_names_by_table([movies, genres])
    [['liked', 'seen@movies'], ['seen@genres']]
    """
    readers = Counter(feature for table in tables for feature in table.feature_names)
    return [
        [feature if readers[feature] == 1 else f"{feature}@{table.name}" for feature in table.feature_names]
        for table in tables
    ]
