"""Every index against a sort of all scores, also after changes."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recshard_lab.serving.retrieval import CandidateIndex, ExactIndex, FaissIndex
from tests.refusals import not_refused
from tests.serving.retrieval.spaces import MAKERS, by_definition, space, table_of, whole_numbers

KINDS = pytest.mark.parametrize("kind", MAKERS)


def check(index: CandidateIndex, table: Any, queries: Any, k: int, exclude: Any = None, cosine: bool = False) -> None:
    """The results, their order and their number are those of the definition."""
    found = index.search_up_to(queries, k, exclude)
    for row, query in enumerate(queries):
        expected = by_definition(table, query, k, exclude[row] if exclude else (), cosine)
        count = int(found.counts[row])
        assert count == len(expected)
        assert found.ids[row, :count].tolist() == [own for _, own in expected]
        torch.testing.assert_close(found.scores[row, :count], torch.tensor([score for score, _ in expected]))
        assert found.ids[row, count:].tolist() == [-1] * (k - count)
        assert found.scores[row, count:].tolist() == [-torch.inf] * (k - count)


@KINDS
@pytest.mark.parametrize("metric", ["inner_product", "cosine"])
def test_a_search_is_a_sort_of_all_scores(kind: str, metric: str) -> None:
    vectors, ids, queries = space()
    index = MAKERS[kind](vectors, ids, metric=metric)
    check(index, table_of(vectors, ids), queries, 10, cosine=metric == "cosine")
    check(index, table_of(vectors, ids), queries, len(ids), cosine=metric == "cosine")
    assert len(index) == 200
    assert torch.equal(index.ids(), ids.sort().values)
    assert -1 in index
    assert 3 not in index


@KINDS
def test_excluded_items_make_room_for_the_next(kind: str) -> None:
    vectors, ids, queries = space()
    index = MAKERS[kind](vectors, ids)
    best = index.search(queries, 20).ids
    exclude = [best[0, :7], best[1, :1].tolist(), [], [999], best[4].tolist() * 2, ids]
    check(index, table_of(vectors, ids), queries, 10, exclude)
    assert index.search(queries, 10, exclude).counts.tolist() == [10, 10, 10, 10, 10, 0]


@KINDS
def test_added_replaced_and_removed_items(kind: str) -> None:
    vectors, ids, queries = space()
    index = MAKERS[kind](vectors[:150], ids[:150])
    table = table_of(vectors[:150], ids[:150])
    index.add(vectors[150:], ids[150:])
    table |= table_of(vectors[150:], ids[150:])
    check(index, table, queries, 10)
    changed = torch.stack([ids[3], ids[180], ids[77]])
    index.replace(2 * queries[:3], changed)
    table |= table_of(2 * queries[:3], changed)
    check(index, table, queries, 10)
    gone = torch.cat([index.search(queries, 4).ids.unique(), ids[20:40]]).unique()
    index.remove(gone)
    table = {own: vector for own, vector in table.items() if own not in gone.tolist()}
    check(index, table, queries, 10)
    assert len(index) == len(table)
    back = gone[:5]
    index.add(queries[:5], back)
    table |= table_of(queries[:5], back)
    check(index, table, queries, len(table))
    assert torch.equal(index.ids(), torch.tensor(sorted(table)))


@pytest.mark.parametrize("slice_rows", [4, 90])
def test_equal_scores_come_by_id(slice_rows: int) -> None:
    vectors, ids, queries = whole_numbers()
    for k in (1, 5, 30, 90):
        check(ExactIndex(vectors, ids, slice_rows=slice_rows), table_of(vectors, ids), queries, k)


@settings(max_examples=30, deadline=None)
@given(data=st.data(), items=st.integers(1, 30), slice_rows=st.integers(1, 9), k=st.integers(1, 35))
def test_slices_find_exactly_what_the_definition_finds(data: Any, items: int, slice_rows: int, k: int) -> None:
    vectors, ids, queries = whole_numbers(items, 3, 2)
    exclude = data.draw(st.lists(st.lists(st.integers(-16, 16), max_size=8), min_size=3, max_size=3))
    check(ExactIndex(vectors, ids, slice_rows=slice_rows), table_of(vectors, ids), queries, k, exclude)


@pytest.mark.parametrize("storage", ["float16", "int8"])
def test_smaller_storage_finds_nearly_the_same(storage: Any) -> None:
    vectors, ids, queries = space(2000, 50, 32)
    exact, small = ExactIndex(vectors, ids), ExactIndex(vectors, ids, storage=storage)
    faiss = FaissIndex(vectors, ids, kind="ivf", storage=storage, cells=1)
    truth = exact.search(queries, 20).ids
    for index in (small, faiss):
        hits = (truth.unsqueeze(2) == index.search(queries, 20).ids.unsqueeze(1)).any(2).double().mean()
        assert float(hits) > (0.95 if storage == "int8" else 0.99)
    width = {"float16": 2, "int8": 1}[storage]
    saved = exact.info().storage_bytes - small.info().storage_bytes
    assert saved == 2000 * 32 * (4 - width) - (2000 * 4 if storage == "int8" else 0)
    bound = {"float16": 2**-11, "int8": 0.5 / 127}[storage] * vectors.abs().amax(1, keepdim=True)
    assert bool(((small.vectors(ids) - vectors).abs() <= 1.001 * bound).all())


@KINDS
def test_wrong_items_are_refused_by_name_and_change_nothing(kind: str) -> None:
    vectors, ids, queries = space()
    index = MAKERS[kind](vectors, ids)
    before = index.search(queries, 10)
    new = torch.tensor([1, 2])
    nan = torch.ones(2, 8)
    nan[1, 5] = torch.nan
    refused: list[tuple[Any, Any, Any, str]] = [
        (index.add, torch.ones(2, 7), new, r"vectors must be a floating-point tensor \[V, 8\], got .*\[2, 7\]"),
        (index.add, torch.ones(2, 8, dtype=torch.int64), new, "floating-point"),
        (index.add, nan, new, "the vector of item 2 has nan in column 5"),
        (index.add, nan * torch.inf, new, "item 1 has inf in column 0"),
        (index.add, torch.ones(2, 8), torch.tensor([7, 7]), "item id 7 occurs twice"),
        (index.add, torch.ones(2, 8), torch.stack([ids[9], ids[8]]), f"item {ids[9]} is already in the index"),
        (index.add, torch.ones(3, 8), new, "3 vectors have 2 ids"),
        (index.add, torch.ones(2, 8), new.float(), r"ids must be a tensor \[M\] int64, got torch.float32 \[2\]"),
        (index.replace, torch.ones(2, 8), torch.stack([ids[9], new[0]]), "item 1 is not in the index of 200 items"),
    ]
    for call, rows, own, message in refused:
        with pytest.raises(ValueError, match=message):
            call(rows, own)
    with pytest.raises(ValueError, match="item 2 is not in the index of 200 items"):
        index.remove(torch.stack([ids[0], new[1]]))
    with pytest.raises(ValueError, match="item id 5 occurs twice"):
        index.remove(torch.tensor([5, 5]))
    for ours, theirs in zip(index.search(queries, 10), before, strict=True):
        assert torch.equal(ours, theirs)


@KINDS
def test_wrong_queries_are_refused_by_value(kind: str) -> None:
    vectors, ids, queries = space()
    index = MAKERS[kind](vectors, ids)
    with pytest.raises(ValueError, match=r"k=201 is outside 1 to 200, the number of items. Fix: pass k=200 or less"):
        index.search(queries, 201)
    for k in (0, -3, 2.5, True, None):
        with pytest.raises(ValueError, match=f"k={k}"):
            index.search(queries, k)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"queries must be a floating-point tensor \[Q, 8\], got .*\[6, 4\]"):
        index.search(queries[:, :4], 1)
    queries[3, 1] = -torch.inf
    with pytest.raises(ValueError, match="query 3 has -inf in column 1"):
        index.search(queries, 1)
    with pytest.raises(ValueError, match="exclude has 1 sequences for 2 queries"):
        index.search(queries[:2], 1, [[3]])
    with pytest.raises(ValueError, match=r"exclude\[1\]"):
        index.search(queries[:2], 1, [[3], ["a"]])  # type: ignore[list-item]


def test_wrong_settings_are_refused() -> None:
    vectors, ids, _ = space()
    cases: dict[str, Any] = {
        r"vectors has shape \[0, 8\]: an index needs at least one item": lambda: FaissIndex(vectors[:0], ids[:0]),
        "the vector of item 4 is zero: it has no cosine": lambda: ExactIndex(
            torch.zeros(1, 3), torch.tensor([4]), metric="cosine"
        ),
        "query 0 is zero": lambda: ExactIndex(vectors, ids, metric="cosine").search(torch.zeros(8), 1),
        "metric='l2' is not supported": lambda: ExactIndex(vectors, ids, metric="l2"),  # type: ignore[arg-type]
        "a value of 100000 does not fit float16": lambda: ExactIndex(torch.full((1, 2), 1e5), storage="float16"),
        "FAISS has no index 'IFV9'": lambda: FaissIndex(vectors, ids, kind="IFV9"),
        "nprobe is a setting of IVF indexes": lambda: FaissIndex(vectors, ids, kind="hnsw", nprobe=3),
        "nprobe=0 is not a count": lambda: FaissIndex(vectors, ids, nprobe=0),
        "FAISS cannot build 'IVF300,Flat'": lambda: FaissIndex(vectors, ids, cells=300),
    }
    assert not not_refused((call, words) for words, call in cases.items())
