"""Recall of candidate indexes against the exact one, and their latency.

Over synthetic vectors around 1,000 centres. Each row names index and search setting. HNSW is built over fewer
vectors: its graph takes minutes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks import Figure, note
from recshard_lab.serving.retrieval import CandidateIndex, ExactIndex, FaissIndex, trade_offs
from recshard_lab.serving.retrieval.exact import Storage

CENTRES, SPREAD = 1000, 0.4
EXACT_RECALL = 0.9999
"""Matrix products of other sizes round differently, so that nearly equal scores change places."""


def figures(
    *, quick: bool = False, items: int = 1_000_000, graph_items: int = 100_000, dim: int = 64, k: int = 100
) -> list[Figure]:
    """Recall@k of each index and setting; beside it latencies of one query in milliseconds, and the size in MB."""
    if quick:
        items, graph_items = items // 20, graph_items // 5
    found = []
    for count in dict.fromkeys((items, graph_items)):
        vectors, queries = clustered(count, 200, dim)
        exact = ExactIndex(vectors)
        indexes: dict[str, CandidateIndex] = {"exact": exact}
        smaller: tuple[Storage, ...] = ("float16", "int8")
        for storage in smaller:
            indexes[f"exact, {storage}"] = ExactIndex(vectors, storage=storage)
        kept: tuple[Storage, ...] = ("float32", "int8")
        for storage in kept:
            note(f"building IVF, {storage}, {count:,} items")
            indexes[f"ivf, {storage}"] = FaissIndex(vectors, kind="ivf", storage=storage)
        if count == graph_items:
            note(f"building HNSW, {count:,} items")
            indexes["hnsw"] = FaissIndex(vectors, kind="hnsw")
        for row in trade_offs(
            indexes, queries, k, exact=exact, efforts=(1, 4, 16, 64, 128, 256, 512), single_queries=50
        ):
            name = f"{count:,} x {dim}, {row.index}" + (f", {row.setting}" if row.setting else "")
            target = EXACT_RECALL if row.index == "exact" else None
            beside = {
                "p50 ms": row.p50_ms,
                "p99 ms": row.p99_ms,
                "batch ms": row.batch_ms,
                "MB": row.storage_bytes / 1e6,
            }
            found.append(Figure(f"recall@{k}, {name}", row.recall, "", target=target, at_most=False, beside=beside))
    return found


def clustered(items: int, queries: int, dim: int) -> tuple[Tensor, Tensor]:
    """Vectors ``[items, dim]`` and queries ``[queries, dim]`` around common centres."""
    draw = torch.Generator().manual_seed(0)
    centres = torch.randn(CENTRES, dim, generator=draw)
    near = centres[torch.randint(CENTRES, (items + queries,), generator=draw)]
    near += SPREAD * torch.randn(items + queries, dim, generator=draw)
    return near[:items], near[items:]
