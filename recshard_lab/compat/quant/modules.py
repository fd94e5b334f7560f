"""``torchrec.quant.embedding_modules``: quantized collections with TorchRec's constructors and preparations.

A preparation sets an attribute of a float collection, which ``from_float`` reads.

Shape letters: E rows of a table, D columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from recshard_lab.embedding import (
    BaseEmbeddingConfig,
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    QuantEmbeddingBagCollection,
    QuantEmbeddingCollection,
)
from recshard_lab.embedding.configs import ROW_HEADER_BYTES as HEADER_BYTES
from recshard_lab.embedding.quantized.collections import with_types
from recshard_lab.embedding.quantized.formats import CODE_BITS, PackedTables, pack, served_type
from recshard_lab.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor

MODULE_ATTR_REGISTER_TBES_BOOL = "__register_tbes_in_named_modules"
MODULE_ATTR_QUANT_STATE_DICT_SPLIT_SCALE_BIAS = "__quant_state_dict_split_scale_bias"
MODULE_ATTR_ROW_ALIGNMENT_INT = "__register_row_alignment_in_named_modules"
MODULE_ATTR_EMB_CONFIG_NAME_TO_NUM_ROWS_POST_PRUNING_DICT = "__emb_name_to_num_rows_post_pruning"
MODULE_ATTR_REMOVE_STBE_PADDING_BOOL = "__remove_stbe_padding"
MODULE_ATTR_USE_UNFLATTENED_LENGTHS_FOR_BATCHING = "__use_unflattened_lengths_for_batching"
MODULE_ATTR_USE_BATCHING_HINTED_OUTPUT = "__use_batching_hinted_output"
MODULE_ATTR_CACHE_FEATURES_ORDER = "__cache_features_order"
DEFAULT_ROW_ALIGNMENT = 16

Quantized = Mapping[str, tuple[Tensor, Tensor | None]]
"""Table -> codes ``[E, bytes]`` uint8, and scale and bias ``[E, 4]`` uint8 (two fp16), or None for formats without."""


def for_each_module_of_type_do(
    module: nn.Module, module_types: Sequence[type[nn.Module]], op: Callable[[nn.Module], None]
) -> None:
    """Calls a function with each module of some types, the root included."""
    for part in module.modules():
        if isinstance(part, tuple(module_types)):
            op(part)


def _set(module: nn.Module, module_types: Sequence[type[nn.Module]], name: str, value: Any) -> None:
    for_each_module_of_type_do(module, module_types, lambda part: setattr(part, name, value))


def quant_prep_enable_quant_state_dict_split_scale_bias(module: nn.Module) -> None:
    """The state dict of the module that ``from_float`` makes of this one has scales and biases as separate tensors."""
    setattr(module, MODULE_ATTR_QUANT_STATE_DICT_SPLIT_SCALE_BIAS, True)


def quant_prep_enable_quant_state_dict_split_scale_bias_for_types(
    module: nn.Module, module_types: Sequence[type[nn.Module]]
) -> None:
    """`quant_prep_enable_quant_state_dict_split_scale_bias` of each module of some types."""
    _set(module, module_types, MODULE_ATTR_QUANT_STATE_DICT_SPLIT_SCALE_BIAS, True)


def quant_prep_enable_register_tbes(module: nn.Module, module_types: Sequence[type[nn.Module]]) -> None:
    """Marks modules of some types as in TorchRec. Kernels are not modules here, so ``from_float`` registers none."""
    _set(module, module_types, MODULE_ATTR_REGISTER_TBES_BOOL, True)


def quant_prep_customize_row_alignment(
    module: nn.Module, module_types: Sequence[type[nn.Module]], row_alignment: int
) -> None:
    """Marks modules of some types as in TorchRec. The device determines the alignment of rows here."""
    _set(module, module_types, MODULE_ATTR_ROW_ALIGNMENT_INT, row_alignment)


def quant_prep_enable_cache_features_order(module: nn.Module, module_types: Sequence[type[nn.Module]]) -> None:
    """Marks modules of some types as in TorchRec. The order of features is cached in any case here."""
    _set(module, module_types, MODULE_ATTR_CACHE_FEATURES_ORDER, True)


def quantize_state_dict(
    module: nn.Module,
    table_name_to_quantized_weights: dict[str, tuple[Tensor, Tensor | None]],
    table_name_to_data_type: Mapping[str, DataType],
    table_name_to_num_embeddings_post_pruning: Mapping[str, int] | None = None,
) -> torch.device:
    """Quantizes the tables of a float collection.

    Args:
        module: the collection.
        table_name_to_quantized_weights: is filled; see `Quantized`.
        table_name_to_data_type: the number format of each table.
        table_name_to_num_embeddings_post_pruning: the first rows that are kept. Default: all.

    Returns:
        The device of the tables.

    Raises:
        KeyError: a table without a number format.
        IndexError: a module without tables.
    """
    device: torch.device | None = None
    for key, weight in module.state_dict().items():
        if not key.endswith(".weight") or key.split(".")[-3:-2] not in (["embedding_bags"], ["embeddings"]):
            continue
        name, device = key.split(".")[-2], weight.device
        kind = served_type(table_name_to_data_type[name])
        rows = (table_name_to_num_embeddings_post_pruning or {}).get(name, len(weight))
        packed = pack(weight[:rows].detach(), kind, name)
        coded = kind in CODE_BITS
        table_name_to_quantized_weights[name] = (
            packed[:, HEADER_BYTES:] if coded else packed,
            packed[:, :HEADER_BYTES] if coded else None,
        )
    if device is None:
        raise IndexError(f"{type(module).__name__} has no tables to quantize")
    return device


class _Tables:
    """What both collections add: given weights, the split state dict, and ``from_float`` with preparations."""

    _shown_name: str
    _split: bool
    _tables: list[BaseEmbeddingConfig]
    tables_name: str

    def _store(self, packed: PackedTables) -> None:
        super()._store(packed)  # type: ignore[misc]
        if self._split:
            self._show_split()

    def _get_name(self) -> str:
        return self._shown_name

    @classmethod
    def from_float(cls, module: nn.Module, use_precomputed_fake_quant: bool = False) -> Any:
        """The same tables with small rows, as ``module.qconfig`` and the preparations of the module request them.

        Args:
            module: a float collection. Without ``qconfig`` its tables become INT8.
            use_precomputed_fake_quant: not read. ``torch.ao.quantization`` passes it.

        Raises:
            ValueError: weights that are not finite or do not fit the format.
        """
        return _prepared(cls, module)

    def _fill(self, weights: Quantized | None) -> None:
        """Takes the bytes of tables."""
        for number, table in enumerate(self._tables):
            if weights is None or table.name not in weights:
                continue
            codes, header = weights[table.name]
            rows = self._packed.rows_of(number)  # type: ignore[attr-defined]
            given = codes if header is None else torch.cat([header, codes], dim=1)
            if given.shape != rows.shape:
                raise ValueError(
                    f"table {table.name!r} has {list(rows.shape)} bytes, and its weights have {list(given.shape)}"
                )
            rows.copy_(given)

    def _show_split(self) -> None:
        """Shows scales and biases as separate buffers: views of the bytes."""
        for number, table in enumerate(self._tables):
            if table.data_type not in CODE_BITS:
                continue
            rows = self._packed.rows_of(number)  # type: ignore[attr-defined]
            if rows.shape[1] % 2:
                raise ValueError(f"table {table.name!r} has rows of {rows.shape[1]} bytes, which have no fp16 views")
            holder = getattr(self, self.tables_name)[table.name]
            header = rows[:, :HEADER_BYTES].view(torch.float16)
            for name, part in (
                ("weight", rows[:, HEADER_BYTES:]),
                ("weight_qscale", header[:, :1]),
                ("weight_qbias", header[:, 1:]),
            ):
                holder.register_buffer(name, part)


def _check_layout(row_alignment: int) -> None:
    if row_alignment < 1:
        raise ValueError(f"row_alignment={row_alignment} is not a number of bytes. Fix: row_alignment=16")


def _prepared(kind: Any, module: Any, **more: Any) -> Any:
    """The quantized collection of a float one, after its preparations."""
    pruned: Mapping[str, int] = getattr(module, MODULE_ATTR_EMB_CONFIG_NAME_TO_NUM_ROWS_POST_PRUNING_DICT, {})
    pooled = issubclass(kind, QuantEmbeddingBagCollection)
    config = getattr(module, "qconfig", None)
    types: Any = DataType.INT8 if config is None else config.weight().dtype
    tables = list(module.embedding_bag_configs() if pooled else module.embedding_configs())
    own = getattr(config, "per_table_weight_dtype", None) or {}
    tables = with_types(tables, {table.name: own.get(table.name, types) for table in tables})
    kept = [replace(table, num_embeddings=pruned.get(table.name, table.num_embeddings)) for table in tables]
    if pooled:
        more["is_weighted"] = module.is_weighted()
    else:
        more["need_indices"] = module.need_indices()
    served = kind(
        kept,
        device=module.device,
        output_dtype=torch.float32 if config is None else config.activation().dtype,
        quant_state_dict_split_scale_bias=getattr(module, MODULE_ATTR_QUANT_STATE_DICT_SPLIT_SCALE_BIAS, False),
        out_of_range=getattr(module, "out_of_range", "error"),
        **more,
    )
    weights = module.state_dict()
    for table in kept:
        rows = weights[f"{served.tables_name}.{table.name}.weight"][: table.num_embeddings]
        served.load_packed(table.name, rows)
    return served


class EmbeddingBagCollection(_Tables, QuantEmbeddingBagCollection):  # type: ignore[misc]
    """`QuantEmbeddingBagCollection` with TorchRec's constructor.

    Args:
        tables, is_weighted, device, output_dtype: as of `QuantEmbeddingBagCollection`.
        table_name_to_quantized_weights: the bytes of tables; see `Quantized`. Default: zeros.
        register_tbes: accepted as in TorchRec. Kernels are not modules here.
        quant_state_dict_split_scale_bias: whether the state dict has ``weight_qscale`` and ``weight_qbias``, fp16
            ``[E, 1]``, beside the codes of ``weight``.
        row_alignment: accepted as in TorchRec. The device determines the alignment of rows here.
        cache_features_order: accepted as in TorchRec. The order is cached in any case here.
        out_of_range, backend: as of `QuantEmbeddingBagCollection`.

    Raises:
        ValueError: weights of another shape, and as of `QuantEmbeddingBagCollection`.
    """

    _shown_name = "QuantizedEmbeddingBagCollection"

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        output_dtype: torch.dtype = torch.float32,
        table_name_to_quantized_weights: Quantized | None = None,
        register_tbes: bool = False,
        quant_state_dict_split_scale_bias: bool = False,
        row_alignment: int = DEFAULT_ROW_ALIGNMENT,
        cache_features_order: bool = False,
        *,
        out_of_range: str = "error",
        backend: str | None = None,
    ) -> None:
        _check_layout(row_alignment)
        self._split = quant_state_dict_split_scale_bias
        super().__init__(tables, is_weighted, device, output_dtype, out_of_range=out_of_range, backend=backend)
        self._fill(table_name_to_quantized_weights)


class EmbeddingCollection(_Tables, QuantEmbeddingCollection):  # type: ignore[misc]
    """`QuantEmbeddingCollection` with TorchRec's constructor.

    Args:
        tables, device, need_indices, output_dtype: as of `QuantEmbeddingCollection`.
        others: as of `EmbeddingBagCollection` here.

    Raises:
        ValueError: weights of another shape, and as of `QuantEmbeddingCollection`.
    """

    _shown_name = "QuantizedEmbeddingCollection"

    def __init__(
        self,
        tables: list[EmbeddingConfig],
        device: torch.device | str | None = None,
        need_indices: bool = False,
        output_dtype: torch.dtype = torch.float32,
        table_name_to_quantized_weights: Quantized | None = None,
        register_tbes: bool = False,
        quant_state_dict_split_scale_bias: bool = False,
        row_alignment: int = DEFAULT_ROW_ALIGNMENT,
        cache_features_order: bool = False,
        *,
        out_of_range: str = "error",
        backend: str | None = None,
    ) -> None:
        _check_layout(row_alignment)
        self._split = quant_state_dict_split_scale_bias
        super().__init__(tables, device, need_indices, output_dtype, out_of_range=out_of_range, backend=backend)
        self._fill(table_name_to_quantized_weights)


class FeatureProcessedEmbeddingBagCollection(EmbeddingBagCollection):
    """A quantized collection after a feature processor, which computes the weights of ids.

    Args:
        feature_processor: a collection of processors: batch -> batch with weights.
        others: as of `EmbeddingBagCollection`; the collection is weighted.
    """

    _shown_name = "QuantFeatureProcessedEmbeddingBagCollection"

    def __init__(self, *args: Any, feature_processor: nn.Module | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if feature_processor is None:
            raise ValueError("a feature processed collection needs feature_processor=")
        self.feature_processor = feature_processor

    @classmethod
    def from_float(cls, module: nn.Module, use_precomputed_fake_quant: bool = False) -> Any:  # type: ignore[override]
        """The same processors and tables, of a `FeatureProcessedEmbeddingBagCollection`."""
        inner: Any = module._embedding_bag_collection
        inner.qconfig = getattr(module, "qconfig", getattr(inner, "qconfig", None))
        return _prepared(cls, inner, feature_processor=module._feature_processors)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Looks up one batch with the weights that the processor computes."""
        return super().forward(self.feature_processor(features))

    def around(self, lookup: nn.Module) -> nn.Module:
        """Copies of the processors before a sharded form of this collection."""
        return nn.Sequential(deepcopy(self.feature_processor), lookup)


class _Managed:
    """What both managed collections add: ids of any value become rows before the lookup."""

    _managed_collision_collection: nn.Module
    _return_remapped_features: bool

    def _manage(self, collection: nn.Module | None, return_remapped_features: bool) -> None:
        if collection is None:
            raise ValueError("a managed collection needs managed_collision_collection=")
        self._managed_collision_collection = collection.eval()
        self._return_remapped_features = return_remapped_features

    def around(self, lookup: nn.Module) -> nn.Module:
        """A copy of the modules that find rows, before a sharded form of this collection."""
        return ManagedLookup(deepcopy(self._managed_collision_collection), lookup, self._return_remapped_features)

    def _remapped(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        remapped: KeyedJaggedTensor = self._managed_collision_collection(features)
        return remapped


class ManagedLookup(nn.Module):
    """Finds the rows of ids, then looks them up.

    Args:
        managed_collision_collection: finds the rows.
        lookup: a collection.
        return_remapped_features: whether a forward also returns the rows of ids.
    """

    def __init__(
        self, managed_collision_collection: nn.Module, lookup: nn.Module, return_remapped_features: bool
    ) -> None:
        super().__init__()
        self._managed_collision_collection, self.lookup = managed_collision_collection, lookup
        self._return_remapped_features = return_remapped_features

    def forward(self, features: KeyedJaggedTensor) -> tuple[Any, KeyedJaggedTensor | None]:
        """Looks up one batch. Returns what the collection returns, and the rows of ids or None."""
        remapped = self._managed_collision_collection(features)
        return self.lookup(remapped), remapped if self._return_remapped_features else None


class QuantManagedCollisionEmbeddingBagCollection(_Managed, EmbeddingBagCollection):
    """A quantized collection whose ids have any value. Ids get no new rows.

    Args:
        managed_collision_collection: the modules of the tables.
        return_remapped_features: whether a forward also returns the rows of ids.
        others: as of `EmbeddingBagCollection`.
    """

    def __init__(
        self,
        *args: Any,
        managed_collision_collection: nn.Module | None = None,
        return_remapped_features: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._manage(managed_collision_collection, return_remapped_features)

    @classmethod
    def from_float(cls, module: nn.Module, return_remapped_features: bool = False) -> Any:  # type: ignore[override]
        """The same modules and tables, of a `ManagedCollisionEmbeddingBagCollection`.

        As in TorchRec, its forward returns the rows of ids for both values of `return_remapped_features`.
        """
        return _managed_from(cls, module)

    def forward(  # type: ignore[override]
        self, features: KeyedJaggedTensor
    ) -> tuple[KeyedTensor, KeyedJaggedTensor | None]:
        """Looks up one batch. Returns the pooled rows, and the rows of ids or None."""
        remapped = self._remapped(features)
        return super().forward(remapped), remapped if self._return_remapped_features else None


class QuantManagedCollisionEmbeddingCollection(_Managed, EmbeddingCollection):
    """`QuantManagedCollisionEmbeddingBagCollection` for sequences. Arguments are those, as of `EmbeddingCollection`."""

    def __init__(
        self,
        *args: Any,
        managed_collision_collection: nn.Module | None = None,
        return_remapped_features: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._manage(managed_collision_collection, return_remapped_features)

    @classmethod
    def from_float(cls, module: nn.Module, return_remapped_features: bool = False) -> Any:  # type: ignore[override]
        """As `QuantManagedCollisionEmbeddingBagCollection.from_float`."""
        return _managed_from(cls, module)

    def forward(  # type: ignore[override]
        self, features: KeyedJaggedTensor
    ) -> tuple[dict[str, JaggedTensor], KeyedJaggedTensor | None]:
        """Looks up one batch. Returns a row for each id, and the rows of ids or None."""
        remapped = self._remapped(features)
        return super().forward(remapped), remapped if self._return_remapped_features else None


def _managed_from(kind: Any, module: Any) -> Any:
    inner = module.embedding_module
    inner.qconfig = getattr(module, "qconfig", getattr(inner, "qconfig", None))
    return _prepared(
        kind,
        inner,
        managed_collision_collection=module.managed_collision_collection,
        return_remapped_features=True,
    )


def meta_to_cpu_placement(module: nn.Module) -> None:
    """Moves the quantized collections of a model from the meta device to the CPU. Their bytes are not set."""
    for part in module.modules():
        if isinstance(part, QuantEmbeddingBagCollection | QuantEmbeddingCollection) and part.device.type == "meta":
            part.to_empty(device="cpu")
