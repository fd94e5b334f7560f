"""Checks of vectors, item ids and queries. Their errors name the item or the query.

Shape letters: Q queries, M items of one call, K columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from recshard_lab.arguments import shown

Metric = Literal["inner_product", "cosine"]
Exclude = Sequence[Sequence[int] | Tensor] | None
Ids = npt.NDArray[np.int64]


def is_count(value: Any) -> bool:
    """Whether a value is a whole number from 1 to 2**31 - 1."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(1 <= value < 1 << 31)


def checked_metric(metric: str) -> Metric:
    """
    Raises:
        ValueError: another metric.
    """
    if metric not in get_args(Metric):
        raise ValueError(f"metric={shown(metric)} is not supported. Fix: pass 'inner_product' or 'cosine'")
    return metric  # type: ignore[return-value]


def checked_ids(ids: Tensor) -> Ids:
    """Item ids ``[M]`` int64 as numpy.

    Raises:
        ValueError: another shape or dtype, or an id that occurs twice.
    """
    if not isinstance(ids, Tensor) or ids.dim() != 1 or ids.dtype != torch.int64 or ids.is_meta:
        got = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else shown(ids)
        raise ValueError(f"ids must be a tensor [M] int64, got {got}. Fix: pass torch.tensor([...], dtype=torch.int64)")
    numbers: Ids = ids.detach().cpu().numpy()
    order = np.sort(numbers)
    twice = order[1:][order[1:] == order[:-1]]
    if len(twice):
        raise ValueError(f"item id {twice[0]} occurs twice in one call. Fix: pass each item once")
    return numbers


def prepared(vectors: Tensor, ids: Tensor, dim: int | None, metric: Metric) -> tuple[Tensor, Ids]:
    """Vectors ``[M, K]`` float32, of length 1 for "cosine", and ids ``[M]``.

    Raises:
        ValueError: another shape, a value that is not finite, an id that occurs twice, a zero vector for "cosine".
    """
    numbers = checked_ids(ids)
    rows = _matrix(vectors, dim, "vectors")
    if len(rows) != len(numbers):
        raise ValueError(f"{len(rows)} vectors have {len(numbers)} ids. Fix: pass one id for each vector")
    _check_finite(rows, lambda row: f"the vector of item {numbers[row]}")
    if metric == "cosine":
        rows = _unit(rows, lambda row: f"the vector of item {numbers[row]}")
    return rows, numbers


def checked_queries(queries: Tensor, dim: int, metric: Metric) -> Tensor:
    """Queries ``[Q, K]`` float32, of length 1 for "cosine".

    Raises:
        ValueError: another shape, a value that is not finite, a zero query for "cosine".
    """
    rows = _matrix(queries, dim, "queries")
    _check_finite(rows, lambda row: f"query {row}")
    return _unit(rows, lambda row: f"query {row}") if metric == "cosine" else rows


def excluded_rows(exclude: Exclude, queries: int) -> list[Tensor] | None:
    """The ids that each query excludes; None if no query excludes any.

    Raises:
        ValueError: another number of sequences, or ids that are not whole numbers.
    """
    if exclude is None:
        return None
    if isinstance(exclude, Tensor) and exclude.dim() != 2:
        raise ValueError(f"exclude has shape {list(exclude.shape)}, expected one sequence of ids for each query")
    if len(exclude) != queries:
        raise ValueError(
            f"exclude has {len(exclude)} sequences for {queries} queries. Fix: pass one for each query, [] for none"
        )
    rows = []
    for query, own in enumerate(exclude):
        try:
            row = torch.as_tensor(own) if len(own) else torch.zeros(0, dtype=torch.int64)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"exclude[{query}]={shown(own)} is not a sequence of item ids: {error}") from error
        if row.dim() != 1 or row.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"exclude[{query}] must be item ids, got {row.dtype} {list(row.shape)}")
        rows.append(row.long().cpu())
    return rows if any(map(len, rows)) else None


def _matrix(vectors: Tensor, dim: int | None, name: str) -> Tensor:
    width = "K" if dim is None else dim
    if (
        not isinstance(vectors, Tensor)
        or vectors.dim() != 2
        or not vectors.is_floating_point()
        or vectors.is_meta
        or not vectors.shape[1]
        or (dim is not None and vectors.shape[1] != dim)
    ):
        got = f"{vectors.dtype} {list(vectors.shape)}" if isinstance(vectors, Tensor) else shown(vectors)
        raise ValueError(f"{name} must be a floating-point tensor [{name[0].upper()}, {width}], got {got}")
    return vectors.detach().float()


def _check_finite(rows: Tensor, named: Any) -> None:
    bad = ~torch.isfinite(rows)
    if bool(bad.any()):
        row, column = bad.nonzero()[0].tolist()
        raise ValueError(f"{named(row)} has {float(rows[row, column])} in column {column}. Fix: pass finite values")


def _unit(rows: Tensor, named: Any) -> Tensor:
    lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    zero = lengths[:, 0] == 0
    if bool(zero.any()):
        row = int(zero.nonzero()[0])
        raise ValueError(f"{named(row)} is zero: it has no cosine. Fix: metric='inner_product', or another vector")
    return rows / lengths
