"""A rank that leaves a step in the middle: the others raise and name it."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import recshard_lab
from recshard_lab import RankError
from recshard_lab.comm import all_reduce, broadcast
from recshard_lab.comm.errors import store
from recshard_lab.distributed import ShardingEnv
from tests.distributed.failure_jobs import batch, build
from tests.distributed.jobs import attempted
from tests.patience import scaled, wait_until

pytestmark = pytest.mark.gate

UNFINISHED = (
    "an error ended an earlier backward before DistributedDataParallel had averaged the dense gradients, so it cannot "
    "start another step. Fix: start the ranks again, or build the model again on all ranks"
)

SCRIPT = """
import os, sys, torch
from tests.patience import scaled
from tests.distributed.failure_jobs import batch, build
how, rank, store, groups = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
dmp, dense = build(groups or None)
for step in range(2):
    loss = dmp(batch(step))
    loss.item()
    torch.distributed.barrier()
    if step and rank:
        if how == "SIGKILL":
            os.kill(os.getpid(), 9)
        raise ValueError("a mistake in the loss")
    try:
        loss.backward()
    except RuntimeError as error:
        print(error, flush=True)
"""


@pytest.mark.parametrize(
    ("how", "groups"),
    [
        pytest.param("an exception", 0, id="raises", marks=pytest.mark.nightly),
        pytest.param("SIGKILL", 0, id="killed"),
        pytest.param("an exception", 1, id="replicas"),
    ],
)
def test_a_process_that_ends_between_forward_and_backward_is_named(tmp_path: Path, how: str, groups: int) -> None:
    commands = [[sys.executable, "-c", SCRIPT, how, str(rank), str(tmp_path / "store"), str(groups)] for rank in (0, 1)]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for command in commands]
    try:
        (raised, _), _ = [rank.communicate(timeout=scaled(60)) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    text = raised.decode()
    assert "rank 1" in text
    assert ("ValueError: a mistake in the loss" in text) == (how == "an exception")


def step_without_backward(catches: bool) -> list[str]:
    """Two steps; rank 1 has an error of its own code between forward and backward of the first."""
    dmp, _ = build()
    rank = torch.distributed.get_rank()

    def step(number: int, mistake: bool) -> None:
        loss = dmp(batch(number))
        loss.item()
        if mistake and rank == 1:
            raise ZeroDivisionError("a mistake in the loss")
        loss.backward()

    step(0, False)
    torch.distributed.barrier()
    if not catches:
        step(1, True)
    return [attempted(lambda: step(1, True)), attempted(lambda: step(2, False))]


def test_ranks_that_wait_for_each_other_raise_an_error_that_names_both() -> None:
    with recshard_lab.launch(2) as ranks:
        errors, errors_of_1 = ranks.call(step_without_backward, (True,), timeout_s=scaled(20))
        assert "rank 0 waits for 'output_dist_backward/rows' of rank 1, which waits for 'input_dist/sizes'" in errors[0]
        assert errors_of_1[0].startswith("ZeroDivisionError")
        assert "rank 1 waits for 'input_dist/sizes' of rank 0, which waits for 'output_dist_back" in errors_of_1[1]
        assert errors[1] == f"RuntimeError: {UNFINISHED}"


def test_a_launched_rank_that_raises_between_forward_and_backward_frees_the_others_and_is_named(two: Any) -> None:
    with pytest.raises(RankError, match=r"rank 1 raised ZeroDivisionError: a mistake(?s:.*)rank 0 was waiting"):
        two.run(step_without_backward, False)
    assert two.run(torch.distributed.get_rank) == [0, 1]


def descriptors_of_a_wait() -> list[int]:
    """Numbers of open file descriptors of rank 0 before and after rank 1 lets it wait until it looks at the store."""
    dmp, _ = build()
    dmp(batch(0)).backward()
    counts = [len(os.listdir("/dev/fd"))]
    torch.distributed.barrier()
    if torch.distributed.get_rank():
        wait_until(lambda: store().check(["waits/0/2"]) and store().get("waits/0/2"))
    dmp(batch(1)).backward()
    return [*counts, len(os.listdir("/dev/fd"))]


def test_a_rank_that_waits_opens_no_files(two: Any) -> None:
    before, after = two.call(descriptors_of_a_wait, timeout_s=scaled(20))[0]
    assert after <= before


def different_collectives() -> str:
    """The error of a rank that sums over one group while the other broadcasts over a second one. Ends connections."""
    one, two = (ShardingEnv.default().duplicate() for _ in range(2))
    for env in (one, two):
        all_reduce(torch.zeros(1), env, "first")
    if one.rank:
        return attempted(lambda: broadcast(torch.zeros(1), two, "weights", source=0))
    return attempted(lambda: all_reduce(torch.zeros(1), one, "sum"))


def test_ranks_that_call_different_collectives_raise_an_error_that_names_both(two: Any) -> None:
    one, other = two.call(different_collectives, timeout_s=scaled(20))
    assert one.startswith("RankLost: rank 0 waits for 'sum' of rank 1, which waits for 'weights' of this rank")
    assert other.startswith("RankLost: rank 1 waits for 'weights' of rank 0, which waits for 'sum' of this rank")
