"""`quantize_embeddings`: a model for serving, from a trained one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.embedding.collections import EmbeddingBagCollection, EmbeddingCollection
from recshard_lab.embedding.configs import DataType
from recshard_lab.embedding.dynamic.collections import DynamicCollection
from recshard_lab.embedding.dynamic.export import export_static
from recshard_lab.embedding.fused_base import FusedCollection
from recshard_lab.embedding.quantized.collections import (
    QuantEmbeddingBagCollection,
    QuantEmbeddingCollection,
    Types,
    empty_like,
    fill_from,
    fill_from_state,
)
from recshard_lab.embedding.quantized.formats import served_type

Rows = Callable[[str, str], Iterator[tuple[int, Tensor]]]
"""Path of a collection and name of a table -> (first row, rows ``[n, D]``) until every row was there."""


@names_wrong_arguments
def quantize_embeddings(
    module: nn.Module,
    dtype: Types = DataType.INT8,
    inplace: bool = False,
    *,
    output_dtype: torch.dtype = torch.float32,
    backend: str | None = None,
) -> nn.Module:
    """Makes a model for serving: every embedding collection gets small rows, the rest is copied.

    `EmbeddingBagCollection`, `EmbeddingCollection` and their fused forms become `QuantEmbeddingBagCollection` and
    `QuantEmbeddingCollection`. Dynamic collections go through `export_static` first.

    A `DistributedModelParallel` is unsharded on the way, which is collective: every rank returns the whole model.
    Ranks send a few megabytes of rows at a time, and none has a whole table in fp32.

    Args:
        module: a trained model.
        dtype: the number format of all tables, or table name -> format; tables left out keep theirs. A `DataType` of
            FP32, FP16, BF16, FP8, INT8, INT4 and INT2, its name, or torch's dtype, such as ``qint8``, ``quint4x2``.
        inplace: change the model instead of a copy. Not for sharded models. The result is in eval mode either way.
        output_dtype: of looked up rows: float32, float16 or bfloat16.
        backend: ``"fbgemm"`` or ``"native"``. Default: fbgemm where it can.

    Raises:
        ValueError: an unknown format or table, no collection to quantize, or weights that do not fit the format.

    >>> from recshard_lab.embedding import EmbeddingBagConfig
    >>> tables = [EmbeddingBagConfig(100, 16, "movies", feature_names=["seen"])]
    >>> small = quantize_embeddings(nn.Sequential(EmbeddingBagCollection(tables)), {"movies": "int4"})
    >>> small[0].weight_bytes()
    1200
    """
    if not isinstance(inplace, bool):
        raise ValueError(f"inplace must be True or False, got {inplace!r:.80}")
    bare = getattr(module, "_bare", module)  # of DistributedModelParallel
    return replaced(bare, dtype, inplace, output_dtype, backend)


def replaced(
    module: nn.Module,
    dtype: Types,
    inplace: bool,
    output_dtype: torch.dtype,
    backend: str | None,
    rows: Rows | None = None,
) -> nn.Module:
    """The model with served collections in place of its own.

    Args:
        rows: reads the tables. Default: those of the model.
    """
    found = {path: part for path, part in module.named_modules(remove_duplicate=False) if is_collection(part)}
    if not found:
        raise ValueError(
            f"{type(module).__name__} has no embedding collection to quantize. Fix: pass the module that contains an "
            f"EmbeddingBagCollection or EmbeddingCollection"
        )
    _check_names(dtype, found.values())
    if inplace and any(hasattr(part, "row_chunks") for part in found.values()):
        raise ValueError("inplace=True cannot change a sharded model. Fix: leave inplace out")
    made: dict[int, nn.Module] = {}
    for path, part in found.items():
        if id(part) not in made:
            made[id(part)] = _served(path, part, dtype, output_dtype, backend, rows)
    if "" in found:
        return made[id(module)].eval()
    target = module if inplace else deepcopy(module, {id(part): part for part in found.values()})
    for path, part in found.items():
        parent, _, name = path.rpartition(".")
        setattr(target.get_submodule(parent), name, made[id(part)])
    return target.eval()


def is_collection(part: nn.Module) -> bool:
    """Whether `quantize_embeddings` replaces a module."""
    plain = isinstance(part, EmbeddingBagCollection | EmbeddingCollection | FusedCollection | DynamicCollection)
    return plain or hasattr(part, "row_chunks")


def configs_of(collection: Any) -> list[Any]:
    """The tables of a pooled or a sequence collection."""
    pooled = hasattr(collection, "embedding_bag_configs")
    return list(collection.embedding_bag_configs() if pooled else collection.embedding_configs())


def _check_names(dtype: Types, collections: Iterable[nn.Module]) -> None:
    if not isinstance(dtype, Mapping):
        served_type(dtype)
        return
    known = {table.name for collection in collections for table in configs_of(collection)}
    unknown = [name for name in dtype if name not in known]
    if unknown:
        names = ", ".join(sorted(known))
        raise ValueError(f"dtype names table {unknown[0]!r}, which the model does not have. Fix: use one of {names}")


def _served(
    path: str, part: Any, dtype: Types, output_dtype: torch.dtype, backend: str | None, rows: Rows | None
) -> nn.Module:
    if isinstance(part, DynamicCollection):
        static: Any = export_static(part)
        static.collection = _served(path, static.collection, dtype, output_dtype, backend, None)
        return static
    kind = QuantEmbeddingBagCollection if hasattr(part, "embedding_bag_configs") else QuantEmbeddingCollection
    on_meta = part.device.type == "meta"
    served = empty_like(kind, part, dtype, output_dtype, backend, "cpu" if rows is not None and on_meta else None)
    if rows is not None:
        fill_from(served, lambda name: rows(path, name))
    elif hasattr(part, "row_chunks"):
        fill_from(served, part.row_chunks)
    else:
        fill_from_state(served, part)
    return served
