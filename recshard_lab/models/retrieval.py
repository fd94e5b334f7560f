"""The nearest candidates of a query: exactly, or by an index of FAISS that looks at fewer.

Nearest is by inner product, as two towers score. FAISS (Douze et al. 2024, arXiv 2401.08281) comes with
``recshard-lab[retrieval]``.

Shape letters: Q queries, N candidates, K columns, k neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.models.two_tower import TwoTower
from recshard_lab.sparse import KeyedJaggedTensor


class Index(Protocol):
    """Finds near candidates."""

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """``[Q, K]`` -> scores ``[Q, k]``, falling, and positions ``[Q, k]`` int64."""


@names_wrong_arguments
class ExactIndex:
    """Scores every candidate, a slice of them at a time.

    Args:
        candidates: ``[N, K]``, kept as they are.
        slice_rows: candidates scored at once; memory is Q times this.

    Raises:
        ValueError: no candidates, or not ``[N, K]``.

    >>> ExactIndex(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])).search(torch.tensor([[2.0, 1.0]]), 2)
    (tensor([[3., 2.]]), tensor([[2, 0]]))
    """

    def __init__(self, candidates: Tensor, slice_rows: int = 1 << 16) -> None:
        self.candidates, self.slice_rows = _rows(candidates), slice_rows
        if slice_rows < 1:
            raise ValueError(f"slice_rows must be at least 1, got {slice_rows}")

    @names_wrong_arguments
    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """``[Q, K]`` -> scores ``[Q, k]``, falling, and positions ``[Q, k]``; equal scores by position."""
        queries, k = _asked(queries, k, self.candidates.shape)
        best = queries.new_empty(len(queries), 0)
        where = torch.empty(len(queries), 0, dtype=torch.int64, device=queries.device)
        for start in range(0, len(self.candidates), self.slice_rows):
            scores = queries @ self.candidates[start : start + self.slice_rows].T
            places = torch.arange(start, start + scores.shape[1], device=queries.device).expand_as(scores)
            best, where = torch.cat([best, scores], 1), torch.cat([where, places], 1)
            order = _best(best, k)
            best, where = best.gather(1, order), where.gather(1, order)
        return best, where


class FaissIndex:
    """An index of FAISS over candidates.

    Args:
        candidates: ``[N, K]``.
        factory: FAISS's words for it: "Flat" is exact, "IVF64,Flat" looks into some of 64 cells, "HNSW32"
            walks a graph.
        nprobe: cells that a query looks into, of an index with cells.

    Raises:
        ValueError: FAISS is not installed, does not know the factory, or has no cells to probe.

    >>> index = FaissIndex(torch.eye(4), "Flat")
    >>> index.search(torch.tensor([[0.0, 3.0, 0.0, 1.0]]), 2)[1].tolist()
    [[1, 3]]
    """

    def __init__(self, candidates: Tensor, factory: str = "Flat", nprobe: int | None = None) -> None:
        faiss = _faiss()
        rows = _rows(candidates)
        try:
            self._index: Any = faiss.index_factory(rows.shape[1], str(factory), faiss.METRIC_INNER_PRODUCT)
            vectors = rows.detach().float().cpu().contiguous().numpy()
            self._index.train(vectors)
            self._index.add(vectors)
            if nprobe is not None:
                faiss.extract_index_ivf(self._index).nprobe = int(nprobe)
        except (RuntimeError, TypeError, AttributeError) as error:
            reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
            raise ValueError(
                f"FAISS cannot make {factory!r} (nprobe={nprobe}) of {list(rows.shape)} candidates: {reason}"
            ) from error
        self._shape = rows.shape

    @names_wrong_arguments
    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """``[Q, K]`` -> scores ``[Q, k]``, falling, and positions ``[Q, k]``; -1 where it found fewer."""
        queries, k = _asked(queries, k, self._shape)
        scores, places = self._index.search(queries.detach().float().cpu().contiguous().numpy(), k)
        return torch.from_numpy(scores).to(queries.device), torch.from_numpy(places).to(queries.device)


@names_wrong_arguments
def recall_of(found: Tensor, exact: Tensor) -> float:
    """The share of the exact neighbours that were found, over all queries.

    Args:
        found, exact: positions ``[Q, k]``.

    Raises:
        ValueError: other shapes.

    >>> recall_of(torch.tensor([[4, 2]]), torch.tensor([[2, 7]]))
    0.5
    """
    if found.dim() != 2 or found.shape[0] != exact.shape[0] or exact.dim() != 2 or not exact.numel() or found.is_meta:
        raise ValueError(f"found and exact must be positions [Q, k], got {list(found.shape)} and {list(exact.shape)}")
    return float((exact.unsqueeze(2) == found.unsqueeze(1)).any(2).double().mean())


@names_wrong_arguments
class TwoTowerRetrieval(nn.Module):
    """Answers queries: the query tower, then an index of the candidates.

    Args:
        two_tower: a trained model, sharded or not.
        index: of the candidates' vectors, see `candidate_vectors`.
        k: candidates a query.

    Raises:
        ValueError: k below 1.
    """

    def __init__(self, two_tower: TwoTower, index: Index, k: int = 100) -> None:
        super().__init__()
        if not 1 <= k < 1 << 31:
            raise ValueError(f"k must be at least 1, got {k}")
        self.two_tower, self.index, self.k = two_tower, index, k

    @torch.no_grad()
    def forward(self, query_kjt: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        """ids of Q queries -> scores ``[Q, k]`` and positions ``[Q, k]`` in the index."""
        return self.index.search(self.two_tower.query(query_kjt), self.k)


@torch.no_grad()
def candidate_vectors(two_tower: TwoTower, batches: Iterable[KeyedJaggedTensor]) -> Tensor:
    """Vectors ``[N, K]`` of candidates that come in batches of ids; of a sharded model, on all ranks alike."""
    return torch.cat([two_tower.candidate(kjt) for kjt in batches])


def _best(scores: Tensor, k: int) -> Tensor:
    """``[Q, n]`` -> the columns of each row's k largest, falling, equal ones from the left."""
    k = min(k, scores.shape[1])
    values, columns = torch.topk(scores, k, dim=1)
    columns = columns.sort(dim=1).values
    order = torch.argsort(scores.gather(1, columns), dim=1, descending=True, stable=True)
    columns = columns.gather(1, order)
    cut = (scores >= values[:, -1:]).sum(1) > k  # equal scores on both sides of the k-th place
    if bool(cut.any()):
        columns[cut] = torch.argsort(scores[cut], dim=1, descending=True, stable=True)[:, :k]
    return columns


def _rows(candidates: Tensor) -> Tensor:
    if candidates.dim() != 2 or not candidates.numel() or candidates.is_meta or not candidates.is_floating_point():
        raise ValueError(f"candidates must be vectors [N, K], got {candidates.dtype} {list(candidates.shape)}")
    return candidates


def _asked(queries: Tensor, k: int, shape: torch.Size) -> tuple[Tensor, int]:
    if queries.dim() != 2 or queries.shape[1] != shape[1] or queries.is_meta or not queries.is_floating_point():
        raise ValueError(f"queries must be vectors [Q, {shape[1]}], got {queries.dtype} {list(queries.shape)}")
    if not 1 <= k <= shape[0]:
        raise ValueError(f"k must lie in 1 to {shape[0]}, the number of candidates, got {k}")
    return queries, k


def _faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise ValueError(
            "an index of FAISS needs the package faiss-cpu: pip install 'recshard-lab[retrieval]', or use ExactIndex"
        ) from error
    return faiss
