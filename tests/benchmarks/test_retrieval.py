"""The benchmark of indexes on few vectors."""

import pytest

from benchmarks.retrieval import figures


@pytest.mark.nightly
def test_the_indexes_find_more_where_they_search_more() -> None:
    found = {figure.name: figure for figure in figures(items=6000, dim=16, k=10)}
    assert all(figure.ok for figure in found.values())
    assert found["recall@10, 6,000 x 16, exact"].target is not None
    cells = [figure.value for name, figure in found.items() if "6,000 x 16, ivf, float32" in name]
    assert cells == sorted(cells)
    assert cells[0] < cells[-1]
    graph = [figure.value for name, figure in found.items() if "hnsw" in name]
    assert graph[-1] > 0.95
    small = found["recall@10, 6,000 x 16, exact, int8"]
    assert small.beside["MB"] < found["recall@10, 6,000 x 16, exact"].beside["MB"]
    assert all(figure.beside["build s"] > 0 for figure in found.values())
    assert found["recall@10, 6,000 x 16, hnsw, ef_search=512"].beside["MB"] > 6000 * (16 * 4 + 64 * 4) / 1e6  # 64 links
