"""The model whose construction is timed: what it promises to be, and that its calls are timed one by one."""

from __future__ import annotations

import pytest

from benchmarks import construct
from recshard_lab import launch
from recshard_lab.embedding import EmbeddingBagCollection


def test_the_given_plan_cuts_every_table_and_mixes_four_schemes() -> None:
    tables = construct.tables()
    assert len({table.name for table in tables}) == construct.TABLES == 500
    plan = construct.given_plan(EmbeddingBagCollection(tables=tables, device="meta"))
    schemes = [entry.sharding_type for entry in plan.tables().values()]
    assert {scheme: schemes.count(scheme) for scheme in schemes} == dict.fromkeys(
        ("table_wise", "row_wise", "column_wise", "data_parallel"), 125
    )


@pytest.mark.nightly
def test_every_call_is_timed_on_every_rank() -> None:
    with launch(construct.RANKS) as ranks:
        for imports, taken, worked in ranks.run(construct._measure, True, 1):
            assert 0 < imports < taken[0]
            assert len(taken) == len(worked) == 2
            assert min(*taken, *worked) > 0
