"""DrawingBoard: the time that it shows is the time of the drawn plan alone."""

from __future__ import annotations

import pytest

from recshard_lab.lab import DrawingBoard, measure_plan
from recshard_lab.launcher import launch
from recshard_lab.planner import Workload
from recshard_lab.sharding import Topology
from tests.lab.plans import table

pytestmark = pytest.mark.clock  # it compares times that others measure


@pytest.mark.gate
def test_a_run_is_timed_as_the_plan_comparison_times_it() -> None:
    """The unsharded table that is trained beside it takes several times as long, and is not in the figure."""
    large = table("movies", 50_000, 64)
    shards = [(0, (0, 25_000), (0, 64)), (1, (25_000, 50_000), (0, 64))]
    drawn_ms, alone_ms = [], []
    with launch(2) as ranks:
        made = DrawingBoard(large, Topology(2), Workload(2048, 20.0), shards)
        for _ in range(3):
            made.run(2)
            assert made.plan is not None
            assert made.measured is not None
            assert made.measured.others is not None
            assert 0 <= made.measured.others <= 1
            drawn_ms.append(made.measured.step_ms)
            alone_ms.append(measure_plan(ranks, made.plan, [large], made.workload).step_ms)
    assert min(drawn_ms) < 2 * min(alone_ms)
