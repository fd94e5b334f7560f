"""Vectors, a search by definition, and the kinds of indexes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from recshard_lab.serving.retrieval import CandidateIndex, ExactIndex, FaissIndex

MAKERS: dict[str, Callable[..., CandidateIndex]] = {
    "exact": ExactIndex,
    "exact, slices": partial(ExactIndex, slice_rows=7),
    "flat": partial(FaissIndex, kind="Flat"),
    "ivf": partial(FaissIndex, kind="ivf", cells=4, nprobe=4),  # every cell is searched
    "hnsw": partial(FaissIndex, kind="hnsw", links=16, ef_search=400),
}
"""All find the exact results in small spaces."""


def space(items: int = 200, queries: int = 6, dim: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Vectors ``[items, dim]``, ids of any value, queries ``[queries, dim]``."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randperm(5 * items, generator=draw)[:items] * 10_007 - 2**40
    ids[:2] = torch.tensor([-1, 2**63 - 1])
    vectors = torch.randn(items, dim, generator=draw)
    return vectors, ids, torch.randn(queries, dim, generator=draw)


def whole_numbers(items: int = 90, queries: int = 6, dim: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """Small whole numbers: scores have no rounding and many are equal."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randperm(items, generator=draw) - items // 2
    vectors, asked = (torch.randint(-2, 3, (n, dim), generator=draw).float() for n in (items, queries))
    return vectors, ids, asked


def by_definition(
    table: dict[int, Tensor], query: Tensor, k: int, exclude: Any = (), cosine: bool = False
) -> list[tuple[float, int]]:
    """(score, id) of the k best of a dict id -> vector, equal scores by id."""
    out = {int(own) for own in exclude}
    unit = (lambda v: v / v.square().sum().sqrt()) if cosine else (lambda v: v)
    scored = [(float(unit(query) @ unit(vector)), own) for own, vector in table.items() if own not in out]
    return sorted(scored, key=lambda pair: (-pair[0], pair[1]))[:k]


def table_of(vectors: Tensor, ids: Tensor) -> dict[int, Tensor]:
    """id -> vector"""
    return dict(zip(ids.tolist(), vectors, strict=True))
