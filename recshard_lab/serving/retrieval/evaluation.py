"""Recall of an index against the exact one and against clicks, and its latency, for several search settings.

Shape letters: Q queries, K columns, k results a query.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.serving.retrieval.checks import Exclude
from recshard_lab.serving.retrieval.faiss_index import FaissIndex
from recshard_lab.serving.retrieval.index import CandidateIndex
from recshard_lab.text_table import TextTable

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True)
class TradeOff:
    """An index under one search setting.

    Attributes:
        index: its name.
        setting: such as "nprobe=8"; empty if it has none.
        k: results a query.
        recall: share of the exact results that it finds.
        recall_of_clicks: share of held-out clicks among its results; None without clicks.
        p50_ms, p95_ms, p99_ms: latency of one query alone, in milliseconds.
        batch_ms: milliseconds a query when all queries are one batch.
        storage_bytes: of the index.
    """

    index: str
    setting: str
    k: int
    recall: float
    recall_of_clicks: float | None
    p50_ms: float
    p95_ms: float
    p99_ms: float
    batch_ms: float
    storage_bytes: int


@names_wrong_arguments
def recall_of(found: Tensor, exact: Tensor) -> float:
    """The share of the exact results that were found, over all queries.

    Args:
        found: ``[Q, k]`` item ids.
        exact: ``[Q, k']`` item ids.

    Raises:
        ValueError: other shapes.

    >>> recall_of(torch.tensor([[4, 2]]), torch.tensor([[2, 7]]))
    0.5
    """
    if found.dim() != 2 or exact.dim() != 2 or found.shape[0] != exact.shape[0] or not exact.numel() or found.is_meta:
        raise ValueError(f"found and exact must be item ids [Q, k], got {list(found.shape)} and {list(exact.shape)}")
    return sum(int(torch.isin(own, row).sum()) for own, row in zip(exact, found, strict=True)) / exact.numel()


@names_wrong_arguments
def recall_of_clicks(found: Tensor, clicks: Sequence[Tensor]) -> float:
    """The share of held-out clicks that were found, over all clicks.

    Args:
        found: ``[Q, k]`` item ids.
        clicks: for each query, the ids of its clicked items.

    Raises:
        ValueError: another number of queries, or no click.

    >>> recall_of_clicks(torch.tensor([[4, 2], [1, 3]]), [torch.tensor([2, 9]), torch.tensor([], dtype=torch.int64)])
    0.5
    """
    total = sum(map(len, clicks))
    if len(clicks) != len(found) or not total:
        raise ValueError(f"clicks has {len(clicks)} entries with {total} clicks for {len(found)} queries")
    return sum(int(torch.isin(own, row).sum()) for own, row in zip(clicks, found, strict=True)) / total


@names_wrong_arguments
def trade_offs(
    indexes: Mapping[str, CandidateIndex],
    queries: Tensor,
    k: int,
    *,
    exact: CandidateIndex,
    efforts: Sequence[int] = (1, 4, 16, 64, 256),
    clicks: Sequence[Tensor] | None = None,
    exclude: Exclude = None,
    single_queries: int = 100,
) -> list[TradeOff]:
    """Recall and latency of indexes: one row for each search setting, for a table and a chart.

    Args:
        indexes: name -> index. IVF indexes are searched with each effort as ``nprobe`` up to their number of cells,
            HNSW indexes with each as ``ef_search`` from k on. Their settings are restored.
        queries: ``[Q, K]``.
        k: results a query.
        exact: holds the same items; what it finds is the truth.
        efforts: values of ``nprobe`` and ``ef_search``.
        clicks: for each query, the ids of held-out clicks.
        exclude: as for `CandidateIndex.search`.
        single_queries: how many queries are timed alone.
    """
    truth = exact.search(queries, k, exclude).ids
    rows = []
    for name, index in indexes.items():
        for setting, value in _settings(index, k, efforts):
            before = getattr(index, setting) if setting else None
            try:
                if setting:
                    setattr(index, setting, value)
                found = index.search(queries, k, exclude).ids
                times = _single_ms(index, queries, k, exclude, single_queries)
                begun = time.perf_counter()
                index.search(queries, k, exclude)
                batch_ms = 1e3 * (time.perf_counter() - begun) / len(queries)
            finally:
                if setting:
                    setattr(index, setting, before)
            shares = None if clicks is None else recall_of_clicks(found, clicks)
            p50, p95, p99 = (float(own) for own in np.percentile(times, PERCENTILES))
            shown = f"{setting}={value}" if setting else ""
            size = index.info().storage_bytes
            rows.append(TradeOff(name, shown, k, recall_of(found, truth), shares, p50, p95, p99, batch_ms, size))
    return rows


def as_table(rows: Sequence[TradeOff]) -> TextTable:
    """The rows as a table for a terminal or a notebook.

    >>> row = TradeOff("ivf", "nprobe=4", 100, 0.91, None, 0.2, 0.3, 0.4, 0.05, 2_000_000)
    >>> print(as_table([row]).text.splitlines()[1].split())
    ['ivf', 'nprobe=4', '0.9100', '-', '0.200', '0.300', '0.400', '0.050', '2.0']
    """
    heads = ["index", "setting", "recall", "of clicks", "p50 ms", "p95 ms", "p99 ms", "batch ms", "MB"]
    cells = [
        (
            row.index,
            row.setting,
            f"{row.recall:.4f}",
            "-" if row.recall_of_clicks is None else f"{row.recall_of_clicks:.4f}",
            *(f"{own:.3f}" for own in (row.p50_ms, row.p95_ms, row.p99_ms, row.batch_ms)),
            f"{row.storage_bytes / 1e6:,.1f}",
        )
        for row in rows
    ]
    return TextTable(tuple(heads), tuple(cells))


def as_records(rows: Sequence[TradeOff]) -> list[dict[str, Any]]:
    """The rows as dicts, for a data frame or JSON."""
    return [asdict(row) for row in rows]


def _settings(index: CandidateIndex, k: int, efforts: Sequence[int]) -> list[tuple[str, int]]:
    """(name of the setting, value); ("", 0) if the index has none."""
    own = index.info().settings if isinstance(index, FaissIndex) else {}
    if "nprobe" in own:
        return [("nprobe", value) for value in efforts if value <= own["cells"]]
    if "ef_search" in own:
        return [("ef_search", value) for value in efforts if value >= k] or [("ef_search", k)]
    return [("", 0)]


def _single_ms(index: CandidateIndex, queries: Tensor, k: int, exclude: Exclude, count: int) -> list[float]:
    """Milliseconds of single queries, after warming up."""
    index.search(queries[:1], k, None if exclude is None else exclude[:1])
    taken = []
    for row in range(min(count, len(queries))):
        begun = time.perf_counter()
        index.search(queries[row : row + 1], k, None if exclude is None else exclude[row : row + 1])
        taken.append(1e3 * (time.perf_counter() - begun))
    return taken
