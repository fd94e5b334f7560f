"""Indexes: the exact one against a full sort, FAISS's against the exact one."""

from typing import Any

import pytest
import torch

from recshard_lab.models import ExactIndex, FaissIndex, TwoTowerRetrieval, candidate_vectors, recall_of
from recshard_lab.sparse import KeyedJaggedTensor
from tests.models.test_two_tower import ids, model


@pytest.fixture(scope="module")
def space() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    centres = torch.randn(30, 8)
    return centres[torch.randint(30, (2000,))] + 0.3 * torch.randn(2000, 8), torch.randn(50, 8)


@pytest.mark.parametrize("slice_rows", [1, 7, 1 << 16])
def test_the_exact_index_is_a_full_sort(space: Any, slice_rows: int) -> None:
    candidates, queries = space[0][:200], space[1][:5]
    scores, places = ExactIndex(candidates, slice_rows).search(queries, 10)
    expected = torch.topk(queries @ candidates.T, 10)
    torch.testing.assert_close(scores, expected.values)
    assert torch.equal(places, expected.indices)


def test_equal_scores_come_by_position() -> None:
    assert ExactIndex(torch.ones(9, 2), 4).search(torch.ones(1, 2), 9)[1].tolist() == [list(range(9))]


def test_faiss_finds_what_the_exact_index_does_or_says_how_much_of_it(space: Any) -> None:
    pytest.importorskip("faiss")
    candidates, queries = space
    scores, exact = ExactIndex(candidates).search(queries, 10)
    flat = FaissIndex(candidates).search(queries, 10)
    torch.testing.assert_close(flat[0], scores)
    assert recall_of(flat[1], exact) == 1.0
    few, many, all_cells = (
        recall_of(FaissIndex(candidates, "IVF20,Flat", nprobe).search(queries, 10)[1], exact) for nprobe in (1, 5, 20)
    )
    assert 0.2 < few < many <= all_cells == 1.0


def test_a_query_finds_the_candidates_that_its_tower_scores_highest() -> None:
    two = model()
    with torch.no_grad():
        movies = torch.arange(20)
        kjt = KeyedJaggedTensor(["movie"], movies, lengths=torch.ones(20, dtype=torch.int64))
        halves = [
            KeyedJaggedTensor(["movie"], part, lengths=torch.ones(len(part), dtype=torch.int64))
            for part in movies.split(13)
        ]
        vectors = candidate_vectors(two, halves)
        torch.testing.assert_close(vectors, two.candidate(kjt))
        scores, places = TwoTowerRetrieval(two, ExactIndex(vectors), k=3)(ids(("user",)))
        every = two.query(ids(("user",))) @ two.candidate(kjt).T
    torch.testing.assert_close(scores, every.topk(3).values)
    assert torch.equal(places, every.topk(3).indices)


def test_what_cannot_be_searched_is_refused(space: Any) -> None:
    index = ExactIndex(space[0])
    with pytest.raises(ValueError, match="k must lie in 1 to 2000, the number of candidates, got 0"):
        index.search(space[1], 0)
    with pytest.raises(ValueError, match=r"queries must be vectors \[Q, 8\], got .* \[50, 4\]"):
        index.search(space[1][:, :4], 1)
    with pytest.raises(ValueError, match=r"candidates must be vectors \[N, K\]"):
        ExactIndex(torch.zeros(0, 3))
    pytest.importorskip("faiss")
    with pytest.raises(ValueError, match="FAISS cannot make 'IFV9'"):
        FaissIndex(space[0], "IFV9")
    with pytest.raises(ValueError, match="nprobe=3"):
        FaissIndex(space[0], "Flat", nprobe=3)
