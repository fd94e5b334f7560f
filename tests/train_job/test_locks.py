"""A run whose checkpoint or log another run writes is refused on all ranks, and the other run is not disturbed."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import recshard_lab as rs
from recshard_lab.launcher import RankError
from recshard_lab.train.job import TrainConfig, run_training
from recshard_lab.train.job.locks import lock_paths
from recshard_lab.train.job.progress import Reporter
from tests.train_job import runs
from tests.train_job.runs import config_of, weights_of
from tests.train_job.test_runs import apart

pytestmark = pytest.mark.timeout(100)


def trained(config: dict[str, Any], reporter: Reporter | None = None) -> Any:
    return run_training(TrainConfig.model_validate(config), reporter)


def locks_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob(".*.lock"))


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    folder = tmp_path / "gate"
    folder.mkdir()
    for name in ("reached", "go"):
        os.mkfifo(folder / name)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    trained(gated(folder))
    return folder


def gated(folder: Path) -> dict[str, Any]:
    """A run that waits in step 6 if its environment names a gate."""
    return config_of(folder, model={"name": "tests.train_job.runs:Gated", "at": 6}, max_steps=8)


def command_of(folder: Path) -> list[str]:
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(gated(folder)))
    return runs.recshard("train", "--config", str(file))


@pytest.mark.nightly
def test_a_second_run_is_refused_on_all_ranks_and_the_first_ends_right(tmp_path: Path, gate: Path, whole: Path) -> None:
    config, command = gated(tmp_path), command_of(tmp_path)
    with subprocess.Popen(command, env={**runs.environment(), "GATE": str(gate)}) as first:
        (gate / "reached").read_text()
        second = subprocess.run(command, env=runs.environment(), capture_output=True, text=True, check=False)
        with rs.launch(2) as ranks, pytest.raises(RankError) as refusal:
            ranks.run(runs.on_rank, config)
        (gate / "go").write_text("")
        assert first.wait() == 0
    owner = f"process {first.pid} on {socket.gethostname()}"
    words = f"checkpoint.path {tmp_path}/checkpoint is in use: {owner} writes to it. Fix: wait until that run ends, or"
    assert second.returncode == 2
    assert words in " ".join(second.stderr.split())
    assert words in str(refusal.value)
    assert "all 2 ranks raised ValueError" in str(refusal.value)
    assert runs.steps_in(tmp_path / "log.jsonl") == runs.steps_in(whole / "log.jsonl")
    assert weights_of(config)[1]["step"] == 8
    assert apart(weights_of(config)[0], weights_of(gated(whole))[0]) <= 1e-6
    assert locks_in(tmp_path) == []


@pytest.mark.gate
def test_after_a_kill_the_next_run_resumes(tmp_path: Path, gate: Path, whole: Path) -> None:
    with subprocess.Popen(command_of(tmp_path), env={**runs.environment(), "GATE": str(gate)}) as first:
        (gate / "reached").read_text()
        first.kill()
    assert locks_in(tmp_path) == [".checkpoint.lock", ".log.jsonl.lock"]  # nobody holds them
    assert trained(gated(tmp_path)).step == 8
    assert apart(weights_of(gated(tmp_path))[0], weights_of(gated(whole))[0]) <= 1e-6
    assert locks_in(tmp_path) == []


class Again(Reporter):
    """Starts the run a second time while it runs."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config, self.refusal = config, ""

    def advance(self, step: int) -> None:
        with pytest.raises(ValueError, match="is in use") as refused:
            trained(self.config)
        self.refusal = str(refused.value)


def test_a_run_is_refused_in_the_process_of_the_first_too(tmp_path: Path) -> None:
    config = config_of(tmp_path, max_steps=1)
    again = Again(config)
    assert trained(config, again).step == 1
    assert f"process {os.getpid()} on " in again.refusal
    assert trained({**config, "max_steps": 2}).step == 2


@pytest.mark.parametrize(("section", "key"), [("checkpoint", "path"), ("log", "jsonl"), ("log", "tensorboard")])
def test_each_path_that_a_run_writes_is_locked_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str, key: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    config = config_of(tmp_path / "other", max_steps=1)
    config[section][key] = "link/shared"
    with lock_paths({"another.field": str(tmp_path / "shared")}):
        with pytest.raises(
            ValueError, match=rf"^{section}\.{key} {tmp_path}/shared is in use: process .* another {section}\.{key}$"
        ):
            trained(config)
        assert locks_in(tmp_path) == [".shared.lock"]
        assert locks_in(tmp_path / "other") == []  # a refused run keeps no lock
        if section == "log":
            assert trained(config, Reporter()).step == 1  # a reporter of yours replaces the log
    assert trained({**config, "max_steps": 2}).step == 2
    assert locks_in(tmp_path) == locks_in(tmp_path / "other") == []


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EIO])
def test_a_file_system_without_locks_gives_a_warning_and_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    lock = fcntl.flock

    def without(handle: int, how: int) -> None:
        if stat.S_ISREG(os.fstat(handle).st_mode):  # not the folder of a save
            raise OSError(number, os.strerror(number))
        lock(handle, how)

    monkeypatch.setattr(fcntl, "flock", without)
    with pytest.warns(UserWarning, match="could not be locked .* Two runs that write to it at once are not refused"):
        assert trained(config_of(tmp_path, max_steps=1)).unsaved is None


def test_a_folder_that_takes_no_file_gives_a_warning_and_trains(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = config_of(tmp_path, checkpoint={"path": str(tmp_path / "file/checkpoint")}, max_steps=1)
    with pytest.warns(UserWarning, match=r"checkpoint.path .* could not be locked \("):
        done = trained(config)
    assert done.step == 1
    assert done.unsaved is not None


def test_devices_and_urls_are_not_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    paths = {"log.jsonl": os.devnull, "log.tensorboard": "gs://bucket/board"}
    with lock_paths(paths), lock_paths(paths):
        assert list(tmp_path.iterdir()) == []


def test_a_lock_file_that_its_run_removes_meanwhile_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {"log.jsonl": str(tmp_path / "log.jsonl")}
    before, lock = lock_paths(paths), fcntl.flock

    def late(handle: int, how: int) -> None:
        before.close()  # between the opening and the lock
        lock(handle, how)

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", late)
        held = lock_paths(paths)
    assert locks_in(tmp_path) == [".log.jsonl.lock"]
    with held, pytest.raises(ValueError, match="is in use"):
        lock_paths(paths)
    assert locks_in(tmp_path) == []
