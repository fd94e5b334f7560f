"""Systems that are not Linux, imitated on Linux: functions that they lack are removed, their selectors imitated."""

from __future__ import annotations

import errno
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
import torch.distributed as dist

from recshard_lab.launcher import RankError, Ranks, doctor, launch
from recshard_lab.launcher.channel import Message, Outbox
from recshard_lab.launcher.engines import fork, spawn, start_methods
from recshard_lab.launcher.engines.engine import has_ended
from recshard_lab.launcher.shape import Shape
from tests.launcher.engines import check_stops, check_work
from tests.launcher.test_forks import FORKS, check_descriptors_of_a_fork
from tests.launcher.waiting import is_alive
from tests.patience import wait_until

pytestmark = pytest.mark.timeout(120)

# os of macOS before Python 3.13
MISSING = ["memfd_create", "pidfd_open", "sched_getaffinity", "sched_setaffinity", "waitid"]

# The descriptor of a kqueue does not exist in a fork. Its number may be another file's there.
KQUEUE = """
import errno, os, selectors
class Kqueue(selectors.SelectSelector):
    def __init__(self):
        super().__init__()
        self.owner = os.getpid()
    def close(self):
        if os.getpid() != self.owner:
            raise OSError(errno.EBADF, "Bad file descriptor")
        super().close()
selectors.DefaultSelector = Kqueue
"""

# In a rank, once libraries are imported: they choose files by the platform of their build.
MACOS = f"""
import os, sys, dill, psutil, selectors, socket, subprocess, sysconfig, threadpoolctl, torch.distributed
sysconfig.get_paths()
listdir = os.listdir
def without_proc(path="."):
    if str(path).startswith("/proc"):
        raise FileNotFoundError(path)
    return listdir(path)
os.listdir = without_proc
for name in {MISSING}:
    delattr(os, name)
sys.platform = "darwin"
{KQUEUE}
"""


def imitate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this process a macOS one, as far as the launcher looks."""
    for name in MISSING:
        monkeypatch.delattr(os, name)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("selectors.DefaultSelector", None)  # monkeypatch restores it
    exec(KQUEUE, {})
    monkeypatch.setattr("recshard_lab.launcher.world.shelving", False)


def wait_until_ended(processes: list[psutil.Process]) -> None:
    """psutil's own wait uses what is removed here."""
    wait_until(lambda: all(has_ended(process.pid) for process in processes))


def test_ranks_can_be_forked_on_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    imitate(monkeypatch)
    monkeypatch.setattr(fork, "_BOOT", MACOS + fork._BOOT)
    server = fork.Forkserver(later=())
    monkeypatch.setattr(fork, "_current", server)
    with launch(2, start_method="fork") as ranks:
        processes = [psutil.Process(pid) for pid in ranks.pids]
        assert ranks.shape.engine == "fork"
        assert ranks.run(lambda: (sys.platform, dist.get_rank())) == [("darwin", 0), ("darwin", 1)]
        with pytest.raises(RankError, match="rank 1 was killed by SIGKILL"):
            ranks.exec("import os, time\nif rank == 1: os.kill(os.getpid(), 9)\ntime.sleep(60)")
    server.close()
    wait_until_ended(processes)


def test_a_thread_that_python_does_not_know_makes_a_fork_unsafe() -> None:
    source = (
        "import sys, torch\n"
        "from recshard_lab.launcher.engines.forkserver import why_unsafe\n"
        "sys.platform = 'darwin'\n"
        "before = why_unsafe()\n"
        "torch.set_num_threads(2); torch.rand(1 << 20).sin()\n"
        "print(repr(before), why_unsafe())"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, env=environment, check=True)
    assert re.fullmatch("'' left [2-9] threads running, and a fork copies only one\n", done.stdout)


def test_no_forkserver_is_warmed_where_ranks_are_spawned(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    monkeypatch.setattr(fork, "forkserver", lambda: started.append(1))
    fork.warm()
    assert started == [1]
    monkeypatch.setattr(sys, "platform", "darwin")
    fork.warm()
    assert started == [1]


def test_a_message_to_a_socket_that_macos_is_closing_is_dropped() -> None:
    ours, theirs = socket.socketpair()

    class Closing:
        def setblocking(self, flag: bool) -> None: ...

        def send(self, data: memoryview) -> int:
            raise OSError(errno.EPROTOTYPE, os.strerror(errno.EPROTOTYPE))

    assert Outbox(Closing()).put(Message("stop"))  # type: ignore[arg-type]
    ours.close()
    theirs.close()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM])
def test_ranks_are_spawned_where_the_system_refuses_a_pidfd(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Linux before 5.3 has no pidfd_open, and containers may forbid it; Python has the function all the same."""

    def refuse(pid: int) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert spawn.pidfd(os.getpid()) is None
    monkeypatch.setattr(os, "pidfd_open", lambda pid: os.open("/nonexistent", os.O_RDONLY))
    with pytest.raises(FileNotFoundError):
        spawn.pidfd(os.getpid())


# -- Windows ---------------------------------------------------------------------------------------

# Every import of ours, planning, and training without shards, where no module and no function is that of POSIX.
WINDOWS = """
import asyncio, ctypes, ctypes.util, importlib, importlib.abc, os, pkgutil, selectors, signal, socket, subprocess, sys
import dill, fbgemm_gpu, multiprocess, numba, numpy, plotly.graph_objects, psutil, pydantic, pyarrow, resvg_py, rich
import ipywidgets, IPython, IPython.core.magic, ipykernel, ipykernel.comm, scipy.optimize, tempfile, threadpoolctl
import sysconfig, torch, torch.distributed, typer, yaml, anywidget, pooch, safetensors.torch
sysconfig.get_paths()
import uvicorn, uvicorn.protocols.http.httptools_impl
import torch._dynamo, torch.utils.tensorboard, torch.distributed.checkpoint, torch.distributed.fsdp
POSIX = "fcntl grp pwd resource termios tty pty posix syslog _posixshmem _posixsubprocess".split()
class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in POSIX:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
for name in POSIX:
    sys.modules.pop(name, None)
for name in ("fork getuid getsid setsid killpg waitid register_at_fork pidfd_open memfd_create sched_getaffinity "
             "set_blocking WNOHANG O_DIRECTORY").split():
    delattr(os, name)
for name in "SIGKILL SIGCHLD SIGPIPE SIGUSR1 pthread_kill pthread_sigmask set_wakeup_fd".split():
    delattr(signal, name)
for module, name in [(socket, "AF_UNIX"), (socket, "send_fds"), (socket, "recv_fds"), (selectors, "PollSelector")]:
    delattr(module, name)
sys.platform = "win32"
"""

RUN = """
import recshard_lab
failed = []
POSIX_ONLY = {f"recshard_lab.launcher.engines.{name}" for name in ("spawn", "ray_actor", "ray_cluster")}
for module in pkgutil.walk_packages(recshard_lab.__path__, "recshard_lab."):
    if not module.name.endswith("__main__") and module.name not in POSIX_ONLY:
        try:
            importlib.import_module(module.name)
        except Exception as error:
            failed.append(f"{module.name}: {type(error).__name__}: {error}")
assert not failed, failed
from recshard_lab import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingShardingPlanner, KeyedJaggedTensor
from recshard_lab import Topology
tables = [EmbeddingBagConfig(100, 8, name="t", feature_names=["f"])]
print(len(EmbeddingShardingPlanner(Topology(world_size=2), batch_size=4).plan_tables(tables).tables()))
model = EmbeddingBagCollection(tables)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batch = KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor([1, 2, 3]), torch.tensor([2, 1]))
model(batch).values().sum().backward()
optimizer.step()
for options in ({}, {"start_method": "spawn"}, {"engine": "ray"}):
    try:
        recshard_lab.launch(2, **options)
    except recshard_lab.LaunchError as error:
        print(error)
recshard_lab.launcher.warm()
from recshard_lab.launcher import doctor
doctor._import_error = lambda: ""  # a real process of Linux
for finding in doctor.checkup():
    print(finding.name, finding.ok, finding.value, finding.fix)
"""


@pytest.mark.gate
def test_on_windows_everything_but_launch_works_and_launch_names_wsl_2() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WINDOWS + RUN], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert lines[0] == "1"
    assert [line.count("WSL 2 (wsl --install)") for line in lines[1:4]] == [1, 1, 1]
    crosses = [line for line in lines[4:] if " False " in line]
    assert [line.split(" False ")[0] for line in crosses] == ["system"], crosses
    assert "WSL 2" in crosses[0]


def test_the_doctor_names_the_start_method_of_macos_and_a_python_that_is_not_tested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(sys, "version_info", (3, 13, 0))
    (finding,) = doctor.system()
    assert finding.ok
    assert "ranks are spawned" in finding.value
    monkeypatch.setattr(sys, "version_info", (3, 14, 0))
    (finding,) = doctor.system()
    assert finding.ok is None
    assert "Python 3.11, 3.12 or 3.13" in str(finding.fix)


# -- ranks of macOS: the last tests, because this process imitates it from here on ---------------------


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
        wait_until_ended(processes)


def test_macos_spawns_ranks_unless_a_fork_is_requested(macos: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    check_work(macos, capsys)  # large tensors arrive without anonymous memory
    check_stops(macos)
    assert start_methods() == ("spawn", "fork")
    assert macos.shape.engine == "spawn"
    assert macos.run(lambda: (sys.platform, dist.get_rank())) == [("darwin", 0), ("darwin", 1)]
    assert Shape.checked(1, start_method="fork").engine == "fork"


@FORKS
def test_a_fork_of_the_notebook_keeps_no_descriptor_of_ranks_on_macos(macos: Ranks) -> None:
    check_descriptors_of_a_fork(macos)


def test_a_killed_rank_is_reported_although_its_daemon_holds_its_descriptors(macos: Ranks) -> None:
    macos.exec(
        "import os, time\n"
        "daemon = 0\n"
        "if rank == 1:\n"
        "    daemon = os.fork()\n"
        "    if not daemon: os.setsid(); time.sleep(600); os._exit(0)"
    )
    daemon = psutil.Process(macos.pull("daemon")[1])
    with pytest.raises(RankError, match="rank 1 was killed by SIGKILL"):
        macos.exec("if rank == 1: os.kill(os.getpid(), 9)\ntime.sleep(60)")
    assert is_alive(daemon)
    daemon.kill()
