"""What ranks run in the tests of asynchronous saves."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from recshard_lab import (
    load_checkpoint,
    save_checkpoint,
)
from recshard_lab.distributed import CheckpointSaveError, async_save_checkpoint
from recshard_lab.distributed.state import checkpoint as checkpoint_writer
from tests.distributed import state_jobs
from tests.distributed.jobs import Case, attempted
from tests.patience import scaled


@contextmanager
def writing(before: Any) -> Iterator[None]:
    """Calls ``before`` before each write to a file of tensors."""
    usual = checkpoint_writer._Hashed.write

    def write(self: Any, data: Any) -> int:
        before()
        return usual(self, data)

    checkpoint_writer._Hashed.write = write  # type: ignore[method-assign]
    try:
        yield
    finally:
        checkpoint_writer._Hashed.write = usual  # type: ignore[method-assign]


def train_on(case: Case, path: str, plan: str) -> tuple[list[str], bool, int, Any]:
    """Trains while rank 1 cannot write and rank 0 waits for it; the model that loads it afterwards has another plan.

    Returns:
        What differs between the loaded state and the state at the call, whether the save was running after the
        training, how many tensors the training changed, and the loaded extra.
    """
    dmp = state_jobs.build(case)
    dense = torch.optim.Adam(dmp.dense_parameters(), lr=0.01)
    state_jobs.train(dmp, dense, case, case.steps[:2])
    truth = everything(dmp, dense)
    may_write = threading.Event()
    with writing(may_write.wait if torch.distributed.get_rank() == 1 else lambda: None):
        pending = async_save_checkpoint(path, dmp, dense, extra={"epoch": 3})
        state_jobs.train(dmp, dense, case, case.steps[2:])
        running = not pending.done()
        may_write.set()
        assert str(pending.result(timeout=scaled(20))) == path
    assert pending.done()
    other = state_jobs.build(case, plan)
    second = torch.optim.Adam(other.dense_parameters(), lr=0.5)
    extra = load_checkpoint(path, other, second).extra
    changed = state_jobs.same(truth, everything(dmp, dense))
    return state_jobs.same(truth, everything(other, second)), running, len(changed), extra


def everything(dmp: Any, dense: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights, fused states and dense states, whole."""
    states = state_jobs.dense_states(dense)
    return state_jobs.everything(dmp) | {f"dense {number}": value for number, value in enumerate(states)}


def save_twice(case: Case, path: str, second: str) -> tuple[bool, int]:
    """Whether the first save was over when a second one or a load returned, and the extra that is loaded."""
    dmp = state_jobs.build(case)
    may_write = threading.Event()
    with writing(may_write.wait):
        first = async_save_checkpoint(path, dmp, extra=1)
        threading.Timer(0.2, may_write.set).start()
        if second == "load":
            load_checkpoint(path, dmp)
        else:
            pending = (async_save_checkpoint if second == "async" else save_checkpoint)(path, dmp, extra=2)
        over = first.done()
        if second == "async":
            pending.result()
    return over, load_checkpoint(path, dmp).extra


def fail_in_the_background(case: Case, path: str, waits: list[bool]) -> list[str]:
    """Errors when rank 1 cannot write: of ``result()`` on the ranks that call it, of the next save and of the one
    after it; then the extra that is loaded, and whether the error was raised again by a second ``result()``."""
    rank, dmp = torch.distributed.get_rank(), state_jobs.build(case)
    save_checkpoint(path, dmp, extra=0)

    def fail() -> None:
        if rank == 1:
            raise OSError(28, "No space left on device")

    with writing(fail):
        pending = async_save_checkpoint(path, dmp, extra=1)
        while not pending.done():
            pass
    errors = [attempted(pending.result) if waits[rank] else ""]
    kept = load_checkpoint(path, dmp).extra
    errors += [attempted(lambda: save_checkpoint(path, dmp, extra=2)) for _ in range(2)]
    again = isinstance(pending.exception(), CheckpointSaveError)
    return [*errors, f"{kept}, then {load_checkpoint(path, dmp).extra}", str(again)]


def killed(case: Case, path: str, victim: int, place: str) -> None:
    """Kills one rank in a background save over a checkpoint, where it writes tensors or renames folders."""
    dmp = state_jobs.build(case)
    save_checkpoint(path, dmp, extra=1)

    def die(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if torch.distributed.get_rank() == victim and place == "rename":
        os.rename = die  # type: ignore[assignment]
    with writing(die if torch.distributed.get_rank() == victim and place == "write" else lambda: None):
        async_save_checkpoint(path, dmp, extra=2).result()
