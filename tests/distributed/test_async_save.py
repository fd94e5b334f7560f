"""Asynchronous saves: what is saved is the state at the call, errors are raised, and a kill leaves the save before."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import recshard_lab
from recshard_lab import RankError, load_checkpoint, save_checkpoint
from recshard_lab.distributed import CheckpointSaveError, async_save_checkpoint
from tests.distributed import async_save_jobs as jobs
from tests.distributed.jobs import Model
from tests.distributed.test_checkpoint import small, weights
from tests.distributed.test_reshard import case_of, plan_named
from tests.patience import scaled, wait_until


@pytest.mark.gate
@pytest.mark.parametrize(("saved", "loaded"), [("row_wise", "column_wise"), ("pinwheel", "data_parallel")])
def test_training_continues_while_the_state_at_the_call_is_written(
    two: Any, tmp_path: Path, saved: str, loaded: str
) -> None:
    case = case_of(2, "exact_row_wise_adagrad", steps=4)
    case.plan = plan_named(saved, 2)
    for wrong, running, changed, extra in two.run(jobs.train_on, case, str(tmp_path / "run"), plan_named(loaded, 2)):
        assert wrong == []
        assert running
        assert changed > 4
        assert extra == {"epoch": 3}


@pytest.mark.parametrize(("second", "loaded"), [("async", 2), ("sync", 2), ("load", 1)])
def test_a_second_save_and_a_load_wait_for_the_first(two: Any, tmp_path: Path, second: str, loaded: int) -> None:
    case = case_of(2, "exact_sgd", steps=0)
    assert two.run(jobs.save_twice, case, str(tmp_path / "run"), second) == [(True, loaded)] * 2
    assert [child.name for child in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("waits", [[True, True], [False, False], [True, False]], ids=["all", "none", "one"])
def test_an_error_in_the_background_is_raised_on_all_ranks_once(two: Any, tmp_path: Path, waits: list[bool]) -> None:
    case = case_of(2, "exact_sgd", steps=0)
    for rank, (awaited, following, last, extras, again) in enumerate(
        two.run(jobs.fail_in_the_background, case, str(tmp_path / "run"), waits)
    ):
        for text, raised in ((awaited, waits[rank]), (following, not all(waits))):
            if raised:
                assert text.startswith(f"CheckpointSaveError: {tmp_path / 'run'} could not be saved: the disk is full")
                assert "rank 1: " in text
            else:
                assert text == ""
        assert last == ""
        assert extras == "0, then 2"
        assert again == "True"
    assert [child.name for child in tmp_path.iterdir()] == ["run"]


def test_a_module_of_one_process_is_saved_and_an_error_before_the_thread_starts_is_raised_at_once(
    tmp_path: Path, monkeypatch: Any
) -> None:
    module = small(1)
    truth = weights(module)
    pending = async_save_checkpoint(tmp_path / "run", module)
    with torch.no_grad():
        module.embedding_bags["t"].weight.zero_()
    load_checkpoint(pending.result(), module)
    assert torch.equal(weights(module), truth)
    with monkeypatch.context() as patched:
        patched.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
        with pytest.raises(CheckpointSaveError, match="the disk is full"):
            async_save_checkpoint(tmp_path / "run", module)
    save_checkpoint(tmp_path / "run", module)
    assert [child.name for child in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(("victim", "place"), [(1, "write"), (0, "rename")])
def test_a_rank_killed_in_a_background_save_leaves_the_checkpoint_before(
    tmp_path: Path, victim: int, place: str
) -> None:
    path = tmp_path / "run"
    with recshard_lab.launch(2) as two, pytest.raises(RankError, match=f"rank {victim}"):
        two.run(jobs.killed, case_of(2, "exact_sgd", "row_wise", steps=0), str(path), victim, place)
    module = Model(case_of(2, "exact_sgd", "row_wise", steps=0))
    assert load_checkpoint(path, module).extra == 1
    save_checkpoint(path, module)
    wait_until(lambda: len([*tmp_path.iterdir()]) == 1)  # the other rank removes its folder when it has raised
    assert [child.name for child in tmp_path.iterdir()] == ["run"]


_RANK = """
import sys, torch.distributed as dist
import recshard_lab as rl
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
table = rl.EmbeddingBagConfig(name="t", num_embeddings=50, embedding_dim=8, feature_names=["f"])
model = rl.DistributedModelParallel(rl.EmbeddingBagCollection([table]))
rl.distributed.async_save_checkpoint(folder + "/run", model, extra=1)
rl.distributed.async_save_checkpoint(folder + "/run", model, extra=2)
if rank == 0:
    print("the end")
"""


@pytest.mark.gate
def test_processes_that_end_during_a_save_complete_it_and_exit_with_code_0(tmp_path: Path) -> None:
    children = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _RANK, str(rank), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(2)
    ]
    ended = [(child.communicate(timeout=scaled(60))[0], child.returncode) for child in children]
    assert ended == [("the end\n", 0), ("", 0)]
    assert load_checkpoint(tmp_path / "run", small(), optimizer_state=False).extra == 2
