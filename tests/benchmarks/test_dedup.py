"""`recshard bench dedup`: both sides step on the same batches, and bytes are those of distinct ids."""

from dataclasses import replace

import recshard_lab
from benchmarks import dedup


def test_bytes_shrink_by_the_ids_that_repeat() -> None:
    case = replace(dedup.CASES[0], tables=2, rows=50, dim=4, batch=16)
    with recshard_lab.launch(2) as ranks:
        found = dedup.figures_of(case, ranks.run(dedup.measure, case, 1))
    assert {figure.name for figure in found} >= {name for name in dedup.TARGETS if "table_wise" in name}
    sizes, times = found
    assert 0.05 < sizes.value < 0.5
    assert times.value > 0.0
