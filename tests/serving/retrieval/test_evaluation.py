"""Recall against counts by hand; rows for each setting, and settings as before."""

import pytest
import torch

from recshard_lab.serving.retrieval import ExactIndex, FaissIndex, recall_of, recall_of_clicks, trade_offs
from recshard_lab.serving.retrieval.evaluation import as_records, as_table
from tests.serving.retrieval.spaces import space


def test_recall_counts_what_was_found() -> None:
    exact = torch.tensor([[5, 6, 7], [8, 9, 1]])
    assert recall_of(torch.tensor([[6, 5, 0], [9, 2, 3]]), exact) == 0.5
    assert recall_of(torch.tensor([[5, 6, 7, 0], [1, 9, 8, 0]]), exact) == 1.0
    clicks = [torch.tensor([6]), torch.tensor([2, 8, 4])]
    assert recall_of_clicks(torch.tensor([[6, 5, 0], [9, 2, 3]]), clicks) == 0.5
    with pytest.raises(ValueError, match=r"got \[1, 3\] and \[2, 3\]"):
        recall_of(exact[:1], exact)
    with pytest.raises(ValueError, match="clicks has 1 entries with 2 clicks for 2 queries"):
        recall_of_clicks(exact, [torch.tensor([1, 2])])


def test_a_row_for_each_setting() -> None:
    vectors, ids, queries = space(1000, 30, 8)
    exact = ExactIndex(vectors, ids)
    ivf = FaissIndex(vectors, ids, kind="ivf", cells=16, nprobe=3)
    hnsw = FaissIndex(vectors, ids, kind="hnsw", ef_search=7)
    clicks = list(exact.search(queries, 5).ids[:, 4:])
    rows = trade_offs(
        {"exact": exact, "ivf": ivf, "hnsw": hnsw},
        queries,
        10,
        exact=exact,
        efforts=(1, 4, 16, 64),
        clicks=clicks,
        exclude=[[int(own)] for own in exact.search(queries, 1).ids[:, 0]],
        single_queries=3,
    )
    assert [(row.index, row.setting) for row in rows] == [
        ("exact", ""),
        ("ivf", "nprobe=1"),
        ("ivf", "nprobe=4"),
        ("ivf", "nprobe=16"),
        ("hnsw", "ef_search=16"),
        ("hnsw", "ef_search=64"),
    ]
    assert rows[0].recall == rows[3].recall == rows[0].recall_of_clicks == 1.0
    assert rows[1].recall < rows[2].recall < 1.0
    assert all(0 < row.p50_ms <= row.p95_ms <= row.p99_ms for row in rows)
    assert (ivf.nprobe, hnsw.ef_search) == (3, 7)
    assert "nprobe=16" in as_table(rows).text
    assert as_records(rows)[2]["setting"] == "nprobe=4"
