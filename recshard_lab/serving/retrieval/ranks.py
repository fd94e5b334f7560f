"""An index whose items are split over launched ranks.

Each rank holds one index under a name. A search sends the queries to all ranks, and each returns its k best.

Shape letters: Q queries, N items, K columns, k results a query, M items of one call, W ranks.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from recshard_lab.arguments import names_wrong_arguments, shown
from recshard_lab.serving.retrieval.checks import Ids
from recshard_lab.serving.retrieval.index import CandidateIndex, Found, IndexInfo
from recshard_lab.serving.retrieval.merging import merged
from recshard_lab.serving.retrieval.parts import MakeIndex, distinct, refuse_known, refuse_unknown, same_space

_HELD: dict[str, CandidateIndex] = {}
"""On a rank: its indexes by name."""


class Ranks(Protocol):
    """What `recshard_lab.launch` returns, as far as it is used here. `GroupRanks` has the same for torchrun."""

    @property
    def world_size(self) -> int:
        """W."""

    def call(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), *, ranks: Sequence[int] | None = None
    ) -> list[Any]:
        """``fn(*args)`` on some ranks, or on all."""


def hold_index(name: str, index: CandidateIndex) -> None:
    """On a rank: keeps an index under a name, for `RankIndex`. Replaces an older one."""
    _HELD[name] = index


@names_wrong_arguments
class RankIndex(CandidateIndex):
    """Searches an index on every rank and merges the results. Exact parts return the results of one exact index.

    Ranks run one call at a time, so that searches of several threads wait for each other.

    Args:
        ranks: what `recshard_lab.launch` returned, or under torchrun `GroupRanks`.
        name: under which `hold_index` has kept an index on each rank. Ranks without one have no items.
        metadata: values for JSON.

    Raises:
        ValueError: no rank holds such an index, the indexes have different dim or metric, or two have one item.

    ::

        with recshard_lab.launch(2) as ranks:
            index = RankIndex.build(ranks, vectors, ids, ExactIndex)
            index.search(queries, 100)
    """

    def __init__(self, ranks: Ranks, name: str, metadata: dict[str, Any] | None = None) -> None:
        self.ranks, self.name, self.metadata = ranks, name, dict(metadata or {})
        held = ranks.call(_described, (name,))
        self._owners = [rank for rank, own in enumerate(held) if own is not None]
        if not self._owners:
            raise ValueError(f"no rank holds an index named {shown(name)}. Fix: hold_index(name, index) on the ranks")
        parts = [held[rank] for rank in self._owners]
        same_space([(info.dim, info.metric) for info, _ in parts], "rank index")
        distinct([ids for _, ids in parts], "ranks")
        self.dim, self.metric = parts[0][0].dim, parts[0][0].metric
        self._sizes = {rank: info.items for rank, (info, _) in zip(self._owners, parts, strict=True)}
        self._lock = threading.Lock()  # ranks run one call at a time

    @classmethod
    def build(cls, ranks: Ranks, vectors: Tensor, ids: Tensor, make: MakeIndex) -> RankIndex:
        """Sends each rank a contiguous range of vectors ``[N, K]`` and ids ``[N]``; a rank builds its own index.

        Raises:
            ValueError: no vector, or another number of ids. RankError: what ``make`` raised on a rank.
        """
        if not len(ids) or len(ids) != len(vectors):
            raise ValueError(
                f"{len(vectors)} vectors have {len(ids)} ids. Fix: pass one id for each vector, at least one"
            )
        name = f"index-{uuid.uuid4().hex[:12]}"
        world = min(ranks.world_size, len(ids))
        pairs = zip(vectors.tensor_split(world), ids.tensor_split(world), strict=True)
        for rank, (rows, own) in enumerate(pairs):
            ranks.call(_build, (name, make, rows.contiguous(), own.contiguous()), ranks=[rank])
        return cls(ranks, name)

    def __len__(self) -> int:
        return sum(self._sizes.values())

    def ids(self) -> Tensor:
        return torch.cat(self._call(_ids)).sort().values

    def contains(self, ids: Tensor) -> Tensor:
        return torch.stack(self._call(_contains, ids)).any(0)

    def info(self) -> IndexInfo:
        infos = [info for info, _ in self._call(_described)]
        settings = {"ranks": [info.kind for info in infos]}
        size = sum(info.storage_bytes for info in infos)
        return IndexInfo("ranks", len(self), self.dim, self.metric, size, settings)

    def close(self) -> None:
        """Frees the indexes on the ranks."""
        self._call(_drop)
        self._owners, self._sizes = [], {}

    def _find(self, queries: Tensor, k: int, exclude: list[Tensor] | None) -> Found:
        found = self._call(_search, queries.cpu(), k, exclude)
        return Found(*(part.to(queries.device) for part in merged(found, k)))

    def _add(self, vectors: Tensor, ids: Ids) -> None:
        with self._lock:
            known = torch.stack(self._call_locked(_contains, torch.from_numpy(ids))).any(0).numpy()
            refuse_known(known, ids)
            rank = min(self._sizes, key=lambda own: self._sizes[own])
            self._change(rank, "_add", vectors.cpu(), ids)

    def _replace(self, vectors: Tensor, ids: Ids) -> None:
        with self._lock:
            for rank, own in self._holders(ids):
                self._change(rank, "_replace", vectors.cpu()[own], ids[own.numpy()])

    def _remove(self, ids: Ids) -> None:
        with self._lock:
            for rank, own in self._holders(ids):
                self._change(rank, "_remove", ids[own.numpy()])

    def _holders(self, ids: Ids) -> list[tuple[int, Tensor]]:
        """Each rank that has some of the ids, and a mask ``[M]`` of them."""
        masks = self._call_locked(_contains, torch.from_numpy(ids))
        refuse_unknown(torch.stack(masks).any(0).numpy(), ids, len(self))
        return [(rank, mask) for rank, mask in zip(self._owners, masks, strict=True) if bool(mask.any())]

    def _change(self, rank: int, method: str, *args: Any) -> None:
        (size,) = self.ranks.call(_changed, (self.name, method, *args), ranks=[rank])
        self._sizes = {**self._sizes, rank: size}

    def _call(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        with self._lock:
            return self._call_locked(fn, *args)

    def _call_locked(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        if not self._owners:
            raise ValueError(f"index {self.name!r} is closed. Fix: build it again")
        return self.ranks.call(fn, (self.name, *args), ranks=self._owners)

    def write(self, folder: Path, prefix: str) -> dict[str, Any]:
        content = []
        with self._lock:
            for number, rank in enumerate(self._owners):
                arguments = (self.name, folder, f"{prefix}part{number:03d}.")
                content += self.ranks.call(_write, arguments, ranks=[rank])
        return {"kind": "parts", "metadata": self.metadata, "parts": content}


def _build(name: str, make: MakeIndex, vectors: Tensor, ids: Tensor) -> None:
    hold_index(name, make(vectors, ids))


def _described(name: str) -> tuple[IndexInfo, Tensor] | None:
    index = _HELD.get(name)
    return None if index is None else (index.info(), index.ids())


def _ids(name: str) -> Tensor:
    return _HELD[name].ids()


def _contains(name: str, ids: Tensor) -> Tensor:
    return _HELD[name].contains(ids)


def _search(name: str, queries: Tensor, k: int, exclude: list[Tensor] | None) -> Found:
    return _HELD[name]._find(queries, k, exclude)


def _changed(name: str, method: str, *args: Any) -> int:
    getattr(_HELD[name], method)(*args)
    return len(_HELD[name])


def _write(name: str, folder: Path, prefix: str) -> dict[str, Any]:
    return _HELD[name].write(folder, prefix)


def _drop(name: str) -> None:
    _HELD.pop(name, None)
