"""The benchmark of indexes on few vectors."""

from benchmarks.retrieval import figures


def test_the_indexes_find_more_where_they_search_more() -> None:
    found = {figure.name: figure for figure in figures(items=6000, graph_items=3000, dim=16, k=10)}
    assert all(figure.ok for figure in found.values())
    assert found["recall@10, 6,000 x 16, exact"].target is not None
    for count in ("6,000", "3,000"):
        cells = [figure.value for name, figure in found.items() if f"{count} x 16, ivf, float32" in name]
        assert cells == sorted(cells)
        assert cells[0] < cells[-1]
    graph = [figure.value for name, figure in found.items() if "hnsw" in name]
    assert graph[-1] > 0.95
    small = found["recall@10, 6,000 x 16, exact, int8"]
    assert small.beside["MB"] < found["recall@10, 6,000 x 16, exact"].beside["MB"]
