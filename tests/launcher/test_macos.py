"""Ranks as macOS starts them, in processes that imitate it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest
import torch.distributed as dist

from recshard_lab.launcher import RankError, Ranks, RanksInterrupted, launch
from recshard_lab.launcher.engines import spawn, start_methods
from recshard_lab.launcher.shape import Shape
from tests.launcher.test_forks import in_fork
from tests.launcher.test_platforms import MACOS, alive, imitate

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),  # of forking with threads: the point here
]


@pytest.fixture(scope="module")
def macos() -> Iterator[Ranks]:
    """Two ranks launched without any option, in processes that imitate macOS."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        imitate(monkeypatch)
        boot = spawn._BOOT.replace("from recshard_lab", f"{MACOS}\nfrom recshard_lab")
        monkeypatch.setattr(spawn, "_BOOT", boot)
        with launch(2) as ranks:
            processes = [psutil.Process(pid) for pid in ranks.pids]
            yield ranks
        assert not alive(processes, 2)


def test_macos_spawns_ranks_unless_a_fork_is_requested(macos: Ranks) -> None:
    assert start_methods() == ("spawn", "fork")
    assert macos.shape.engine == "spawn"
    assert macos.run(lambda: (sys.platform, dist.get_rank())) == [("darwin", 0), ("darwin", 1)]
    assert Shape.checked(1, start_method="fork").engine == "fork"


def test_large_tensors_arrive_without_anonymous_memory(macos: Ranks) -> None:
    macos.exec("big = torch.arange(1 << 20)")
    assert [int(big.sum()) for big in macos.pull("big")] == [(1 << 19) * ((1 << 20) - 1)] * 2


def test_a_collective_is_freed_by_an_interrupt_on_macos(macos: Ranks) -> None:
    macos.exec("kept = rank")
    pid = os.getpid()
    killer = subprocess.Popen([sys.executable, "-c", f"import os, time; time.sleep(0.5); os.kill({pid}, 2)"])
    with pytest.raises(RanksInterrupted):
        macos.exec("import time\nif rank: dist.barrier()\nelse: time.sleep(60)")
    killer.wait()
    assert macos.pull("kept") == [0, 1]


def test_a_fork_of_the_notebook_keeps_no_descriptor_of_ranks_on_macos(macos: Ranks) -> None:
    """An open copy of a channel would hide the end of the notebook, and one of a pipe would keep its writer waiting."""
    world = macos._world
    assert world is not None
    wires = world.wires
    fds = [*(channel.sock.fileno() for channel in wires._channels), *wires._pipes.values(), wires._wakeup.fileno()]
    files = [os.fstat(fd).st_ino for fd in fds]

    def still_open() -> list[int]:
        found = []
        for name in os.listdir("/dev/fd"):
            try:
                found.append(os.fstat(int(name)).st_ino)
            except OSError:
                continue
        return sorted(set(files) & set(found))

    assert still_open() == sorted(files)
    assert in_fork(still_open) == []
    assert macos.run(dist.get_rank) == [0, 1]


def test_a_killed_rank_is_reported_although_its_daemon_holds_its_descriptors(macos: Ranks) -> None:
    macos.exec(
        "import os, time\n"
        "daemon = 0\n"
        "if rank == 1:\n"
        "    daemon = os.fork()\n"
        "    if not daemon:\n"
        "        os.setsid(); time.sleep(20); os._exit(0)"
    )
    daemon = psutil.Process(macos.pull("daemon")[1])
    until = time.monotonic() + 10
    with pytest.raises(RankError, match="rank 1 was killed by SIGKILL"):
        macos.exec("if rank == 1: os.kill(os.getpid(), 9)\ntime.sleep(60)")
    assert time.monotonic() < until
    daemon.kill()
