"""`quantize_embeddings`: a model for serving, from a trained one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from recshard_lab.arguments import checks_arguments
from recshard_lab.embedding.collections import PlainCollection
from recshard_lab.embedding.configs import DataType
from recshard_lab.embedding.dynamic.collections import DynamicCollection
from recshard_lab.embedding.dynamic.vocabulary import export_static
from recshard_lab.embedding.fused import FusedCollection
from recshard_lab.embedding.quantized.collections import (
    CHUNK_BYTES,
    QuantCollection,
    QuantEmbeddingBagCollection,
    QuantEmbeddingCollection,
    Types,
)
from recshard_lab.text_table import Printable, TextTable

if TYPE_CHECKING:
    from recshard_lab.saved.model import SavedModel


@checks_arguments
def quantize_embeddings(
    module: nn.Module,
    dtype: Types = DataType.INT8,
    inplace: bool = False,
    *,
    output_dtype: torch.dtype = torch.float32,
    backend: str | None = None,
    checkpoint: str | Path | None = None,
) -> nn.Module:
    """Makes a model for serving: embedding collections get small rows, the rest is copied.

    `EmbeddingBagCollection`, `EmbeddingCollection` and their fused forms become `QuantEmbeddingBagCollection` and
    `QuantEmbeddingCollection`. Dynamic collections go through `export_static` first.

    Rows are read a few megabytes at a time, so no whole table is copied in fp32. A `DistributedModelParallel` is
    unsharded on the way, which is collective: every rank returns the whole model. With ``checkpoint=``, this process
    reads alone.

    Args:
        module: a trained model. With ``checkpoint=``, its weights are not read, and it may be on the meta device.
        dtype: the number format of all tables, or table name -> format. Tables that the mapping lacks keep their
            format. A format is a `DataType` (FP32, FP16, BF16, FP8, INT8, INT4 or INT2), its name, or torch's dtype,
            such as ``qint8`` or ``quint4x2``.
        inplace: change the model instead of a copy. Not for sharded models. The result is in eval mode either way.
        output_dtype: of looked up rows: float32, float16 or bfloat16.
        backend: ``"fbgemm"`` or ``"native"``. Default: fbgemm where it can.
        checkpoint: read all weights from files: a folder that `save_checkpoint` or ``torch.distributed.checkpoint``
            wrote under any plan, or a state dict in a ``.safetensors``, ``.pt`` or ``.pth`` file. Tensors of the meta
            device move to the CPU.

    Raises:
        ValueError: an unknown format or table, no collection to quantize, weights that do not fit the format, or a
            checkpoint that is missing, damaged or of another model.

    >>> from recshard_lab.embedding import EmbeddingBagCollection, EmbeddingBagConfig
    >>> tables = [EmbeddingBagConfig(100, 16, "movies", feature_names=["seen"])]
    >>> small = quantize_embeddings(nn.Sequential(EmbeddingBagCollection(tables)), {"movies": "int4"})
    >>> small[0].weight_bytes()
    1200
    """
    module = getattr(module, "_bare", module)  # of DistributedModelParallel
    collections = {path: part for path, part in module.named_modules(remove_duplicate=False) if is_collection(part)}
    if not collections:
        raise ValueError(
            f"{type(module).__name__} has no embedding collection to quantize. Fix: pass the module that contains an "
            f"EmbeddingBagCollection or EmbeddingCollection"
        )
    _check_names(dtype if isinstance(dtype, Mapping) else (), collections.values())
    if inplace and any(hasattr(part, "row_chunks") for part in collections.values()):
        raise ValueError("inplace=True cannot change a sharded model. Fix: leave inplace out")
    saved = None if checkpoint is None else saved_model(checkpoint, collections)
    served: dict[int, nn.Module] = {}
    for path, part in collections.items():
        if id(part) not in served:
            served[id(part)] = _served(path, part, dtype, output_dtype, backend, saved)
    if "" in collections:
        return served[id(module)].eval()
    target = module if inplace else deepcopy(module, {id(part): part for part in collections.values()})
    for path, part in collections.items():
        parent, _, name = path.rpartition(".")
        setattr(target.get_submodule(parent), name, served[id(part)])
    if saved is not None:
        saved.fill(target, skip=collections)
    return target.eval()


def saved_model(path: str | Path, collections: Mapping[str, Any]) -> SavedModel:
    """The checkpoint of a model with these collections.

    Raises:
        ValueError: it is missing, damaged or of another model, or a collection has dynamic tables.
    """
    from recshard_lab.saved.model import SavedModel  # torch.distributed.checkpoint loads slowly

    for part in collections.values():
        if isinstance(part, DynamicCollection):
            raise ValueError(
                "checkpoint= does not read dynamic tables. Fix: load the checkpoint into the model and leave "
                "checkpoint out"
            )
    collection_path, part = next(iter(collections.items()))
    return SavedModel(path, weight_name(collection_path, part, configs_of(part)[0].name))


def weight_name(path: str, collection: Any, table: str) -> str:
    """The name of a table's weight in the state dict of the model."""
    return f"{path}.{collection.tables_name}.{table}.weight".removeprefix(".")


def row_chunks(path: str, collection: Any, table: Any, saved: SavedModel | None) -> Iterator[tuple[int, Tensor]]:
    """A table's first row, and rows ``[n, D]``, a few megabytes at a time: from a checkpoint or from the collection."""
    if saved is not None:
        size = (table.num_embeddings, table.embedding_dim)
        yield from saved.row_chunks(weight_name(path, collection, table.name), size)
    elif hasattr(collection, "row_chunks"):
        yield from collection.row_chunks(table.name)
    else:
        weight = collection.state_dict()[weight_name("", collection, table.name)]
        step = max(1, CHUNK_BYTES // (4 * table.embedding_dim))
        for first in range(0, len(weight), step):
            yield first, weight[first : first + step]


def is_collection(part: nn.Module) -> bool:
    """Whether `quantize_embeddings` replaces a module."""
    return isinstance(part, PlainCollection | FusedCollection) or hasattr(part, "row_chunks")


def configs_of(collection: Any) -> list[Any]:
    """The tables of a pooled or a sequence collection."""
    pooled = hasattr(collection, "embedding_bag_configs")
    return list(collection.embedding_bag_configs() if pooled else collection.embedding_configs())


def _check_names(names: Iterable[str], collections: Iterable[nn.Module]) -> None:
    known = {table.name for collection in collections for table in configs_of(collection)}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(
            f"dtype names table {unknown[0]!r}, which the model does not have. Fix: use one of "
            f"{', '.join(sorted(known))}"
        )


def _served(
    path: str,
    part: Any,
    dtype: Types,
    output_dtype: torch.dtype,
    backend: str | None,
    saved: SavedModel | None,
) -> nn.Module:
    if isinstance(part, DynamicCollection):
        static: Any = export_static(part)
        static.collection = _served(path, static.collection, dtype, output_dtype, backend, None)
        return static
    kind = QuantEmbeddingBagCollection if hasattr(part, "embedding_bag_configs") else QuantEmbeddingCollection
    device = "cpu" if saved is not None and part.device.type == "meta" else part.device
    served: Any = kind.empty_like(part, dtype, output_dtype, backend, device)
    for table in configs_of(part):
        for first, rows in row_chunks(path, part, table, saved):
            served.load_packed(table.name, rows, first)
    return served


# `quantization_report`: what small rows cost in accuracy, and what they save in bytes.


@dataclass(frozen=True)
class TableReport:
    """One table before and after.

    Attributes:
        name: of the table. path: of its collection in the model.
        data_type: the number format of the served table.
        rows, dim: its size.
        bytes_before, bytes_after: of its weights; scales and offsets included, optimizer states left out.
        max_error, mean_error: of ``|served - trained|`` over all numbers.
        max_relative: the largest error of a row over the row's range, ``max - min``. Rows of one value are left out.
    """

    name: str
    path: str
    data_type: str
    rows: int
    dim: int
    bytes_before: int
    bytes_after: int
    max_error: float
    mean_error: float
    max_relative: float


@dataclass(frozen=True)
class QuantizationReport(Printable):
    """Errors and bytes of every table; `print` it.

    Attributes:
        tables: one report each.
        scores: name of a metric -> its value for the trained and for the served model.
    """

    tables: tuple[TableReport, ...]
    scores: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def size_ratio(self) -> float:
        """Bytes of all served tables over those of the trained ones."""
        return sum(one.bytes_after for one in self.tables) / sum(one.bytes_before for one in self.tables)

    def records(self) -> list[dict[str, Any]]:
        """One dict per table, numbers unrounded."""
        return [dict(vars(one)) for one in self.tables]

    def parts(self) -> Sequence[str | TextTable]:
        """Scores, the size, and a row for each table."""
        heads = ("table", "format", "rows", "dim", "MB before", "MB after", "max error", "mean error", "of row's range")
        rows = [
            (
                one.name,
                one.data_type,
                f"{one.rows:,}",
                str(one.dim),
                f"{one.bytes_before / 1e6:,.3f}",
                f"{one.bytes_after / 1e6:,.3f}",
                f"{one.max_error:.3g}",
                f"{one.mean_error:.3g}",
                f"{one.max_relative:.2%}",
            )
            for one in self.tables
        ]
        lines = [
            f"{name}: {before:.5f} trained, {after:.5f} served, change {after - before:+.5f}"
            for name, (before, after) in self.scores.items()
        ]
        size = f"All tables take {self.size_ratio:.1%} of the bytes of the trained ones."
        return [*lines, size, TextTable(heads, rows, right=range(2, len(heads)))]


@checks_arguments
def quantization_report(
    trained: nn.Module,
    served: nn.Module,
    scores: Mapping[str, Callable[[nn.Module], float]] | None = None,
    *,
    checkpoint: str | Path | None = None,
) -> QuantizationReport:
    """Compares a model with its quantized form, table by table.

    Rows are read a few megabytes at a time. If ``trained`` is sharded, every rank calls this function.

    Args:
        trained: the model that `quantize_embeddings` took.
        served: the model that it returned.
        scores: name -> function of a model, called with both. An example is the AUC of held-out samples:
            ``{"AUC": lambda model: evaluate(model, test).auc}``.
        checkpoint: what `quantize_embeddings` read. The rows before are read from it, and ``trained`` may be on the
            meta device if there are no scores.

    Raises:
        ValueError: the models do not have the same tables, the model's tables are dynamic, or scores are required of a
            model on the meta device.

    >>> from recshard_lab.embedding import EmbeddingBagCollection, EmbeddingBagConfig, quantize_embeddings
    >>> model = EmbeddingBagCollection([EmbeddingBagConfig(100, 64, "movies", feature_names=["seen"])])
    >>> report = quantization_report(model, quantize_embeddings(model, "int8"))
    >>> f"{report.size_ratio:.4f}", report.tables[0].max_relative < 0.6 / 255
    ('0.2656', True)
    """
    bare = getattr(trained, "_bare", trained)  # of DistributedModelParallel
    sources = {path: part for path, part in bare.named_modules() if is_collection(part)}
    targets = {path: part for path, part in served.named_modules() if isinstance(part, QuantCollection)}
    if not targets or sources.keys() != targets.keys():
        have = ", ".join(map(repr, sources)) or "none"
        raise ValueError(
            f"the served model has quantized collections at {', '.join(map(repr, targets)) or 'no path'}, the trained "
            f"model has collections at {have}. Fix: pass a model of static tables and what quantize_embeddings made "
            f"of it"
        )
    if scores and any(tensor.is_meta for tensor in bare.parameters()):
        raise ValueError("scores need a trained model with weights, not one on the meta device. Fix: leave scores out")
    saved = None if checkpoint is None else saved_model(checkpoint, sources)
    tables = tuple(
        _compared(path, source, targets[path], table, saved)
        for path, source in sources.items()
        for table in configs_of(source)
    )
    with torch.no_grad():
        found = {name: (float(score(trained)), float(score(served))) for name, score in (scores or {}).items()}
    return QuantizationReport(tables, found)


@torch.no_grad()
def _compared(path: str, source: Any, target: Any, table: Any, saved: SavedModel | None) -> TableReport:
    known = {own.name: own for own in configs_of(target)}
    own = known.get(table.name)
    if own is None or (own.num_embeddings, own.embedding_dim) != (table.num_embeddings, table.embedding_dim):
        raise ValueError(f"table {table.name!r} is not the same in the served model. Fix: quantize this model again")
    before, most, total, relative = 0, 0.0, 0.0, 0.0
    for first, rows in row_chunks(path, source, table, saved):
        if not len(rows):
            continue
        before += rows.numel() * rows.element_size()
        rows = rows.float().cpu()
        error = (target.dequantized(table.name, slice(first, first + len(rows))).cpu() - rows).abs()
        most, total = max(most, float(error.max())), total + float(error.double().sum())
        span = rows.amax(1) - rows.amin(1)
        varied = span > 0
        if bool(varied.any()):
            relative = max(relative, float((error.amax(1)[varied] / span[varied]).max()))
    numbers = max(1, table.num_embeddings * table.embedding_dim)
    after = target.packed(table.name)
    return TableReport(
        table.name,
        path,
        own.data_type.value,
        table.num_embeddings,
        table.embedding_dim,
        before,
        after.numel() * after.element_size(),
        most,
        total / numbers,
        relative,
    )
