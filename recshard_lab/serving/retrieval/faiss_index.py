"""Approximate indexes of FAISS (Douze et al. 2024, arXiv 2401.08281), from ``recshard-lab[retrieval]``.

IVF groups the vectors into cells and searches the ``nprobe`` nearest cells. HNSW walks a graph and keeps the
``ef_search`` best nodes of the walk. Both find most of the exact results; larger values find more and take longer.

FAISS numbers the vectors in the order of their arrival; this is their position. IVF removes vectors. Other indexes
cannot: their removed positions are skipped, and a search that has too few results left repeats with a larger k. If an
HNSW walk ends among removed items, the search scans all vectors for that query. Build the index again when
``info().settings["removed"]`` is a large share of it.

Shape letters: Q queries, N items, K columns, k results a query, M items of one call, C positions.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from recshard_lab.arguments import names_wrong_arguments, shown
from recshard_lab.serving.retrieval.checks import Ids, Metric, checked_metric, is_count, prepared
from recshard_lab.serving.retrieval.exact import Storage, ids_or_places
from recshard_lab.serving.retrieval.files import read_array, sync_file, write_array
from recshard_lab.serving.retrieval.index import CandidateIndex, Found, IndexInfo
from recshard_lab.serving.retrieval.merging import NO_ID, best, longest, without
from recshard_lab.serving.retrieval.positions import Positions
from recshard_lab.serving.retrieval.shared_lock import SharedLock

_CODECS = {"float32": "Flat", "float16": "SQfp16", "int8": "SQ8"}
_TRAINING_VECTORS = 39
"""FAISS warns about fewer vectors a cell."""


@names_wrong_arguments
class FaissIndex(CandidateIndex):
    """An approximate index of FAISS, on CPU.

    Args:
        vectors: ``[N, K]`` floating point, at least one. They also train the cells of an IVF index.
        ids: ``[N]`` int64 item ids; 0 to N - 1 if left out.
        kind: "ivf", "hnsw", or a factory string of FAISS such as "IVF256,PQ8".
        metric: "inner_product" or "cosine".
        storage: "float32", "float16" or "int8" (scalar quantizers of FAISS). Not for a factory string.
        cells: of "ivf"; sqrt(N) if left out.
        links: of "hnsw", for each node of the graph.
        nprobe: cells that a search reads, of an IVF index.
        ef_search: best nodes that a walk keeps, of an HNSW index.
        ef_construction: the same while the graph is built.
        metadata: values for JSON, saved with the index.

    Raises:
        ValueError: FAISS is not installed or does not know the factory string, a setting that the kind does not
            have, or vectors and ids as for `ExactIndex`.

    >>> index = FaissIndex(torch.eye(4), torch.tensor([5, 6, 7, 8]), kind="ivf", cells=1)
    >>> index.search(torch.tensor([0.0, 3.0, 0.0, 1.0]), 2).ids.tolist()
    [6, 8]
    """

    def __init__(
        self,
        vectors: Tensor,
        ids: Tensor | None = None,
        *,
        kind: str = "ivf",
        metric: Metric = "inner_product",
        storage: Storage = "float32",
        cells: int | None = None,
        links: int = 32,
        nprobe: int | None = None,
        ef_search: int | None = None,
        ef_construction: int | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        faiss = load_faiss()
        self.metric = checked_metric(metric)
        rows, numbers = prepared(vectors, ids_or_places(vectors, ids), None, self.metric)
        if not len(rows):
            raise ValueError(f"vectors has shape {list(rows.shape)}: an index needs at least one item")
        self.kind, self.dim, self.metadata = kind, rows.shape[1], dict(metadata or {})
        self.factory = _factory(kind, storage, len(rows), cells, links)
        try:
            self._index: Any = faiss.index_factory(self.dim, self.factory, faiss.METRIC_INNER_PRODUCT)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"FAISS has no index {shown(self.factory)}: {_reason(error)}") from error
        self._lock = SharedLock()
        self._mapped = False
        if ef_construction is not None:
            self._hnsw("ef_construction").efConstruction = _count("ef_construction", ef_construction)
        array = _array(rows)
        try:
            self._index.train(array)
            self._index.add(array)
        except RuntimeError as error:
            raise ValueError(f"FAISS cannot build {self.factory!r} of {list(rows.shape)}: {_reason(error)}") from error
        self._ids = numbers.copy()
        self._live = np.ones(len(numbers), dtype=bool)
        self._positions = Positions.of(numbers, np.arange(len(numbers)))
        if nprobe is not None:
            self.nprobe = nprobe
        if ef_search is not None:
            self.ef_search = ef_search

    def __len__(self) -> int:
        return len(self._positions.ids)

    def ids(self) -> Tensor:
        return torch.from_numpy(self._positions.ids.copy())

    def contains(self, ids: Tensor) -> Tensor:
        return torch.from_numpy(self._positions.has(ids.cpu().numpy()))

    def info(self) -> IndexInfo:
        settings: dict[str, Any] = {"factory": self.factory, "memory_mapped": self._mapped}
        settings["removed"] = int((~self._live).sum())
        with self._lock.shared():
            if self._ivf_or_none() is not None:
                settings |= {"cells": self._ivf_or_none().nlist, "nprobe": self._ivf_or_none().nprobe}
            if self._hnsw_or_none() is not None:
                settings["ef_search"] = self._hnsw_or_none().efSearch
            size = len(load_faiss().serialize_index(self._index)) + self._ids.nbytes + self._live.nbytes
        size += sum(array.nbytes for array in self._positions)
        return IndexInfo(self.kind, len(self), self.dim, self.metric, size, settings)

    @property
    def nprobe(self) -> int:
        """Cells that a search reads. Only of an IVF index."""
        return int(self._ivf("nprobe").nprobe)

    @nprobe.setter
    def nprobe(self, value: int) -> None:
        with self._lock.alone():
            self._ivf("nprobe").nprobe = _count("nprobe", value)

    @property
    def ef_search(self) -> int:
        """Best nodes that a walk keeps. Only of an HNSW index."""
        return int(self._hnsw("ef_search").efSearch)

    @ef_search.setter
    def ef_search(self, value: int) -> None:
        with self._lock.alone():
            self._hnsw("ef_search").efSearch = _count("ef_search", value)

    def _find(self, queries: Tensor, k: int, exclude: list[Tensor] | None) -> Found:
        array, more = _array(queries), longest(exclude)
        with self._lock.shared():
            scores, ids = self._search_live(array, k + more)
        found = without(*best(scores, ids, k + more), k, exclude)
        return Found(*(part.to(queries.device) for part in found))

    def _search_live(self, array: Any, k: int) -> tuple[Tensor, Tensor]:
        """At least the k best live items of each query, or those that FAISS finds; -inf is no result."""
        total, needed = int(self._index.ntotal), min(k, len(self))
        wanted = max(1, min(k, total))
        while True:
            values, at = self._index.search(array, wanted)
            live = (at >= 0) & self._live[at]  # FAISS fills up with -1
            lacking, exhausted = live.sum(1) < needed, at[:, -1] < 0
            if wanted >= total or not (lacking & ~exhausted).any():
                break
            wanted = min(2 * wanted, total)
        if lacking.any() and self._hnsw_or_none() is not None and not self._live.all():
            # These walks met removed nodes, which may have no links to the others: scan the stored vectors.
            faiss = load_faiss()
            storage = faiss.downcast_index(faiss.downcast_index(self._index).storage)
            pad = ((0, 0), (0, total - wanted))
            values, at = np.pad(values, pad), np.pad(at, pad, constant_values=-1)
            values[lacking], at[lacking] = storage.search(array[lacking], total)
            live = (at >= 0) & self._live[at]
        scores, ids = np.where(live, values, -np.inf), np.where(live, self._ids[at], NO_ID)
        return torch.from_numpy(scores.astype(np.float32)), torch.from_numpy(ids)

    def _add(self, vectors: Tensor, ids: Ids) -> None:
        with self._lock.alone():
            self._append(vectors, ids, self._positions.added(ids, self._next(len(ids))))

    def _replace(self, vectors: Tensor, ids: Ids) -> None:
        with self._lock.alone():
            old = self._positions.find(ids)
            self._append(vectors, ids, self._positions.moved(ids, self._next(len(ids))))
            self._kill(old)

    def _remove(self, ids: Ids) -> None:
        with self._lock.alone():
            self._kill(self._positions.find(ids))
            self._positions = self._positions.removed(ids)

    def _next(self, count: int) -> Ids:
        return np.arange(len(self._ids), len(self._ids) + count)

    def _append(self, vectors: Tensor, ids: Ids, positions: Positions) -> None:
        if self._mapped:
            raise ValueError(
                f"{len(ids)} vectors cannot be added: the index is memory-mapped and read-only. "
                "Fix: load_index(path) without memory_map"
            )
        if not len(ids):
            return
        if self._ivf_or_none() is not None:  # its count falls when it removes
            self._index.add_with_ids(_array(vectors), self._next(len(ids)))
        else:
            self._index.add(_array(vectors))
        self._ids = np.concatenate([self._ids, ids])
        self._live = np.concatenate([self._live, np.ones(len(ids), dtype=bool)])
        self._positions = positions

    def _kill(self, at: Ids) -> None:
        self._live[at] = False
        if self._ivf_or_none() is not None and not self._mapped and len(at):
            self._index.remove_ids(at)

    def write(self, folder: Path) -> dict[str, Any]:
        faiss = load_faiss()
        with self._lock.shared():
            with (folder / "index.faiss").open("wb") as file:
                faiss.write_index(self._index, faiss.PyCallbackIOWriter(file.write))
                sync_file(file)
            write_array(folder / "ids.npy", self._ids)
            write_array(folder / "live.npy", self._live)
        same = {"kind": "faiss", "dim": self.dim, "metric": self.metric, "metadata": self.metadata}
        return {**same, "name": self.kind, "factory": self.factory}

    @classmethod
    def read(cls, folder: Path, content: dict[str, Any], memory_map: bool) -> FaissIndex:
        """What `write` wrote."""
        faiss = load_faiss()
        index = cls.__new__(cls)
        index.dim, index.metric, index.metadata = content["dim"], content["metric"], content["metadata"]
        index.kind, index.factory = content["name"], content["factory"]
        path = str(folder / "index.faiss")
        index._lock, index._mapped = SharedLock(), memory_map
        if not memory_map:
            index._index = faiss.read_index(path)
        elif "IVF" in index.factory:
            index._index = faiss.read_index(path, faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)
        else:
            index._index = faiss.read_index(path, faiss.IO_FLAG_MMAP_IFC)
        index._ids = read_array(folder / "ids.npy", np.int64, 1, memory_map)
        index._live = read_array(folder / "live.npy", np.bool_, 1, memory_map)
        if index._index.d != index.dim or len(index._ids) != len(index._live) or index._index.ntotal > len(index._ids):
            raise ValueError(
                f"{path} has {index._index.ntotal} vectors of {index._index.d} columns for {len(index._ids)} ids "
                f"and dim {index.dim}"
            )
        at = np.flatnonzero(index._live)
        index._positions = Positions.of(np.asarray(index._ids)[at], at)
        return index

    def _ivf_or_none(self) -> Any:
        return load_faiss().try_extract_index_ivf(self._index)

    def _hnsw_or_none(self) -> Any:
        return getattr(load_faiss().downcast_index(self._index), "hnsw", None)

    def _ivf(self, setting: str) -> Any:
        found = self._ivf_or_none()
        if found is None:
            raise ValueError(f"{setting} is a setting of IVF indexes, and this index is {self.factory!r}")
        return found

    def _hnsw(self, setting: str) -> Any:
        found = self._hnsw_or_none()
        if found is None:
            raise ValueError(f"{setting} is a setting of HNSW indexes, and this index is {self.factory!r}")
        return found


class FaissMissingError(ValueError):
    """The package ``faiss`` is not installed."""


def load_faiss() -> Any:
    """The package ``faiss``.

    Raises:
        FaissMissingError: it is not installed.
    """
    try:
        import faiss
    except ImportError as error:
        raise FaissMissingError(
            "FaissIndex needs the package faiss-cpu, which is not installed. "
            "Fix: pip install 'recshard-lab[retrieval]', or use ExactIndex"
        ) from error
    return faiss


def _factory(kind: str, storage: str, items: int, cells: int | None, links: int) -> str:
    """The factory string of a kind.

    >>> _factory("ivf", "int8", 1_000_000, None, 32), _factory("hnsw", "float32", 10, None, 16)
    ('IVF1000,SQ8', 'HNSW16,Flat')
    """
    if storage not in get_args(Storage):
        raise ValueError(f"storage={shown(storage)} is not supported. Supported: {', '.join(get_args(Storage))}")
    if cells is not None and kind != "ivf":
        raise ValueError(f"cells={shown(cells)} is a setting of kind='ivf', and kind is {shown(kind)}")
    if kind == "ivf":
        usual = max(1, min(math.isqrt(items), items // _TRAINING_VECTORS))
        return f"IVF{usual if cells is None else _count('cells', cells)},{_CODECS[storage]}"
    if kind == "hnsw":
        return f"HNSW{_count('links', links)},{_CODECS[storage]}"
    if storage != "float32":
        raise ValueError(
            f"storage={storage!r} does not change kind={shown(kind)}. Fix: write it into the string, 'SQ8'"
        )
    return str(kind)


def _count(name: str, value: int) -> int:
    if not is_count(value):
        raise ValueError(f"{name}={shown(value)} is not a count. Fix: pass a whole number from 1")
    return int(value)


def _array(rows: Tensor) -> Any:
    return rows.detach().float().cpu().contiguous().numpy()


def _reason(error: Exception) -> str:
    return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
