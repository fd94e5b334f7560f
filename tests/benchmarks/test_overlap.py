"""`recshard bench overlap`: steps take turns on real ranks, and their times give the hidden share."""

import os

import pytest

import recshard_lab
from benchmarks import overlap
from benchmarks.apparatus.step_case import SGD, StepCase
from recshard_lab.comm.wire import LATENCY_VARIABLE

SMALL = StepCase("row_wise", SGD, "uniform", tables=2, rows=40, dim=8, batch=16, pooling=3, local_ranks=1)


def variable_after(case: StepCase) -> tuple[list[dict[str, float]], str | None]:
    return overlap.measure(case, "direct", rounds=2), os.environ.get(LATENCY_VARIABLE)


@pytest.mark.clock
def test_steps_with_and_without_the_dense_part_are_timed_over_the_link() -> None:
    with recshard_lab.launch(2, nodes=2) as ranks:
        found = ranks.run(variable_after, SMALL)
    assert [variable for _, variable in found] == [None, None]
    figure = overlap.figure_of("row_wise", [rounds for rounds, _ in found])
    assert figure.name in overlap.TARGETS
    assert figure.beside["dense ms"] >= 2 * overlap.DENSE_MS
    assert figure.beside["link ms"] >= 2 * overlap.LINK_MS
    assert figure.beside["both ms"] >= figure.beside["dense ms"]


def test_the_share_is_of_the_output_and_gradient_exchanges() -> None:
    for both, share in ((57.0, 0.0), (49.0, 0.5), (41.0, 1.0)):
        rounds = [{"link": 37.0, "dense": 20.0, "both": both}]
        assert overlap.figure_of("row_wise", [rounds, rounds]).value == share
