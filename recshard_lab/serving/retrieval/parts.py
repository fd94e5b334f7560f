"""An index whose items are split over several indexes, in one process.

Shape letters: Q queries, N items, K columns, k results a query, M items of one call, P parts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.serving.retrieval.checks import Ids
from recshard_lab.serving.retrieval.index import CandidateIndex, Found, IndexInfo
from recshard_lab.serving.retrieval.merging import merged

MakeIndex = Callable[[Tensor, Tensor], CandidateIndex]
"""Builds an index of vectors ``[N, K]`` and ids ``[N]``: `ExactIndex`, or a partial of `FaissIndex`."""


@names_wrong_arguments
class PartitionedIndex(CandidateIndex):
    """Searches every part and merges the results. Exact parts return the results of one exact index.

    Scores may differ from those of one index in the last bit: matrix products round by the number of rows. A search
    sees a change of items in several parts part by part.

    Args:
        parts: at least one index, of one dim and metric; no two have the same item.
        metadata: values for JSON, saved with the index.

    Raises:
        ValueError: no part, parts of different dim or metric, or an item in two parts.

    >>> from recshard_lab.serving.retrieval import ExactIndex
    >>> index = PartitionedIndex.build(torch.eye(3), torch.tensor([4, 5, 6]), ExactIndex, 2)
    >>> index.search(torch.tensor([0.0, 1.0, 2.0]), 2).ids.tolist()
    [6, 5]
    """

    def __init__(self, parts: Sequence[CandidateIndex], metadata: dict[str, Any] | None = None) -> None:
        self.parts = list(parts)
        if not self.parts:
            raise ValueError("parts is empty. Fix: pass at least one index")
        same_space([(part.dim, part.metric) for part in self.parts], "part")
        distinct([part.ids() for part in self.parts], "parts")
        self.dim, self.metric, self.metadata = self.parts[0].dim, self.parts[0].metric, dict(metadata or {})
        self._write = threading.Lock()

    @classmethod
    def build(cls, vectors: Tensor, ids: Tensor, make: MakeIndex, parts: int) -> PartitionedIndex:
        """Splits vectors ``[N, K]`` and ids ``[N]`` into ``parts`` contiguous ranges of almost equal size.

        Raises:
            ValueError: parts outside 1 to N.
        """
        if not 1 <= parts <= len(ids):
            raise ValueError(f"parts={parts} is outside 1 to {len(ids)}, the number of items")
        pairs = zip(vectors.tensor_split(parts), ids.tensor_split(parts), strict=True)
        return cls([make(rows, own) for rows, own in pairs])

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def ids(self) -> Tensor:
        return torch.cat([part.ids() for part in self.parts]).sort().values

    def contains(self, ids: Tensor) -> Tensor:
        return torch.stack([part.contains(ids) for part in self.parts]).any(0)

    def info(self) -> IndexInfo:
        infos = [part.info() for part in self.parts]
        settings = {"parts": [info.kind for info in infos]}
        size = sum(info.storage_bytes for info in infos)
        return IndexInfo("parts", len(self), self.dim, self.metric, size, settings)

    def _find(self, queries: Tensor, k: int, exclude: list[Tensor] | None) -> Found:
        return merged([part._find(queries, k, exclude) for part in self.parts], k)

    def _add(self, vectors: Tensor, ids: Ids) -> None:
        with self._write:
            refuse_known(self.contains(torch.from_numpy(ids)).numpy(), ids)
            min(self.parts, key=len)._add(vectors, ids)

    def _replace(self, vectors: Tensor, ids: Ids) -> None:
        with self._write:
            for part, own in self._owners(ids):
                part._replace(vectors[own], ids[own.numpy()])

    def _remove(self, ids: Ids) -> None:
        with self._write:
            for part, own in self._owners(ids):
                part._remove(ids[own.numpy()])

    def _owners(self, ids: Ids) -> list[tuple[CandidateIndex, Tensor]]:
        """Each part that has some of the ids, and a mask ``[M]`` of them."""
        wanted = torch.from_numpy(ids)
        masks = [part.contains(wanted) for part in self.parts]
        refuse_unknown(torch.stack(masks).any(0).numpy(), ids, len(self))
        return [(part, mask) for part, mask in zip(self.parts, masks, strict=True) if bool(mask.any())]

    def write(self, folder: Path, prefix: str) -> dict[str, Any]:
        content = [part.write(folder, f"{prefix}part{n:03d}.") for n, part in enumerate(self.parts)]
        return {"kind": "parts", "metadata": self.metadata, "parts": content}


def same_space(spaces: Sequence[tuple[int, str]], noun: str) -> None:
    """
    Raises:
        ValueError: different dim or metric, by the number of the part.
    """
    for number, space in enumerate(spaces):
        if space != spaces[0]:
            raise ValueError(f"{noun} {number} has dim {space[0]} and metric {space[1]!r}, {noun} 0 {spaces[0]}")


def distinct(ids: Sequence[Tensor], noun: str) -> None:
    """
    Raises:
        ValueError: an item that is in two of them.
    """
    every = torch.cat(list(ids)).sort().values
    twice = every[1:][every[1:] == every[:-1]]
    if len(twice):
        raise ValueError(f"item {int(twice[0])} is in two {noun}. Fix: remove it from one of them")


def refuse_known(known: Any, ids: Ids) -> None:
    """
    Raises:
        ValueError: an id that is known, for an addition.
    """
    if known.any():
        raise ValueError(f"item {ids[known][0]} is already in the index. Fix: index.replace(vectors, ids)")


def refuse_unknown(known: Any, ids: Ids, items: int) -> None:
    """
    Raises:
        ValueError: an id that is not known, for a replacement or a removal.
    """
    if not np.all(known):
        raise ValueError(f"item {ids[~known][0]} is not in the index of {items} items. Fix: index.add(vectors, ids)")
