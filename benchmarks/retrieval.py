"""Recall of candidate indexes against the exact one, their latency, memory and build time.

Over synthetic vectors around 1,000 centres. Each row names index and search setting. The graph of HNSW over a million
vectors takes minutes to build; ``--quick`` has fewer vectors.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks import Figure, note
from recshard_lab.serving.retrieval import CandidateIndex, ExactIndex, FaissIndex, trade_offs

CENTRES, SPREAD = 1000, 0.4
EXACT_RECALL = 0.9999
"""Matrix products of other sizes round differently, so that nearly equal scores change places."""


def figures(*, quick: bool = False, items: int = 1_000_000, dim: int = 64, k: int = 100) -> list[Figure]:
    """Recall@k of each index and setting.

    Beside it: milliseconds of one query alone and of one in a batch of 200, and the index's size and build time.
    """
    items = items // 20 if quick else items
    vectors, queries = clustered(items, 200, dim)
    builders: dict[str, Callable[[], CandidateIndex]] = {
        "exact": lambda: ExactIndex(vectors),
        "exact, float16": lambda: ExactIndex(vectors, storage="float16"),
        "exact, int8": lambda: ExactIndex(vectors, storage="int8"),
        "ivf, float32": lambda: FaissIndex(vectors, kind="ivf"),
        "ivf, int8": lambda: FaissIndex(vectors, kind="ivf", storage="int8"),
        "hnsw": lambda: FaissIndex(vectors, kind="hnsw"),
    }
    indexes, seconds = {}, {}
    for name, build in builders.items():
        note(f"building {name}, {items:,} items ...")
        begun = time.perf_counter()
        indexes[name] = build()
        seconds[name] = time.perf_counter() - begun
    found = []
    efforts = (1, 4, 16, 64, 128, 256, 512)
    for row in trade_offs(indexes, queries, k, exact=indexes["exact"], efforts=efforts, single_queries=50):
        name = f"{items:,} x {dim}, {row.index}" + (f", {row.setting}" if row.setting else "")
        beside = {
            "p50 ms": row.p50_ms,
            "p99 ms": row.p99_ms,
            "batch ms": row.batch_ms,
            "MB": row.storage_bytes / 1e6,
            "build s": seconds[row.index],
        }
        target = EXACT_RECALL if row.index == "exact" else None
        found.append(Figure(f"recall@{k}, {name}", row.recall, "", target=target, at_most=False, beside=beside))
    return found


def clustered(items: int, queries: int, dim: int) -> tuple[Tensor, Tensor]:
    """Vectors ``[items, dim]`` and queries ``[queries, dim]`` around common centres."""
    draw = torch.Generator().manual_seed(0)
    centres = torch.randn(CENTRES, dim, generator=draw)
    near = centres[torch.randint(CENTRES, (items + queries,), generator=draw)]
    near += SPREAD * torch.randn(items + queries, dim, generator=draw)
    return near[:items], near[items:]
