"""`recshard bench dedup`: both sides step on the same batches, and bytes are those of distinct ids."""

from dataclasses import replace

import pytest

import recshard_lab
from benchmarks import dedup


@pytest.mark.nightly
def test_bytes_shrink_by_the_ids_that_repeat() -> None:
    with recshard_lab.launch(2) as ranks:
        for case in (dedup.SEQUENCES[0], dedup.POOLED[0]):
            small = replace(case, tables=2, rows=50, dim=4, batch=64)
            sizes, times = dedup.figures_of(case, ranks.run(dedup.measure, small, 1))
            assert 0.05 < sizes.value < 0.7
            assert times.value > 0.0
            assert sizes.name in dedup.TARGETS or "pooled, 1 a bag" in sizes.name
