"""`compare_formats`: one model with its tables in several number formats: bytes, score, time of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.embedding import quantization_report, quantize_embeddings
from recshard_lab.embedding.quantized.formats import served_type
from recshard_lab.text_table import Printable, TextTable

FORMATS = ("FP16", "BF16", "INT8", "INT4", "INT2")


@dataclass(frozen=True)
class FormatResult:
    """One model.

    Attributes:
        name: the number format of its tables. The trained model comes first.
        table_bytes: of all tables, with scales and offsets.
        score: of the model; None if no score was passed.
        ms: of one call, median of the rounds.
        max_error: the largest ``|served - trained|`` of all table entries.
    """

    name: str
    table_bytes: int
    score: float | None
    ms: float
    max_error: float


@dataclass(frozen=True)
class FormatComparison(Printable):
    """What `compare_formats` found; `print` it, or draw it with `lab.views.number_formats`.

    Attributes:
        results: the trained model, then each number format.
        score_name: what the score is.
        rounds: timed calls of each model.
    """

    results: tuple[FormatResult, ...]
    score_name: str = "AUC"
    rounds: int = 1

    def records(self) -> list[dict[str, Any]]:
        """One dict for each model, numbers unrounded."""
        return [dict(vars(result)) for result in self.results]

    def parts(self) -> Sequence[str | TextTable]:
        """The table."""
        return [self.table]

    @property
    def table(self) -> TextTable:
        """Rows of text, one for each model."""
        heads = ("tables", "MB", "of the first", self.score_name, "change", "ms per call", "max error")
        rows = []
        for one in self.results:
            first = self.results[0]
            scored = one.score is not None and first.score is not None
            rows.append(
                (
                    one.name,
                    f"{one.table_bytes / 1e6:,.3f}",
                    f"{one.table_bytes / first.table_bytes:.1%}" if first.table_bytes else "",
                    "" if one.score is None else f"{one.score:.5f}",
                    f"{one.score - first.score:+.5f}" if scored and one is not first else "",  # type: ignore[operator]
                    f"{one.ms:.3f}",
                    f"{one.max_error:.3g}",
                )
            )
        return TextTable(heads, rows, right=range(1, len(heads)))


@names_wrong_arguments
def compare_formats(
    model: nn.Module,
    arguments: Sequence[Any],
    score: Callable[[nn.Module], float] | None = None,
    *,
    formats: Sequence[Any] = FORMATS,
    score_name: str = "AUC",
    rounds: int = 20,
    backend: str | None = None,
) -> FormatComparison:
    """Quantizes a model to several number formats and compares them in one run.

    In each round every model is called once, one after the other, so that a change of the machine's speed meets all.

    Args:
        model: a trained model with static tables, in one process.
        arguments: of one call, such as ``(dense, features)``. Its time is the latency.
        score: a function of a model, such as its AUC on held-out samples.
        formats: number formats, as `quantize_embeddings` takes them.
        score_name: what the score is.
        rounds: timed calls of each model, after two that are not timed.
        backend: as of `quantize_embeddings`.

    Raises:
        ValueError: no format, an unknown one, or a model that cannot be quantized.

    >>> from recshard_lab import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    >>> tables = EmbeddingBagCollection([EmbeddingBagConfig(1000, 64, "movies", feature_names=["seen"])])
    >>> batch = KeyedJaggedTensor(["seen"], torch.tensor([1, 7, 2]), lengths=torch.tensor([2, 1]))
    >>> found = compare_formats(tables, (batch,), formats=["int8", "int4"], rounds=1)
    >>> [(one.name, one.table_bytes) for one in found.results]
    [('FP32', 256000), ('INT8', 68000), ('INT4', 36000)]
    """
    names = [served_type(one).value for one in formats]
    if not names or len(set(names)) != len(names) or rounds < 1:
        raise ValueError(f"formats must be different number formats and rounds at least 1, got {names}, {rounds}")
    was_training = model.training
    model.eval()
    served = {name: quantize_embeddings(model, name, backend=backend) for name in names}
    reports = {name: quantization_report(model, own) for name, own in served.items()}
    before = {kind: _before(report) for kind, report in reports.items()}[names[0]]
    models = {_kind_of(model): model, **served}
    times: dict[str, list[float]] = {name: [] for name in models}
    with torch.inference_mode():
        for number in range(rounds + 2):
            for name, own in models.items():
                begun = perf_counter()
                own(*arguments)
                if number > 1:
                    times[name].append(1e3 * (perf_counter() - begun))
        scores = {name: None if score is None else float(score(own)) for name, own in models.items()}
    model.train(was_training)
    results = []
    for name in models:
        report = reports.get(name)
        size = before if report is None else sum(table.bytes_after for table in report.tables)
        error = 0.0 if report is None else max(table.max_error for table in report.tables)
        results.append(FormatResult(name, size, scores[name], median(times[name]), error))
    return FormatComparison(tuple(results), score_name, rounds)


def _before(report: Any) -> int:
    return sum(table.bytes_before for table in report.tables)


def _kind_of(model: nn.Module) -> str:
    """The number format of the trained tables, or "trained" for several."""
    from recshard_lab.sharding import configs_of

    kinds = {table.data_type.value for part in model.modules() for table in configs_of(part) or ()}
    return kinds.pop() if len(kinds) == 1 else "trained"
