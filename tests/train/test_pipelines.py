"""Pipelines on ranks: the plain loop's bits, whatever fails or moves ahead of a step, and no rank left waiting."""

from typing import Any

import pytest

import recshard_lab
from tests.grid import grid
from tests.launched import launched
from tests.train import pipeline_jobs as jobs

SAME = ["TrainPipelineBase", "TrainPipelineSparseDist", "PrefetchTrainPipelineSparseDist"]
AHEAD = SAME[1:]


ranks = launched([1, 2, pytest.param(4, marks=pytest.mark.nightly)], ids=lambda n: f"W{n}")


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


def test_collections_that_share_no_message_do_not_change_a_bit(ranks: Any) -> None:
    for kind in AHEAD:
        for found in ranks.run(jobs.compare, kind, "two_sided", fuse_exchanges=False):
            assert found.differ == [], kind
            assert found.losses == found.plain


@pytest.mark.gate
@pytest.mark.parametrize("at", ["load", "copy", "input_dist"])
@pytest.mark.parametrize("kind", SAME)
def test_what_fails_ahead_on_one_rank_is_told_on_all_and_costs_that_batch_alone(ranks: Any, kind: str, at: str) -> None:
    if kind == "TrainPipelineBase" and at == "input_dist":
        return  # ids go in forward there
    words = {"load": "OSError: the disk is on fire", "copy": "MemoryError: no room on the device"}
    for threads in (True, False):
        for number, (differ, told, alive) in enumerate(ranks.run(jobs.fails_ahead, kind, at, threads=threads)):
            last = ranks.world_size - 1
            assert differ == []
            assert (told["stage"], told["batch"], told["rank"], told["after"]) == (at, 3, last, 3)
            assert told["why"] == words.get(at, told["why"])
            assert at != "input_dist" or "is not a row of table" in told["why"]
            assert (told["cause"] is not None) == (number == last)
            assert alive == 0


@pytest.mark.parametrize("at", ["forward", "backward"])
def test_what_fails_in_a_step_is_told_with_stage_and_batch_and_the_others_go_on(ranks: Any, at: str) -> None:
    for kind in SAME:
        for stage, batch, left, threads in ranks.run(jobs.fails_in_step, kind, at):
            assert (stage, batch, left, threads) == (at, 3, 6, []), kind


def test_a_step_that_fails_on_one_rank_alone_leaves_usable_ranks(ranks: Any) -> None:
    with pytest.raises(recshard_lab.RankError, match="stage 'forward' of batch 3 failed on rank 0: ArithmeticError"):
        ranks.run(jobs.fails_in_step, "TrainPipelineSparseDist", "forward", only_on=0)
    for found in ranks.run(jobs.compare, "TrainPipelineSparseDist", "dlrm"):
        assert found.differ == []


@pytest.mark.parametrize("policy", ["error", "skip"])
def test_a_loss_that_is_not_finite_steps_no_rank(ranks: Any, policy: str) -> None:
    for kind in SAME:
        for differ, told in ranks.run(jobs.nan_loss, kind, policy):
            assert differ == [], kind
            expected = "stage 'forward' of batch 2 failed on rank 0: the loss is not finite"
            assert told.startswith(expected) if policy == "error" else told == ""


@pytest.mark.parametrize("kind", SAME)
def test_no_batch_is_lost_whatever_iterators_are_given(ranks: Any, kind: str) -> None:
    for differ, counts in ranks.run(jobs.epochs_and_short_iterators, kind):
        assert (differ, counts) == ([], [5, 0, 5, 0, 0])
    for differ, taken in ranks.run(jobs.an_iterator_is_left, kind):
        assert differ == []
        assert 1 <= taken <= 3


@pytest.mark.parametrize("kind", AHEAD)
def test_tables_may_move_while_batches_are_under_way(ranks: Any, kind: str) -> None:
    for differ in ranks.run(jobs.resharded, kind):
        assert differ == []


def test_rows_that_were_read_ahead_are_read_again_after_tables_move(ranks: Any) -> None:
    for differ, old_executors in ranks.run(jobs.semi_sync_resharded):
        assert differ == []
        assert old_executors == 0


def test_evaluation_scores_as_the_model_does_and_changes_nothing(ranks: Any) -> None:
    for same, differ in ranks.run(jobs.evaluated):
        assert same
        assert differ == []


@pytest.mark.parametrize("interval", [1, 3, None])
def test_replicas_are_brought_together_as_often_as_asked(ranks: Any, interval: int | None) -> None:
    for differ in ranks.run(jobs.replicas, interval):
        assert differ == []


@pytest.mark.parametrize(
    ("why", "words"),
    [
        ("state", "its ids go through module 'shift', whose weights a step changes"),
        ("flow", "its ids are not the batch's own, and the model cannot be traced: TraceError"),
        ("lot", "the model computes other ids from the same batch at every call"),
    ],
)
def test_what_cannot_be_sent_ahead_stays_in_the_forward_and_is_named(ranks: Any, why: str, words: str) -> None:
    for kind in ("TrainPipelineSparseDist", "TrainPipelineSemiSync"):
        for differ, left, pipelined in ranks.run(jobs.stubborn, kind, why):
            assert differ == [], kind
            assert pipelined == ["left"]
            assert left["right"].startswith(words)
            assert left["idle"] == "not called"


def test_ids_that_the_model_makes_can_be_left_in_the_forward(ranks: Any) -> None:
    for found in ranks.run(jobs.compare, "TrainPipelineSparseDist", "two_sided", pipeline_postproc=False):
        assert found.differ == []
        assert found.pipelined == ["left"]
        assert "pipeline_postproc=False" in found.report


def test_training_and_evaluating_pipelines_may_take_turns(ranks: Any) -> None:
    for differ, same in ranks.run(jobs.taking_turns):
        assert differ == []
        assert same


def test_a_model_that_reads_another_batch_than_was_sent_is_told_so(ranks: Any) -> None:
    for told in ranks.run(jobs.called_otherwise):
        assert told.startswith("stage 'forward' of batch 2 failed on rank")
        assert "is called with other ids than those that were sent ahead" in told
