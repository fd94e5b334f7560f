"""Saving and loading when something fails on one rank, the disk is full, or another process saves to the same path."""

import os
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

from recshard_lab import complete_folders, load_checkpoint, save_checkpoint
from recshard_lab.distributed import CheckpointError
from recshard_lab.saved.files import CHECKPOINT
from tests.distributed import failure_jobs as jobs
from tests.distributed.test_checkpoint import small, weights
from tests.distributed.test_failures import all_raise, call

pytestmark = pytest.mark.gate


WRITING = [
    ("distributed.state.checkpoint:_Hashed.write", 3, "full"),
    ("distributed.state.checkpoint:_Hashed.write", 0, "memory"),
    ("distributed.state.checkpoint:BlockPlanner.create_local_plan", 0, "odd"),
    ("distributed.state.checkpoint:_bytes_of", 0, "odd"),
    ("distributed.state.checkpoint:_Save._start", 0, "memory"),
    ("complete_folders:Staging.commit", 0, "full"),
    ("complete_folders:described", 0, "odd"),
]


@pytest.mark.parametrize(("where", "number", "error"), WRITING)
def test_a_save_that_fails_on_one_rank_fails_on_all_and_keeps_the_checkpoint_before(
    two: Any, tmp_path: Path, where: str, number: int, error: str
) -> None:
    path = tmp_path / "run"
    for said, ran, changed in call(two, jobs.save_failing, where, number, str(path), error):
        rank = 0 if "complete_folders" in where or "_start" in where else 1
        assert said.startswith(f"CheckpointSaveError: {path} could not be saved: "), said
        assert f"rank {rank}" in said
        assert ("the disk is full" in said) == (error == "full")
        assert ran > number or two.world_size > 1
        assert changed == []
    assert sorted(child.name for child in tmp_path.iterdir()) == ["run"]


LOADING = [
    ("complete_folders:FolderFormat.check_files", 0),
    ("distributed.state.checkpoint:_compare", 0),
    ("distributed.state.checkpoint:_settings", 0),
    ("distributed.state.checkpoint:_compare_groups", 0),
    ("distributed.state.model_state:ModelState.make_dense", 0),
    ("distributed.state.model_state:ModelState._whole_states", 0),
    ("distributed.state.model_state:ModelState._read", 0),
]


def test_a_load_that_fails_on_one_rank_fails_on_all(two: Any, tmp_path: Path) -> None:
    call(two, jobs.save_once, str(tmp_path / "run"))
    for where, number in LOADING:
        errors, counts = zip(*call(two, jobs.load_failing, where, number, str(tmp_path / "run")), strict=True)
        all_raise(errors)
        assert min(counts) > 0
    reading = "saved.reader:SafePlanner.create_local_plan"
    for error, _ in call(two, jobs.load_failing, reading, 0, str(tmp_path / "run")):
        assert error.startswith(f"CheckpointError: {tmp_path / 'run'} could not be read: rank 1: MemoryError")


@pytest.mark.parametrize(
    "where",
    [
        "distributed.state.pretrained:_checked",
        "distributed.state.pretrained:_same_everywhere",
        "distributed.state.pretrained:_Load.from_rows",
    ],
)
def test_pretrained_tables_that_fail_on_one_rank_fail_on_all(two: Any, where: str) -> None:
    errors, counts, _ = zip(*call(two, jobs.pretrained_failing, where), strict=True)
    all_raise(errors)
    assert min(counts) > 0
    assert len(call(two, jobs.works_after)) == 2


# ---- several processes, one path ----


def _saving(path: Path, seed: int) -> int:
    """In a child: the exit code of some saves."""
    try:
        for _ in range(20):
            save_checkpoint(path, small(seed), extra=seed)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def test_processes_that_save_to_one_path_all_succeed_and_one_of_their_checkpoints_stays(tmp_path: Path) -> None:
    path = tmp_path / "run"
    children = []
    for seed in (1, 2, 3):
        if (pid := os.fork()) == 0:
            os._exit(_saving(path, seed))
        children.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0, 0, 0]
    module = small(9)
    seed = load_checkpoint(path, module).extra
    assert torch.equal(weights(module), weights(small(seed)))
    assert sorted(child.name for child in tmp_path.iterdir()) == ["run"]


def test_a_living_save_is_not_removed_and_a_dead_one_is(tmp_path: Path) -> None:
    path = tmp_path / "run"
    living = complete_folders.Staging(CHECKPOINT, path)
    (dead := tmp_path / ".run.saving-00000000").mkdir()
    (dead / "part").write_text("half a table")
    save_checkpoint(path, small(1))
    assert not dead.exists()
    assert living.path.is_dir()
    living.discard()
    assert sorted(child.name for child in tmp_path.iterdir()) == ["run"]


def test_a_stopped_process_that_holds_the_lock_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(complete_folders, "_LOCK_S", 0.1)
    save_checkpoint(tmp_path / "run", small(1))
    with (
        complete_folders.locked(CHECKPOINT, tmp_path / "run"),
        pytest.raises(CheckpointError, match="another process holds the lock"),
    ):
        save_checkpoint(tmp_path / "run", small(2))
    module = small(9)
    load_checkpoint(tmp_path / "run", module)
    assert torch.equal(weights(module), weights(small(1)))
