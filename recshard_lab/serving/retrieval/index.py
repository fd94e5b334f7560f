"""The interface of all candidate indexes, and the checks and orders that they share.

An index holds vectors under item ids. Ids are any int64 values, negative ones too. A search returns the items with the
largest scores; equal scores are ordered by item id.

Shape letters: Q queries, N items, K columns, k results a query, M items of one call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recshard_lab.arguments import shown
from recshard_lab.complete_folders import FolderFormat, Staging, described
from recshard_lab.serving.retrieval.checks import (
    Exclude,
    Ids,
    Metric,
    checked_ids,
    checked_queries,
    excluded_rows,
    is_count,
    prepared,
)


class IndexFolderError(ValueError):
    """A saved index that is missing, incomplete, damaged or of another version."""


FORMAT = FolderFormat(
    noun="saved index",
    name="recshard_lab.index",
    version=1,
    error=IndexFolderError,
    fix="index.save(path) first",
)


class Found(NamedTuple):
    """Results of a search. One query ``[K]`` gives the same without the first dimension.

    Attributes:
        scores: ``[Q, k]`` float32, descending; -inf in places without a result.
        ids: ``[Q, k]`` int64 item ids; -1 in places without a result.
        counts: ``[Q]`` int64, results of each query. Fewer than k where fewer items are left.
    """

    scores: Tensor
    ids: Tensor
    counts: Tensor


@dataclass(frozen=True)
class IndexInfo:
    """What an index is.

    Attributes:
        kind: "exact", "ivf" or "hnsw"; of another FAISS index, its factory string.
        items: N.
        dim: K.
        metric: "inner_product" or "cosine".
        storage_bytes: vectors, graph or cells, and ids.
        settings: settings of this kind.
    """

    kind: str
    items: int
    dim: int
    metric: Metric
    storage_bytes: int
    settings: Mapping[str, Any] = field(default_factory=dict)


class CandidateIndex(ABC):
    """Item vectors that can be searched. All methods are thread-safe.

    A search sees every call of `add`, `replace` and `remove` completely or not at all.

    Attributes:
        dim: K.
        metric: "inner_product", or "cosine": vectors and queries are divided by their lengths.
        metadata: values for JSON, saved with the index.
    """

    dim: int
    metric: Metric
    metadata: dict[str, Any]

    @abstractmethod
    def __len__(self) -> int:
        """The number of items N."""

    @abstractmethod
    def ids(self) -> Tensor:
        """Item ids ``[N]``, ascending."""

    @abstractmethod
    def info(self) -> IndexInfo:
        """Kind, size and settings."""

    def __contains__(self, item: int) -> bool:
        return bool(self.contains(torch.tensor([item]))[0])

    @abstractmethod
    def contains(self, ids: Tensor) -> Tensor:
        """``[M]`` int64 -> ``[M]`` bool: whether each id is an item."""

    def add(self, vectors: Tensor, ids: Tensor) -> None:
        """Adds items.

        Args:
            vectors: ``[M, K]`` floating point.
            ids: ``[M]`` int64, none of them in the index.

        Raises:
            ValueError: another shape, a value that is not finite, an id that occurs twice or is in the index.
        """
        self._add(*prepared(vectors, ids, self.dim, self.metric))

    def replace(self, vectors: Tensor, ids: Tensor) -> None:
        """Replaces the vectors of items: ``[M, K]`` and ``[M]`` int64.

        Raises:
            ValueError: as for `add`, and an id that is not in the index.
        """
        self._replace(*prepared(vectors, ids, self.dim, self.metric))

    def remove(self, ids: Tensor) -> None:
        """Removes items ``[M]`` int64.

        Raises:
            ValueError: an id that occurs twice or is not in the index.
        """
        self._remove(checked_ids(ids))

    def search(self, queries: Tensor, k: int, exclude: Exclude = None) -> Found:
        """The k items with the largest scores for each query.

        Args:
            queries: ``[Q, K]`` or one query ``[K]``, floating point.
            k: 1 to N.
            exclude: Q sequences of item ids to leave out of the results of that query. Unknown ids are allowed.

        Raises:
            ValueError: no item, another shape, a value that is not finite, or k outside 1 to N.
        """
        if not len(self):
            raise ValueError("the index is empty: it has no result for any query. Fix: index.add(vectors, ids)")
        if not is_count(k) or k > len(self):
            raise ValueError(
                f"k={shown(k)} is outside 1 to {len(self)}, the number of items. Fix: pass k={len(self)} or less, "
                "or call search_up_to"
            )
        return self.search_up_to(queries, k, exclude)

    def search_up_to(self, queries: Tensor, k: int, exclude: Exclude = None) -> Found:
        """Like `search`, for any k from 1 and any number of items, which other threads may change.

        `Found.counts` has the number of results of each query.
        """
        if not is_count(k):
            raise ValueError(f"k={shown(k)} is not a number of results. Fix: pass a whole number from 1")
        single = isinstance(queries, Tensor) and queries.dim() == 1
        rows = checked_queries(queries.unsqueeze(0) if single else queries, self.dim, self.metric)
        found = self._find(rows, int(k), excluded_rows(exclude, len(rows)))
        return Found(*(part[0] for part in found)) if single else found

    def save(self, path: str | Path) -> None:
        """Writes the index to a folder, which is complete or absent at any time. Replaces an older saved index.

        Raises:
            IndexFolderError: the path has something else.
            OSError: the disk is full, or the path cannot be written.
        """
        with Staging(FORMAT, Path(path)) as staging:
            content = self.write(staging.path)
            staging.commit(described(staging.path.iterdir()), index=content)

    @abstractmethod
    def write(self, folder: Path) -> dict[str, Any]:
        """Writes the files. Returns what `load_index` needs beside them."""

    @abstractmethod
    def _find(self, queries: Tensor, k: int, exclude: list[Tensor] | None) -> Found:
        """Of checked queries ``[Q, K]`` float32; fewer results than k where there are fewer."""

    @abstractmethod
    def _add(self, vectors: Tensor, ids: Ids) -> None: ...

    @abstractmethod
    def _replace(self, vectors: Tensor, ids: Ids) -> None: ...

    @abstractmethod
    def _remove(self, ids: Ids) -> None: ...
