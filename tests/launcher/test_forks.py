"""A fork of the notebook: it has none of the parent's ranks, may have its own, and keeps nobody's alive."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from recshard_lab.launcher import LaunchError, Ranks, current, launch
from tests.launched import launched
from tests.launcher.waiting import left
from tests.patience import scaled

FORKS = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # of forking with threads: the point here
pytestmark = [pytest.mark.timeout(60), FORKS]


ranks = launched(2)


def in_fork(work: Callable[[], Any]) -> Any:
    """The result of `work` in a fork of this process."""
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=lambda: theirs.send(work()))
    child.start()
    assert ours.poll(scaled(20)), "the fork hangs"
    result = ours.recv()
    child.join()
    assert child.exitcode == 0
    return result


USES: dict[str, tuple[Any, ...]] = {
    **{"run": (os.getpid,), "exec": ("1",), "push": ({"x": 1},), "pull": ("rank",), "complete": ("ra",)},
    **{"posted": ("x",), "status": (), "output": (), "interrupt": (), "stop": (), "restart": ()},
}


def test_a_fork_has_no_ranks_and_every_use_of_the_parents_raises_at_once(ranks: Ranks) -> None:
    def attempts() -> tuple[Any, bool, dict[str, str], str]:
        found = {}
        for name, arguments in USES.items():
            try:
                found[name] = f"no error, but {getattr(ranks, name)(*arguments)!r}"
            except LaunchError as error:
                found[name] = str(error)
        with ranks:  # its end must not stop the parent's ranks either
            pass
        return current(), ranks.usable, found, repr(ranks)

    running, usable, found, text = in_fork(attempts)
    assert running is None
    assert not usable
    assert [name for name, error in found.items() if f"these ranks belong to process {os.getpid()}" not in error] == []
    assert f"of process {os.getpid()}" in text
    assert ranks.run(dist.get_rank) == [0, 1]


def test_a_fork_may_launch_its_own_ranks_while_the_parent_works_on(ranks: Ranks) -> None:
    def own() -> tuple[list[int], int]:
        with launch(2) as mine:
            return mine.run(lambda: dist.get_rank() + 10), len(set(mine.pids) & set(parents))

    parents = ranks.pids
    assert in_fork(own) == ([10, 11], 0)
    assert ranks.run(dist.get_rank) == [0, 1]
    assert ranks.pids == parents


def check_descriptors_of_a_fork(ranks: Ranks) -> None:
    """An open copy of a channel would hide the end of the notebook, and one of a pipe would keep its writer waiting."""
    assert ranks._world is not None
    wires = ranks._world.wires
    fds = [*(channel.sock.fileno() for channel in wires._channels), *wires._pipes.values(), wires._wakeup.fileno()]
    files = {os.fstat(fd).st_ino for fd in fds}

    def still_open() -> set[int]:
        found = set()
        for name in os.listdir("/dev/fd"):
            with suppress(OSError):  # of the listing itself
                found.add(os.fstat(int(name)).st_ino)
        return files & found

    assert still_open() == files
    assert in_fork(still_open) == set()
    assert ranks.run(dist.get_rank) == [0, 1]


def test_a_fork_keeps_no_descriptor_of_the_ranks(ranks: Ranks) -> None:
    check_descriptors_of_a_fork(ranks)


KERNEL = """
import os, time
from recshard_lab.launcher import launch
ranks = launch(2, start_method={method!r})
if os.fork() == 0:
    time.sleep(600)
    os._exit(0)
ranks.exec("x = rank")
print(*ranks.pids, flush=True)
time.sleep(600)
"""


@pytest.mark.gate
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_ranks_end_with_their_kernel_though_a_fork_of_it_lives_on(method: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", KERNEL.format(method=method)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as kernel:
        assert kernel.stdout is not None
        processes = [psutil.Process(int(pid)) for pid in kernel.stdout.readline().split()]
        (fork,) = [
            child
            for child in psutil.Process(kernel.pid).children()
            if child not in processes and child.cmdline() == command
        ]
        kernel.kill()
        alive = left(processes)
        assert fork.is_running()
        fork.kill()
        assert len(processes) == 2
        assert not alive
