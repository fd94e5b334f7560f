"""No wait without an end: time limits, stopped ranks, ranks that hold the interpreter, connections that were cut."""

from __future__ import annotations

import math
import os
import tempfile
import threading
from typing import Any

import psutil
import pytest
import torch

from recshard_lab.launcher import LaunchError, RankError, Ranks, RanksInterrupted, flight, launch, wires, world
from tests.launched import launched
from tests.launcher import waiting
from tests.launcher.waiting import then
from tests.patience import wait_until

pytestmark = pytest.mark.timeout(60)

ALL_REDUCE = "t = torch.ones(1); dist.all_reduce(t); t.item()"
HOLDS_THE_INTERPRETER = "import ctypes\nif rank == 0: ctypes.PyDLL(None).usleep(600_000_000)"
STOPPED = "import os, signal\nif rank == 0: os.kill(os.getpid(), signal.SIGSTOP)"
SWALLOWS = "import time\ntry:\n    {line}time.sleep(60)\nexcept KeyboardInterrupt: pass"


ranks = launched(2)  # a test that loses them restarts them


def texts(results: list[Any]) -> list[str | None]:
    return [result.text for result in results]


@pytest.mark.parametrize("limit", [0, math.nan, math.inf, "x", True])
def test_a_time_limit_that_is_none_is_refused(ranks: Ranks, limit: Any) -> None:
    for use, work in ((ranks.exec, "1"), (ranks.call, os.getpid)):
        with pytest.raises(ValueError, match=rf"timeout_s={limit!r} is not a time limit.*Fix: timeout_s=None"):
            use(work, timeout_s=limit)  # type: ignore[operator]
    with pytest.raises(TypeError, match=r"source=None is not Python code in a string. Fix: "):
        ranks.exec(None)  # type: ignore[arg-type]


def test_collectives_work_after_a_cell_that_swallowed_its_interrupt_and_ended_well(
    ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.exec("kept = rank; model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))")
    ranks.exec(SWALLOWS.format(line=then(ranks, ranks.interrupt) + "    "))
    assert texts(ranks.exec(ALL_REDUCE)) == ["2.0"] * 2
    ranks.exec(SWALLOWS.format(line=""), timeout_s=0.5)
    assert "the cell ended after its time limit of 0.5 s" in capsys.readouterr().err
    assert texts(ranks.exec(ALL_REDUCE)) == ["2.0"] * 2
    assert texts(ranks.exec("model(torch.ones(1, 1)).sum().backward(); kept")) == ["0", "1"]


@pytest.mark.parametrize("cell", [HOLDS_THE_INTERPRETER, STOPPED], ids=["holds the interpreter", "stopped by a signal"])
def test_a_time_limit_kills_a_rank_that_cannot_answer_and_names_what_is_lost(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, cell: str
) -> None:
    monkeypatch.setattr(flight, "KILL_S", 1.0)
    ranks.exec("kept = 1")
    with pytest.raises(RankError, match=r"rank 0 was killed by SIGKILL") as caught:
        ranks.exec(cell, timeout_s=0.3)
    assert "Rank 0 did not answer the interrupt and was killed. The cell was stopped" in str(caught.value)
    assert "Variables that are lost: " in str(caught.value)
    assert "kept" in str(caught.value)
    with pytest.raises(LaunchError, match="rank 0 was killed by SIGKILL"):
        ranks.exec("1")
    ranks.restart()
    assert texts(ranks.exec(ALL_REDUCE)) == ["2.0"] * 2


def test_a_failed_cell_kills_a_rank_that_does_not_answer(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight, "STRAGGLER_S", 0.3)
    monkeypatch.setattr(flight, "ABANDON_S", 0.5)
    with pytest.raises(RankError, match=r"rank 0 was killed by SIGKILL") as caught:
        ranks.exec(HOLDS_THE_INTERPRETER + "\nelse: raise ValueError('boom')")
    assert {failure.rank: failure.kind for failure in caught.value.failures} == {0: "died", 1: "raised"}
    ranks.restart()
    monkeypatch.setattr(flight, "KILL_S", 0.2)
    monkeypatch.setattr(flight, "GONE_S", 0.3)
    with monkeypatch.context() as patched:
        patched.setattr(wires.Wires, "kill", lambda *_: None)  # as for a process that waits for a broken disk
        with pytest.raises(RankError, match=r"rank 0 was killed and has not ended after 0\.3 s"):
            ranks.exec(HOLDS_THE_INTERPRETER, timeout_s=0.2)
    assert not ranks.usable
    ranks.restart()
    assert texts(ranks.exec("rank")) == ["0", "1"]


def test_a_launch_whose_ranks_do_not_come_up_ends_at_its_limit(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks.stop()
    before = set(psutil.Process().children(recursive=True))
    monkeypatch.setattr(world, "READY_S", 1.0)
    monkeypatch.setattr(flight, "KILL_S", 0.5)
    original = wires.rank_spec

    def apart(shape: Any, rank: int, store: str) -> dict[str, Any]:
        return original(shape, rank, f"{store}-{rank}")  # they never meet

    with monkeypatch.context() as patched:
        patched.setattr(wires, "rank_spec", apart)
        with pytest.raises(LaunchError, match=r"the ranks did not come up within 1 s: "):
            launch(2)
    left = set(psutil.Process().children(recursive=True)) - before
    assert not waiting.left(left)
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "junk")
    with pytest.raises(LaunchError, match=r"TORCH_FR_BUFFER_SIZE='junk' is not a whole number.*Fix: "):
        launch(2)
    monkeypatch.undo()
    ranks.restart()


def test_a_stop_ends_a_push_to_a_rank_that_does_not_read(ranks: Ranks) -> None:
    data = bytes(8 << 20)  # more than a socket takes
    suspended = ranks.pids[1]
    psutil.Process(suspended).suspend()

    def press() -> None:  # the stop button, until the suspended rank is killed
        wait_until(lambda: not psutil.pid_exists(suspended) or ranks.interrupt() is None, every_s=0.3)

    presses = threading.Thread(target=press)
    presses.start()
    with pytest.raises(RanksInterrupted, match="fresh ones run now"):
        ranks.push({"data": data})
    presses.join()
    assert texts(ranks.exec(ALL_REDUCE)) == ["2.0"] * 2


def test_groups_are_rebuilt_more_often_than_torch_has_backend_types(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="ValueError"):
        ranks.exec(f"{ALL_REDUCE}\nif rank == 0: raise ValueError(1)\ndist.barrier()")

    def often(folder: str, times: int) -> list[tuple[int, int]]:
        from recshard_lab.launcher import groups

        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
        held = []
        for number in range(times):
            groups.rebuild(f"{folder}/{number}", list(groups.group_names()), groups.group_count(), torch.device("cpu"))
            model.zero_grad()
            model(torch.ones(4, 1)).sum().backward()
            assert model.module.bias.grad is not None
            assert model.module.bias.grad.item() == 4
            held.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
        return [held[9], held[-1]]

    with tempfile.TemporaryDirectory() as folder:
        for early, late in ranks.run(often, folder, 110):
            assert late == early  # neither descriptors nor threads of the old groups stay
    assert texts(ranks.exec(ALL_REDUCE)) == ["2.0"] * 2
