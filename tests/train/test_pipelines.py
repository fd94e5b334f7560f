"""Pipelines on ranks: the plain loop's bits, whatever goes wrong ahead of a step, and no rank left waiting."""

from collections.abc import Iterator
from typing import Any

import pytest

import recshard_lab
from tests.grid import grid
from tests.train import pipeline_jobs as jobs

SAME = ["TrainPipelineBase", "TrainPipelineSparseDist", "PrefetchTrainPipelineSparseDist"]
AHEAD = SAME[1:]


@pytest.fixture(scope="module", params=[1, 2, pytest.param(4, marks=pytest.mark.nightly)], ids=lambda n: f"W{n}")
def ranks(request: pytest.FixtureRequest) -> Iterator[Any]:
    with recshard_lab.launch(request.param) as launched:
        yield launched


@pytest.mark.gate
@pytest.mark.parametrize(*grid(kind=SAME, model=list(jobs.MODELS), threads=[True, False]))
def test_ten_steps_give_the_plain_loops_bits(ranks: Any, kind: str, model: str, threads: bool) -> None:
    for found in ranks.run(jobs.compare, kind, model, threads=threads):
        assert found.differ == []
        assert found.losses == found.plain
        assert len(found.losses) == jobs.STEPS
        assert found.threads == []
        if kind == "TrainPipelineBase":
            assert found.pipelined == []
        elif model == "dlrm":
            where, note = found.report.split("\n")
            assert where == "model.embedding_bag_collection: its ids are sent ahead, from batch.sparse_features"
            assert ("Separate threads" in note) == threads
        else:
            assert found.pipelined == ["left", "right"]


@pytest.mark.parametrize("kind", SAME)
def test_ranks_with_different_numbers_of_batches_do_not_hang(ranks: Any, kind: str) -> None:
    world_size = ranks.world_size
    for number, (done, told, differ, dropped) in enumerate(ranks.run(jobs.uneven, kind, "stop")):
        assert (done, told, differ) == (5, "", [])
        assert dropped == (number < world_size - 1)
    for done, told, differ, _ in ranks.run(jobs.uneven, kind, "error"):
        assert (done, differ) == (5, [])
        if world_size > 1:
            assert f"ranks [{world_size - 1}] ran out of data after 5 batches" in told
            assert "uneven='stop'" in told


@pytest.mark.parametrize("kind", AHEAD)
def test_a_pipeline_sends_what_the_plain_loop_sends_and_two_agreements_more(ranks: Any, kind: str) -> None:
    """About the first batch, which is watched and not sent ahead, and about the end."""
    for plain, ours in ranks.run(jobs.collectives, kind):
        if ranks.world_size == 1:
            continue
        assert plain["input_dist/sizes"] == plain["input_dist/ids"] == jobs.STEPS
        assert ours == plain | {"input_dist/sizes": jobs.STEPS + 1, "pipeline/agree": 1}


@pytest.mark.parametrize(("start", "optimizer"), [(0, "exact_row_wise_adagrad"), (4, "exact_sgd")])
def test_semi_synchronous_steps_read_rows_before_the_step_before(ranks: Any, start: int, optimizer: str) -> None:
    for threads in (True, False):
        for differ, losses, plain, plain_losses in ranks.run(jobs.semi_sync, start, optimizer, threads=threads):
            assert differ == []
            assert losses
            assert plain != []
            assert not plain_losses


def test_a_semi_synchronous_pipeline_is_the_plain_loop_before_its_start(ranks: Any) -> None:
    for found in ranks.run(jobs.compare, "TrainPipelineSemiSync", "dlrm"):
        assert found.differ == []
        assert found.losses == found.plain


@pytest.mark.gate
@pytest.mark.parametrize(("kind", "threads"), [(AHEAD[0], False), (AHEAD[1], True), ("TrainPipelineSemiSync", True)])
def test_ranks_that_stumble_neither_hang_nor_differ(ranks: Any, kind: str, threads: bool) -> None:
    for differ, steps in ranks.run(jobs.stumbling, kind, threads=threads):
        assert differ == []
        assert steps == 20
