"""The forkserver: private, replaceable, and never outliving the process that started it."""

from __future__ import annotations

import os
import pickle
import signal
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch.distributed as dist

from recshard_lab.launcher import LaunchError, RankError, Ranks, launch
from recshard_lab.launcher.channel import Channel, Message, socket_pair
from recshard_lab.launcher.engines import engine_for
from recshard_lab.launcher.engines import forkserver as forking
from recshard_lab.launcher.engines.engine import kill_group
from recshard_lab.launcher.engines.fork import _BOOT, Forkserver, forkserver
from recshard_lab.launcher.shape import Shape
from recshard_lab.launcher.world import World
from tests.launcher.waiting import is_alive, left
from tests.patience import scaled, wait_until

pytestmark = pytest.mark.timeout(60)


def test_its_folder_is_ours_alone_and_it_has_one_thread_so_that_forks_are_safe(ranks: Ranks) -> None:
    assert stat.S_IMODE(os.stat(forkserver().folder).st_mode) == 0o700
    assert forkserver().warmed.wait(scaled(30))
    assert psutil.Process(forkserver().process.pid).num_threads() == 1


def test_killing_it_ends_its_ranks_and_the_next_launch_starts_another(ranks: Ranks) -> None:
    processes = [psutil.Process(pid) for pid in ranks.pids]
    folder = forkserver().folder
    os.kill(forkserver().process.pid, signal.SIGKILL)
    assert not left(processes)
    with pytest.raises((LaunchError, RankError), match="ended together with the forkserver"):
        ranks.run(dist.get_rank)
    assert not os.path.exists(folder)
    ranks.restart()
    assert ranks.run(dist.get_rank) == [0, 1, 2]


def test_one_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "recshard_lab.launcher.engines.fork._BOOT", "raise ImportError('no torch here') # {path}{fd}{later}"
    )
    server = Forkserver()
    with pytest.raises(LaunchError, match="no torch here"):
        _ = server.folder


DAEMON = """
import os, subprocess, time
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
twice = subprocess.check_output(["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 & echo $!"])
"""

SCRIPT = f"""
import os, sys, time
from recshard_lab.launcher import launch
from recshard_lab.launcher.engines import fork
server = fork._current = fork.Forkserver(later=())  # one that is not in the midst of an import
ranks = launch(2)
ranks.exec({DAEMON!r})
started = ranks.eval("child.pid") + ranks.eval("int(twice)")
print(server.process.pid, *ranks.pids, *started, server.folder, flush=True)
{{then}}
"""
STUCK = r"ranks.exec('print(1)\nif rank: dist.barrier()\nelse: import time; time.sleep(99)')"


@pytest.mark.gate
@pytest.mark.parametrize("then", ["sys.exit(0)", STUCK], ids=["ends", "killed while ranks are stuck"])
def test_a_script_that_ends_without_stopping_leaves_nothing(then: str) -> None:
    command = [sys.executable, "-c", SCRIPT.format(then=then)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as script:
        assert script.stdout is not None
        *pids, folder = script.stdout.readline().split()
        processes = [psutil.Process(int(pid)) for pid in pids if psutil.pid_exists(int(pid))]
        if then == STUCK:
            assert script.stdout.readline() == "[all] 1\n"
            script.kill()
    assert not left(processes)
    assert not os.path.exists(folder)


def test_a_rank_reaches_no_end_of_another_ranks_channel() -> None:
    with launch(2) as ranks:
        counts = ranks.run(lambda: len([fd for fd in os.listdir("/dev/fd") if int(fd) > 2]))
        assert len(set(counts)) == 1


def test_daemons_of_ranks_end_with_them(ranks: Ranks) -> None:
    """Processes in separate sessions, and processes whose parent has ended."""
    ranks.exec(DAEMON)
    started = [psutil.Process(pid) for pid in ranks.eval("child.pid") + ranks.eval("int(twice)")]
    with pytest.raises(RankError, match="rank 1 was killed by SIGKILL"):
        ranks.exec("if rank == 1: os.kill(os.getpid(), 9)\ntime.sleep(60)")
    assert not left(started[1:2])
    assert is_alive(started[0])
    ranks.stop()
    assert not left(started)


def with_forkserver(monkeypatch: pytest.MonkeyPatch, first: str, later: Sequence[str] = ()) -> Forkserver:
    """A forkserver of this test's own, which runs `first` before anything else."""
    monkeypatch.setattr("recshard_lab.launcher.engines.fork._BOOT", first + _BOOT)
    server = Forkserver(later)
    monkeypatch.setattr("recshard_lab.launcher.engines.fork._current", server)
    return server


THIRD_FORK_FAILS = """
import os
fork, count = os.fork, []
def limited():
    count.append(1)
    if len(count) == 3:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()
os.fork = limited
"""


def test_a_fork_that_fails_is_named_and_other_ranks_live_on(monkeypatch: pytest.MonkeyPatch) -> None:
    server = with_forkserver(monkeypatch, THIRD_FORK_FAILS)
    with launch(2) as ranks:
        with pytest.raises(LaunchError, match=r"rank 0 was not started: os\.fork\(\) failed: .*Resource temporarily"):
            World(Shape.checked(1))
        assert ranks.run(dist.get_rank) == [0, 1]
        assert server.alive
    server.close()


THREAD = "import threading; threading.Timer(600, print).start()"
HELPERS = """
import subprocess
helpers = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
"""


def test_processes_that_imports_start_are_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    server = with_forkserver(monkeypatch, HELPERS)
    with launch(1) as ranks:
        first, second = (p for p in psutil.Process(server.process.pid).children() if p.pid not in ranks.pids)
        first.kill()
        wait_until(lambda: not psutil.pid_exists(first.pid))  # the forkserver reaps it, and reports no rank
        assert ranks.run(dist.get_rank) == [0]
    assert is_alive(second)
    server.close()
    assert not left([second])


@pytest.mark.parametrize(
    ("first", "later", "words"),
    [
        ("import torch; torch.cuda.is_initialized = lambda: True", "", "'recshard_lab.launcher' initialised CUDA"),
        ("", THREAD, "'imported_later' left 2 threads running"),
    ],
)
def test_what_must_not_be_forked_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, first: str, later: str, words: str
) -> None:
    (tmp_path / "imported_later.py").write_text(later)
    monkeypatch.syspath_prepend(tmp_path)
    server = with_forkserver(monkeypatch, first, ["imported_later"] if later else [])
    assert server.folder
    wait_until(lambda: server.unsafe)
    assert words in server.unsafe
    gone: list[object] = []
    with open(os.devnull) as end, pytest.raises(LaunchError, match=rf"rank 3 was .*{words}.*start_method='spawn'"):
        server.fork({"rank": 3}, [end.fileno()] * 3, gone.append)()
    assert gone == [f"was not started: {server.unsafe}"]
    with pytest.warns(RuntimeWarning, match=f"ranks cannot be forked: importing {words}"):
        engine = engine_for(Shape.checked(1))
    assert engine.shape.engine == "spawn"
    engine.close()
    server.process.kill()
    server.close()


@pytest.mark.parametrize("cuda", [None, "13.0"])
def test_fbgemms_cuda_build_is_left_to_the_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cuda: str | None
) -> None:
    (tmp_path / "fbgemm_gpu.py").write_text(THREAD)
    monkeypatch.syspath_prepend(tmp_path)
    server = with_forkserver(monkeypatch, f"import torch; torch.version.cuda = {cuda!r}", ["fbgemm_gpu", "colorsys"])
    wait_until(lambda: server.unsafe or server.warmed.is_set())
    assert ("'fbgemm_gpu' left 2 threads" in server.unsafe) is (cuda is None)
    server.process.kill()
    server.close()


def test_a_rank_whose_zygote_has_ended_meanwhile_ends() -> None:
    done = subprocess.run([sys.executable, "-c", "from recshard_lab.launcher.rank import *; die_with_parent(1)"])
    assert done.returncode == -signal.SIGKILL


def test_an_ended_rank_is_signalled_before_its_number_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    state: list[str] = []
    monkeypatch.setattr(forking, "kill_group", lambda pid, number: state.append(psutil.Process(pid).status()))
    monkeypatch.setattr(forking, "end_children", lambda **_: None)
    child = subprocess.Popen(["true"], start_new_session=True)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    here = forking.Server.__new__(forking.Server)
    sent: list[Message] = []
    here.ranks = {child.pid}
    here.channel = SimpleNamespace(send=sent.append)  # type: ignore[assignment]
    here.reap()
    assert state == [psutil.STATUS_ZOMBIE]
    assert [message.kind for message in sent] == ["exited"]
    assert not psutil.pid_exists(child.pid)
    child.returncode = 0


def test_a_process_that_is_not_a_rank_is_not_signalled() -> None:
    ours, theirs = socket_pair()
    here = forking.Server.__new__(forking.Server)
    here.channel, here.ranks = Channel(theirs), set()
    kernel = Channel(ours)
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as child:
        for number in (signal.SIGHUP, signal.SIGKILL):
            ours.sendall(b"!")
            kernel.send(Message("kill", 0, pickle.dumps((child.pid, int(number)))))
            assert here.request()
            here.ranks = {child.pid}  # before the second
        assert child.wait() == -signal.SIGKILL
    kernel.close()
    here.channel.close()


def test_a_group_may_get_any_signal() -> None:
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as child:
        kill_group(child.pid, signal.SIGRTMIN + 6)
        assert child.wait() == -(signal.SIGRTMIN + 6)
