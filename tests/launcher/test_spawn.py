"""Ranks spawned by multiprocess: everything a notebook does with forked ones, in clean interpreters."""

from __future__ import annotations

import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading

import psutil
import pytest
import torch.distributed as dist

from recshard_lab.launcher import LaunchError, RankError, Ranks, launch
from recshard_lab.launcher.engines import Ending
from recshard_lab.launcher.engines.spawn import SpawnedRank
from recshard_lab.launcher.shape import Shape
from tests.launched import launched
from tests.launcher.engines import check_stops, check_work
from tests.launcher.waiting import left
from tests.patience import scaled

pytestmark = pytest.mark.timeout(120)


spawned = launched(2, start_method="spawn")  # each costs the import of torch


def test_they_are_children_of_this_process_and_work_as_forked_ranks(
    spawned: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [psutil.Process(pid).ppid() for pid in spawned.pids] == [os.getpid()] * 2
    assert spawned.run(lambda: "recshard_lab.launcher.engines.forkserver" in sys.modules) == [False, False]
    assert spawned.run(lambda: os.getsid(0) == os.getpid()) == [True, True]
    check_work(spawned, capsys)
    check_stops(spawned)
    with pytest.raises(LaunchError, match="requested 2 ranks over gloo, but 2 ranks over gloo, engine spawn are runn"):
        launch(2)


def test_a_dead_rank_is_named_and_what_it_had_started_ends_with_it(spawned: Ranks) -> None:
    spawned.exec("import subprocess\nchild = subprocess.Popen(['sleep', '600'])")
    child = psutil.Process(spawned.eval("child.pid")[1])
    with pytest.raises(RankError, match="rank 1 was killed by SIGKILL"):
        spawned.exec("import os\nif rank == 1: os.kill(os.getpid(), 9)\ndist.barrier()")
    assert not left([child])
    spawned.restart()
    assert spawned.run(dist.get_rank) == [0, 1]


SCRIPT = """
import os, time
from recshard_lab import launch
print("once", flush=True)
def f(): return os.environ["RANK"]
ranks = launch(2, start_method="spawn")
start = "import subprocess; child = subprocess.Popen(['sleep', '600'], start_new_session=True)"
ranks.exec(start)
forked = os.fork()  # a worker of the notebook, which outlives it and must not hold the ranks' channels
if not forked: time.sleep(60); os._exit(0)
print(forked, *ranks.pids, *ranks.eval("child.pid"), ranks._world._engine._folder, ranks.run(f), flush=True)
{then}
"""


@pytest.mark.gate
@pytest.mark.parametrize("then", ["time.sleep(99)", "ranks.stop()"], ids=["killed", "ends"])
def test_a_script_runs_once_without_a_main_guard_and_leaves_nothing(then: str) -> None:
    command = [sys.executable, "-W", "error", "-c", SCRIPT.format(then=then)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as script:
        assert script.stdout is not None
        assert script.stderr is not None
        assert script.stdout.readline() == "once\n"
        forked, *pids, folder, one, two = script.stdout.readline().split()
        assert (one, two) == ("['0',", "'1']")
        ranks_and_daemons = [psutil.Process(int(pid)) for pid in pids if psutil.pid_exists(int(pid))]
        family = [psutil.Process(script.pid), *psutil.Process(script.pid).children()]
        if "sleep" in then:
            script.kill()
            assert not left(ranks_and_daemons)
        os.kill(int(forked), signal.SIGKILL)
        assert script.stderr.read() == ""
    assert not left([*family, *ranks_and_daemons])
    assert not os.path.exists(folder)


def test_it_is_what_a_system_without_fork_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Shape.checked(1).engine == "fork"
    monkeypatch.delattr(os, "fork")
    assert Shape.checked(1).engine == "spawn"
    with pytest.raises(LaunchError, match="cannot fork"):
        Shape.checked(1, start_method="fork")


class Sleeper:
    """A process that the spawn engine starts and that only sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, first: str = "pass") -> None:
        monkeypatch.setattr("recshard_lab.launcher.engines.spawn._BOOT", f"{first}\nimport time; time.sleep(60)")
        self.ends = [*(end.detach() for end in socket.socketpair()), *os.pipe()]
        self.endings: queue.SimpleQueue[Ending] = queue.SimpleQueue()
        self.rank = SpawnedRank({"rank": 0}, [self.ends[0], self.ends[3], self.ends[3]], self.endings.put)

    def printed(self) -> bytes:
        """What `first` wrote to `out`."""
        assert select.select([self.ends[2]], [], [], scaled(20))[0], "the process writes nothing"
        return os.read(self.ends[2], 99)

    def kill(self) -> None:
        self.rank.kill(signal.SIGKILL)
        assert self.endings.get(timeout=scaled(20)) == -signal.SIGKILL
        self.close()

    def close(self) -> None:
        for end in self.ends:
            os.close(end)


def test_other_threads_see_their_main_module_while_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    main, seen, over = sys.modules["__main__"], set(), threading.Event()

    def watch() -> None:
        while not over.is_set():
            seen.add(id(sys.modules["__main__"]))

    thread = threading.Thread(target=watch)
    thread.start()
    sleepers = [Sleeper(monkeypatch) for _ in range(3)]
    over.set()
    thread.join()
    for sleeper in sleepers:
        sleeper.kill()
    assert seen == {id(main)}


def test_no_interrupt_reaches_a_starting_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore interrupts
    try:
        sleeper = Sleeper(monkeypatch, "import os; os.write(out.fileno(), b'started')")
    finally:
        signal.signal(signal.SIGINT, before)
    os.kill(sleeper.rank.pid, signal.SIGINT)
    assert sleeper.printed() == b"started"
    sleeper.kill()


def test_a_killed_rank_leaves_no_process_in_a_separate_session(monkeypatch: pytest.MonkeyPatch) -> None:
    start = "import os, subprocess; child = subprocess.Popen(['sleep', '600'], start_new_session=True)"
    sleeper = Sleeper(monkeypatch, f"{start}\nos.write(out.fileno(), str(child.pid).encode())")
    child = psutil.Process(int(sleeper.printed()))
    sleeper.kill()
    assert not left([child])


def test_a_rank_adopts_what_its_processes_leave(spawned: Ranks) -> None:
    spawned.exec(
        "import os, psutil, subprocess\n"
        "left = int(subprocess.check_output(['sh', '-c', 'setsid sleep 600 >/dev/null 2>&1 & echo $!']))\n"
        "parent = psutil.Process(left).ppid()"
    )
    assert spawned.pull("parent") == spawned.pids
    spawned.exec("psutil.Process(left).kill(); os.waitpid(left, 0)")


def test_a_rank_that_other_code_has_reaped_is_reported_and_never_signalled(monkeypatch: pytest.MonkeyPatch) -> None:
    sleeper = Sleeper(monkeypatch)
    killed: list[int] = []
    monkeypatch.setattr("recshard_lab.launcher.engines.spawn.kill_group", lambda pid, number: killed.append(pid))
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps every child
    try:
        os.kill(sleeper.rank.pid, signal.SIGKILL)
        ending = sleeper.endings.get(timeout=scaled(20))
    finally:
        signal.signal(signal.SIGCHLD, before)
    sleeper.rank.kill(signal.SIGKILL)
    sleeper.close()
    assert ending == "ended, and other code of this process took its exit code"
    assert killed == []


def test_a_number_that_is_free_again_is_not_signalled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other code has reaped the rank, and the thread that waits for its end has not noticed yet."""
    killed: list[int] = []
    monkeypatch.setattr("recshard_lab.launcher.engines.spawn.kill_group", lambda pid, number: killed.append(pid))
    child = subprocess.Popen(["true"])
    rank = SpawnedRank.__new__(SpawnedRank)
    rank.pid, rank._reaping, rank._ended, rank._pidfd = child.pid, threading.Lock(), False, os.pidfd_open(child.pid)
    rank.kill(signal.SIGTERM)
    child.wait()
    rank.kill(signal.SIGTERM)
    os.close(rank._pidfd)
    assert killed == [child.pid]
