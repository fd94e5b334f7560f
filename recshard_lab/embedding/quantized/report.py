"""`quantization_report`: what small rows cost in accuracy, and what they save in bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.embedding.quantized.collections import QuantCollection
from recshard_lab.embedding.quantized.quantize import configs_of, is_collection, row_chunks, saved_model
from recshard_lab.text_table import Printable, TextTable

if TYPE_CHECKING:
    from recshard_lab.saved.model import SavedModel


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


@names_wrong_arguments
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
