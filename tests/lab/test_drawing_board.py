"""DrawingBoard: what is drawn is judged by the library's own rule, predicted, and run beside the unsharded truth."""

from __future__ import annotations

from dataclasses import replace
from math import isnan
from typing import Any

import pytest

from recshard_lab.lab import DrawingBoard, measure_plan
from recshard_lab.lab.widgets.drawing_board import parse
from recshard_lab.launcher import launch
from recshard_lab.planner import Workload, estimate
from recshard_lab.sharding import PlanError, Topology
from tests.lab.plans import table

PINWHEEL = [
    (0, (0, 300), (0, 8)),
    (1, (0, 700), (8, 16)),
    (2, (700, 1000), (4, 16)),
    (3, (300, 1000), (0, 4)),
    (0, (300, 700), (4, 8)),
]


def board(**more: Any) -> DrawingBoard:
    return DrawingBoard(table("movies", 1000), Topology(4), Workload(32, 2.0), **more)


def test_a_pinwheel_is_a_tiling_and_is_predicted() -> None:
    made = board(tiles=PINWHEEL)
    assert made.problem == ""
    assert made.plan is not None
    expected = estimate(made.plan, [made.table], made.topology, made.workload).step_ms
    assert f'data-step-ms="{expected!r}"' in made.card.value
    assert "5 shards on 4 ranks" in made.verdict.value
    space: dict[str, Any] = {"table": made.table, "topology": made.topology}
    exec(made.python, space)
    assert space["sharding"] == made.plan.tables()["movies"]


def test_a_hole_is_shown_named_and_closed_by_its_fix() -> None:
    made = board()
    made.tiles = [(0, (0, 400), (0, 16)), (1, (500, 1000), (0, 16))]
    assert made.plan is None
    assert "no shard covers rows [400, 500)" in made.problem
    assert made.canvas.fault == [400, 500, 0, 16]
    assert made.button.disabled
    made.fix.click()
    assert made.plan is not None
    assert made.tiles[0] == (0, (0, 500), (0, 16))
    assert made.canvas.fault == []
    made.canvas._handle_custom_msg({"undo": True}, [])
    assert made.plan is None


@pytest.mark.parametrize(
    ("tiles", "mended"),
    [
        ([(0, (0, 1000), (0, 16)), (1, (100, 200), (0, 8))], 4),  # in the middle: what is below is cut around it
        ([(0, (0, 1000), (0, 16)), (1, (0, 400), (0, 16))], 2),
        (PINWHEEL[:4], 5),  # a hole that no piece can grow over
        ([(0, (0, 1000), (0, 16)), (1, (1200, 1300), (0, 16))], 1),  # outside of the table
        ([], 1),
    ],
)
def test_every_fault_has_a_fix_that_can_be_applied_and_taken_back(tiles: Any, mended: int) -> None:
    made = board(tiles=tiles)
    assert made.plan is None
    assert "fix" in made.problem.lower()
    for _ in range(3):
        if made.plan is None:
            assert not made.fix.disabled
            made.fix.click()
    assert made.problem == ""
    assert len(made.tiles) == mended
    if len(tiles) == 2 and mended > 2:
        assert tiles[1] in made.tiles  # the later piece is on top and stays whole
    while not made.back.disabled:
        made.back.click()
    assert made.tiles == tiles


def test_pieces_can_be_typed() -> None:
    made = board()
    made.lines.value = "rank 2: rows 0-400, cols 0-16\n\n1: rows 400-1,000, cols 0-16"
    assert made.tiles == [(2, (0, 400), (0, 16)), (1, (400, 1000), (0, 16))]
    assert made.plan is not None
    made.lines.value = "rank 2 has all of it"
    assert "line 1" in made.problem
    assert made.plan is None
    with pytest.raises(ValueError, match="rank 0: rows 0-500, cols 0-16"):
        parse("rows 3")
    made.lines.value = "rank 7: rows 0-1000, cols 0-16"
    assert "world_size is 4" in made.problem
    made.tiles = []
    with pytest.raises(PlanError, match="no shards"):
        made.run()


def test_the_same_rows_on_every_rank_are_replicas_and_no_fault() -> None:
    hot = [(rank, (0, 100), (0, 16)) for rank in range(4)]
    made = board(tiles=[*hot, (0, (100, 1000), (0, 8)), (1, (100, 1000), (8, 16))])
    assert made.problem == ""
    assert made.canvas.fault == []


@pytest.mark.gate
def test_what_is_drawn_runs_and_equals_the_unsharded_table() -> None:
    with launch(4) as ranks:
        made = board(tiles=PINWHEEL)
        outcome = made.run(3)
        assert outcome["outputs_apart"] < 1e-5
        assert outcome["weights_apart"] < 1e-5
        assert 'data-same="true"' in made.badge.value
        assert "measured" in made.card.value
        assert ranks.usable
        made.lines.value += "\nrank 2 has all of it"
        assert "line 6" in made.verdict.value
        assert made.badge.value == ""  # of another drawing
        assert made.measured is None


def test_nan_is_not_equal_to_the_unsharded_table() -> None:
    config = replace(table("movies", 1000), init_fn=lambda weight: weight.fill_(float("nan")))
    made = DrawingBoard(config, Topology(2), Workload(32, 2.0))
    with launch(2):
        outcome = made.run(1)
    assert isnan(outcome["outputs_apart"])
    assert isnan(outcome["weights_apart"])
    assert 'data-same="false"' in made.badge.value


@pytest.mark.clock  # it compares times that others measure
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
