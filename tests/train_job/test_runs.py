"""Runs that are killed and gone on with end as those that never were; on ranks, alone, under torchrun."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

import recshard_lab as rs
from recshard_lab.launcher import RankError
from recshard_lab.models import model_names
from recshard_lab.train.job import TrainConfig, run_training
from tests.patience import wait_until
from tests.train_job import runs
from tests.train_job.runs import SlowSaves, config_of, on_rank, weights_of

pytestmark = pytest.mark.timeout(100)

STEPS = 26


def launched(world_size: int, config: dict[str, Any], **kill: int) -> Any:
    with rs.launch(world_size) as ranks:
        return ranks.run(on_rank, config, **kill)


def killed(world_size: int, config: dict[str, Any], at: int, victim: int = 0, after_saves: bool = False) -> None:
    with rs.launch(world_size) as ranks, pytest.raises(RankError):
        ranks.run(on_rank, config, kill_at=at, victim=victim, after_saves=after_saves)


def apart(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    assert first.keys() == second.keys()
    return max(float((first[name].double() - second[name].double()).abs().max()) for name in first)


@pytest.fixture(scope="module")
def never_killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights, optimizer states and notes of the run on two ranks."""
    config = config_of(tmp_path_factory.mktemp("whole"))
    done = launched(2, config)
    assert [one.step for one in done] == [STEPS, STEPS]
    assert done[0].test == done[1].test
    return weights_of(config)


@pytest.mark.nightly
@pytest.mark.parametrize("pipeline", ["base", "sparse_dist", "prefetch"])
def test_a_run_killed_at_a_random_step_ends_with_the_weights_of_one_never_killed(
    never_killed: Any, tmp_path: Path, pipeline: str
) -> None:
    expected, notes = never_killed
    config = config_of(tmp_path, pipeline={"name": pipeline})
    at = random.randrange(1, STEPS)
    killed(2, config, at, victim=random.randrange(2))
    # the save of the last multiple of 4 may have been running; each save waits for the one before
    saved = rs.distributed.state.checkpoint.read_extra(config["checkpoint"]["path"])["step"] if at > 8 else 0
    assert at - saved <= 2 * 4
    assert launched(2, config)[0].step == STEPS
    found, told = weights_of(config)
    assert apart(found, expected) == 0.0, f"killed at {at}"
    assert told["loader"] == notes["loader"]
    assert told["step"] == STEPS


@pytest.mark.gate
@pytest.mark.parametrize("world_size", [1, 3])
def test_it_goes_on_with_another_number_of_ranks(never_killed: Any, tmp_path: Path, world_size: int) -> None:
    expected, notes = never_killed
    config = config_of(tmp_path)
    killed(2, config, at=18)
    assert launched(world_size, config)[0].step == STEPS
    found, told = weights_of(config)
    assert apart(found, expected) <= 1e-5
    assert told["loader"] == notes["loader"]
    assert told["world"] == [world_size, world_size]


def test_what_is_killed_while_it_is_saved_goes_on_from_the_save_before(never_killed: Any, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    killed(2, config, at=9, after_saves=True)
    leftover = tmp_path / ".checkpoint.saving-0123abcd"
    leftover.mkdir()
    (leftover / "__0_0.distcp").write_bytes(b"half of it")
    (tmp_path / "checkpoint").rename(tmp_path / ".checkpoint.previous")  # between the two renames
    launched(2, config)
    assert apart(weights_of(config)[0], never_killed[0]) == 0.0
    assert not leftover.exists()


def test_training_continues_while_a_save_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves = SlowSaves(monkeypatch)
    done = run_training(TrainConfig.model_validate(config_of(tmp_path, max_steps=8)), saves)
    assert saves.writers == [("saving", True), ("MainThread", True)]  # the last save is not in the background
    assert [words for words in saves.notes if "save" in words.lower()] == ["saved at step 4", "saved at step 8"]
    assert done.unsaved is None


def test_without_memory_for_a_copy_the_loop_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves = SlowSaves(monkeypatch)
    saves.step_6.set()
    monkeypatch.setattr("recshard_lab.train.job.run.free_memory", lambda: (1000, 10**12))
    run_training(TrainConfig.model_validate(config_of(tmp_path, max_steps=8)), saves)
    assert saves.writers == [("MainThread", True)] * 2


def test_a_run_that_fails_completes_the_save_that_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves = SlowSaves(monkeypatch, raises=True)
    with pytest.raises(RuntimeError, match="step 7"):
        run_training(TrainConfig.model_validate(config_of(tmp_path)), saves)
    assert rs.distributed.state.checkpoint.read_extra(tmp_path / "checkpoint")["step"] == 4


@pytest.mark.nightly
def test_stale_rows_and_random_layers_repeat_bit_for_bit_too(tmp_path: Path) -> None:
    for name, changes in {
        "semi_sync": {"pipeline": {"name": "semi_sync", "start_batch": 2}},
        "dropout": {"model": {"name": "tests.train_job.runs:Dropping", "rate": 0.4}},
    }.items():
        whole, cut = config_of(tmp_path / name / "whole", **changes), config_of(tmp_path / name / "cut", **changes)
        launched(2, whole)
        killed(2, cut, at=15)
        launched(2, cut)
        assert apart(weights_of(cut)[0], weights_of(whole)[0]) == 0.0, name


@pytest.mark.gate
def test_it_goes_on_under_another_plan_where_one_is_asked_for(never_killed: Any, tmp_path: Path) -> None:
    config = config_of(tmp_path, max_steps=7)
    launched(2, config)
    launched(2, config_of(tmp_path, plan={"scheme": "column_wise"}))
    found, told = weights_of(config)
    tables = json.loads(told["plan"])["modules"]["embedding_bag_collection"]
    assert {table["sharding_type"] for table in tables.values()} == {"column_wise"}
    assert apart(found, never_killed[0]) <= 1e-5


MODELS = {
    "dlrm": {"tables": {"cat_1": {"data_type": "fp16"}}},
    "dlrm_dcn": {"dcn_num_layers": 2, "dcn_low_rank_dim": 4},
    "deepfm": {"deep_layer_sizes": [8]},
    "two_tower": {"layer_sizes": [8, 4], "in_batch_negatives": True, "candidate_id": "cat_2", "frequency_buckets": 50},
}


@pytest.mark.gate
def test_every_model_trains_by_its_name_and_goes_on_with_other_ranks(tmp_path: Path) -> None:
    assert set(model_names()) == set(MODELS)
    configs = {
        name: config_of(tmp_path / name, model={"name": name, "embedding_dim": 8, **more}, epochs=1)
        for name, more in MODELS.items()
    }
    with rs.launch(2) as ranks:
        begun = {name: ranks.run(on_rank, {**config, "max_steps": 6})[0] for name, config in configs.items()}
    for name, config in configs.items():
        done = run_training(TrainConfig.model_validate(config))
        assert (begun[name].step, done.step, done.samples) == (6, 13, 400 - 6 * 32), name
        assert 0 <= done.test["auc"] <= 1
        whole = run_training(
            TrainConfig.model_validate(config | {"checkpoint": None, "log": {"progress": "off", "every_steps": 5}})
        )
        assert whole.loss == pytest.approx(done.loss, abs=1e-4), name
        # the biases of a softmax have no gradient but rounding, which Adam turns into whole steps
        assert whole.test == pytest.approx(done.test, abs=2e-2 if name == "two_tower" else 1e-3), name


def test_a_finished_run_is_scored_and_trained_no_further(tmp_path: Path) -> None:
    config = TrainConfig.model_validate(config_of(tmp_path, max_steps=6))
    first, second = run_training(config), run_training(config)
    assert (first.step, first.samples) == (6, 192)
    assert (second.step, second.samples, second.loss) == (6, 0, None)
    assert first.test == second.test
    with pytest.raises(ValueError, match="sizes"):
        run_training(TrainConfig.model_validate(config_of(tmp_path, multi_hot={"sizes": [1, 2]}, checkpoint=None)))
    longer = run_training(TrainConfig.model_validate(config_of(tmp_path, epochs=3)))
    assert (longer.step, longer.samples) == (39, 3 * 400 - 192)


def test_a_run_learns_and_its_schedule_is_of_the_step(tmp_path: Path) -> None:
    config = config_of(tmp_path, epochs=6, evaluation={"every_steps": 13}, metrics=["auc", "log_loss"])
    done = run_training(TrainConfig.model_validate(config))
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["kind"] == "train"]
    assert [line["step"] for line in lines if line["kind"] == "test"] == [13, 26, 39, 52, 65, 78]
    assert trained[-1]["loss"] < 0.8 * trained[0]["loss"]
    assert trained[-1]["auc"] > 0.7
    assert done.test["samples"] == 100
    assert set(trained[0]) == {"step", "kind", "time", "loss", "auc", "log_loss", "samples_per_second"}


# ---- torchrun ----


@pytest.mark.nightly
def test_ranks_of_torchrun_killed_with_9_end_as_ranks_never_killed(never_killed: Any, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    config["log"]["every_steps"] = 1
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(config))
    log, said, at = tmp_path / "log.jsonl", tmp_path / "said.txt", random.randrange(5, STEPS - 8)
    run = runs.torchrun(file, said)
    try:
        wait_until(lambda: max(runs.steps_in(log), default=0) >= at or run.poll() is not None, 90, every_s=0.002)
    finally:
        runs.kill(run)
    assert at <= max(runs.steps_in(log)) < STEPS
    assert runs.torchrun(file, said).wait() == 0, said.read_text()
    found, told = weights_of(config)
    assert told["step"] == STEPS
    assert told["world"] == [2, 2]
    assert apart(found, never_killed[0]) <= 1e-5, f"killed at {at}"


@pytest.mark.gate
def test_alone_in_a_terminal_it_prints_lines_and_ends_with_the_same_weights(never_killed: Any, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    config["log"] |= {"progress": "lines", "tensorboard": "board"}
    config["checkpoint"]["path"] = "kept"  # beside the file
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(config))
    command = runs.recshard("train", "--config", str(file))
    done = subprocess.run(command, env=runs.environment(), capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "1 rank on cpu, from the beginning" in done.stdout
    assert "step 26 of 26  loss 0." in done.stdout
    assert " samples/s" in done.stdout
    config["checkpoint"]["path"] = str(tmp_path / "kept")
    assert apart(weights_of(config)[0], never_killed[0]) <= 1e-5
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "board")).Reload()
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    logged = [(event.step, event.value) for event in board.Scalars("train/loss")]
    assert logged == [(line["step"], pytest.approx(line["loss"])) for line in lines if line["kind"] == "train"]


def test_the_seed_determines_the_weights(tmp_path: Path) -> None:
    found = []
    for seed, before in ((3, 1), (3, 2), (4, 1)):
        torch.manual_seed(before)  # of this process, before the run
        folder = tmp_path / f"{seed}{before}"
        config = config_of(folder, model={"name": "tests.train_job.runs:Dropping"}, max_steps=4, seed=seed)
        run_training(TrainConfig.model_validate(config))
        found.append(weights_of(config)[0])
    assert apart(*found[:2]) == 0
    assert apart(*found[1:]) > 1e-3
    assert torch.isfinite(torch.cat([weight.flatten() for weight in found[0].values()])).all()
