"""The zygote: private, replaceable, and never outliving the process that started it."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time

import psutil
import pytest
import torch.distributed as dist

from recshard_lab.launcher import LaunchError, RankError, Ranks, launch
from recshard_lab.launcher.forkserver import Forkserver, forkserver

pytestmark = pytest.mark.timeout(60)


def test_its_folder_is_ours_alone(ranks: Ranks) -> None:
    assert stat.S_IMODE(os.stat(forkserver().folder).st_mode) == 0o700


def test_it_has_one_thread_so_that_forks_are_safe(ranks: Ranks) -> None:
    forkserver().warmed.wait(30)
    assert psutil.Process(forkserver().process.pid).num_threads() == 1


def test_killing_it_ends_its_ranks_and_the_next_launch_starts_another(ranks: Ranks) -> None:
    processes = [psutil.Process(pid) for pid in ranks.pids]
    folder = forkserver().folder
    os.kill(forkserver().process.pid, signal.SIGKILL)
    left = psutil.wait_procs(processes, timeout=2)[1]
    assert not [process for process in left if process.status() != psutil.STATUS_ZOMBIE]  # ended; init reaps them
    with pytest.raises((LaunchError, RankError), match="ended together with the forkserver"):
        ranks.run(dist.get_rank)
    assert not os.path.exists(folder)
    ranks.restart()
    assert ranks.run(dist.get_rank) == [0, 1, 2]


def test_one_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "recshard_lab.launcher.forkserver._BOOT", "raise ImportError('no torch here') # {path}{fd}{later}"
    )
    server = Forkserver()
    with pytest.raises(LaunchError, match="no torch here"):
        _ = server.folder


SCRIPT = """
import os, sys, time
from recshard_lab.launcher import launch
from recshard_lab.launcher.forkserver import forkserver
ranks = launch(2)
print(forkserver().process.pid, *ranks.pids, forkserver().folder, flush=True)
{then}
"""


@pytest.mark.parametrize(
    "then",
    [
        "os.kill(os.getpid(), 9)",
        "sys.exit(0)",
        "raise ValueError",
        "ranks.exec('if rank: dist.barrier()\\nimport time; time.sleep(99)')",
    ],
    ids=["killed", "ends", "raises", "killed while ranks are stuck"],
)
def test_a_script_that_ends_without_stopping_leaves_nothing(then: str) -> None:
    command = [sys.executable, "-c", SCRIPT.format(then=then)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as script:
        assert script.stdout is not None
        *pids, folder = script.stdout.readline().split()
        processes = [psutil.Process(int(pid)) for pid in pids if psutil.pid_exists(int(pid))]
        if "barrier" in then:
            time.sleep(0.5)
            script.kill()
    _, alive = psutil.wait_procs(processes, timeout=2)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    assert not os.path.exists(folder)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # of forking with threads: the point here
def test_a_fork_of_the_kernel_has_no_ranks_and_does_not_end_ours(ranks: Ranks) -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert ranks.run(dist.get_rank) == [0, 1, 2]


def test_launch_works_in_a_script_without_a_main_guard() -> None:
    source = "import os\nfrom recshard_lab import launch\ndef f(): return os.environ['RANK']\n"
    source += "with launch(2) as ranks: print(ranks.run(f))\n"
    done = subprocess.run([sys.executable, "-W", "error", "-c", source], capture_output=True, text=True, timeout=50)
    assert done.stdout == "['0', '1']\n", done.stderr
    assert done.stderr == ""


def test_a_rank_reaches_no_end_of_another_ranks_channel() -> None:
    with launch(2) as ranks:
        counts = ranks.run(lambda: len([fd for fd in os.listdir("/dev/fd") if int(fd) > 2]))
        assert len(set(counts)) == 1
