"""Ranks forked from the forkserver: the fastest engine, and the default on Linux."""

from __future__ import annotations

import atexit
import os
import pickle
import shutil
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ...interrupts import uninterrupted
from ..channel import Channel, Message, socket_pair
from ..errors import LaunchError
from . import start_methods
from .engine import THREAD_VARIABLES, OnExit, descendants, kill_all, resident_bytes

if TYPE_CHECKING:
    from ..shape import Shape

__all__ = ["ForkEngine", "Forkserver", "forkserver", "warm", "why_not_fork"]


def why_not_fork() -> str:
    """Why a fork of this process's forkserver is unsafe after its first import. Empty if it is safe."""
    server = forkserver()
    _ = server.folder  # waits for its first import
    return server.unsafe


class ForkEngine:
    """One world's part of this process's forkserver."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._server = forkserver()
        self._folder = os.path.join(self._server.folder, f"world-{os.urandom(4).hex()}")
        os.mkdir(self._folder, 0o700)

    def store(self, generation: int) -> str:
        return os.path.join(self._folder, f"store-{generation}")

    def start(self, rank: int, spec: dict[str, Any], fds: Sequence[int], on_exit: OnExit) -> ForkedRank:
        return ForkedRank(self._server, self._server.fork(spec, fds, on_exit))

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class ForkedRank:
    """A child of the forkserver. Signals go through the forkserver, which knows whether it has reaped the child."""

    def __init__(self, server: Forkserver, pid: Callable[[], int]) -> None:
        self._server, self._pid = server, pid

    @property
    def pid(self) -> int:
        return self._pid()

    def kill(self, number: int) -> None:
        self._server.kill(self.pid, number)

    def memory_bytes(self) -> int:
        return resident_bytes(self.pid)


# Imported in the forkserver between requests, if they are installed: ranks would otherwise import them one by one.
LATER = (
    "torch.nn.parallel.distributed",
    "fbgemm_gpu",
    "llvmlite.binding",  # loads the compiled loops of lookups
    "torch._dynamo",  # optimizers and DDP import it on first use: 0.6 to 4 s in every rank otherwise
    # modules, not rooms: a room imports nothing until one of its names is used
    "recshard_lab.distributed.model_parallel",
    "recshard_lab.models",
    "recshard_lab.train.metrics",
    "recshard_lab.train.pipelines",
    "recshard_lab.train.recipes",
)

LEAVE_S = 0.3  # for the forkserver to clear up when we end

_BOOT = """
import sys
sys.path[:] = {path!r}
from recshard_lab.launcher.engines import forkserver
forkserver.main({fd}, {later!r})
"""

# Read when a library is loaded, so they must be set before the forkserver's first import.
_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",  # waiting threads sleep: more ranks than cores would starve one another
    **dict.fromkeys(THREAD_VARIABLES, "1"),
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # counting GPUs must not start CUDA before the fork
    "OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES",  # macOS
}


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The forkserver's variables. It sees no MIG slice: with one visible, torch counts GPUs by starting CUDA."""
    result = {**variables, **_ENVIRONMENT}
    if result.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-"):
        del result["CUDA_VISIBLE_DEVICES"]
    return result


class Forkserver:
    """One forkserver process, and the socket pair that only it inherits."""

    def __init__(self, later: Sequence[str] = LATER) -> None:
        ours, theirs = socket_pair()
        boot = _BOOT.format(path=list(sys.path), fd=theirs.fileno(), later=tuple(later))
        self.process = subprocess.Popen(
            [sys.executable, "-c", boot],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment(os.environ),
            start_new_session=True,  # Jupyter interrupts the kernel's process group
        )
        theirs.close()
        self.channel = Channel(ours)
        self.alive = True
        self.unsafe = ""  # why it forks no more ranks
        self.warmed = threading.Event()
        self._hello = threading.Event()
        self._folder = ""
        self._forks: dict[int, _Fork] = {}
        self._on_exit: dict[int, OnExit] = {}
        self._count = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._listen, name="recshard-forkserver", daemon=True)
        self._thread.start()

    @property
    def folder(self) -> str:
        """A folder that only this user can read. The forkserver removes it at its end. Waits for the first import."""
        self._hello.wait(120)
        self._check()
        return self._folder

    def fork(self, spec: dict[str, Any], fds: Sequence[int], on_exit: OnExit) -> Callable[[], int]:
        """Requests a rank. Returns a function that waits for its pid. on_exit is called from a thread."""
        self._check()
        fork = _Fork(int(spec["rank"]), on_exit)
        with self._lock:
            self._count += 1
            number = self._count
            self._forks[number] = fork
            self._send(Message("fork", number, pickle.dumps(spec)), fds)

        until = time.monotonic() + 120  # for all who ask

        def pid() -> int:
            fork.done.wait(max(0.0, until - time.monotonic()))
            if fork.pid is None:
                if fork.why_not:
                    raise LaunchError(fork.why_not)
                self._check()
                raise LaunchError("the forkserver did not answer within 120 s; restart the kernel.")
            return fork.pid

        return pid

    def kill(self, pid: int, number: int) -> None:
        """Signals a rank and all that it started. Does nothing if the rank has ended."""
        with self._lock:
            if self.alive:
                with suppress(OSError):  # the forkserver has ended, and its children with it
                    self._send(Message("kill", 0, pickle.dumps((pid, int(number)))), ())

    def close(self) -> None:
        """Ends the forkserver and every rank."""
        with suppress(OSError):
            self.channel.sock.shutdown(socket.SHUT_RDWR)
        try:
            self.process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:  # during an import
            left = descendants(self.process.pid)
            self.process.kill()
            kill_all(left)
            self.process.wait()
            if self._folder:
                shutil.rmtree(self._folder, ignore_errors=True)
        self._thread.join(5)

    def forget(self) -> None:
        """In a fork of the kernel: the channel is closed already, and the forkserver belongs to the parent."""
        self.alive = False
        self.process.returncode = 0  # not ours to wait for

    def _send(self, message: Message, fds: Sequence[int]) -> None:
        socket.send_fds(self.channel.sock, [b"!"], list(fds))
        self.channel.send(message)

    def _check(self) -> None:
        if not self.alive:
            raise LaunchError(f"the process that ranks are forked from has ended.\n{self._last_words}")

    def _listen(self) -> None:
        try:
            while True:
                self._take(self.channel.receive())
        except (EOFError, OSError):
            pass
        except BaseException:  # without this thread no end of a rank would be noticed
            self._last_words = traceback.format_exc()
            self.process.kill()
        self._end()

    def _take(self, message: Message) -> None:
        if message.kind == "hello":
            self._folder = pickle.loads(message.payload)
            self._hello.set()
        elif message.kind == "forked":
            fork = self._forks.pop(message.cell)
            fork.pid = pickle.loads(message.payload)
            self._on_exit[fork.pid] = fork.on_exit
            fork.done.set()
        elif message.kind == "failed":
            fork = self._forks.pop(message.cell)
            why = pickle.loads(message.payload)
            fix = "pass start_method='spawn'" if why == self.unsafe else "end other processes, or launch fewer ranks"
            fork.why_not = f"rank {fork.rank} was not started: {why}. Fix: {fix}."
            fork.on_exit(f"was not started: {why}")
            fork.done.set()
        elif message.kind == "exited":
            pid, status = pickle.loads(message.payload)
            self._on_exit.pop(pid)(os.waitstatus_to_exitcode(status))
        elif message.kind == "unsafe":
            self.unsafe = pickle.loads(message.payload)
        elif message.kind == "broken":
            self._last_words = pickle.loads(message.payload)
        elif message.kind == "warm":
            self.warmed.set()

    def _end(self) -> None:
        self.process.wait()
        stderr = self.process.stderr
        assert stderr is not None
        os.set_blocking(stderr.fileno(), False)  # what an import has started may hold the other end
        self._last_words += (stderr.read() or b"").decode(errors="replace").strip()
        stderr.close()
        if self._folder:  # a forkserver that was killed could not remove it
            shutil.rmtree(self._folder, ignore_errors=True)
        with self._lock:
            self.alive = False
        self.channel.close()
        for on_exit in self._on_exit.values():
            on_exit("ended together with the forkserver")
        for event in (self._hello, self.warmed, *(fork.done for fork in self._forks.values())):
            event.set()

    _last_words = ""


class _Fork:
    """A requested fork. After `done`, pid is known, or why_not is why there is none."""

    def __init__(self, rank: int, on_exit: OnExit) -> None:
        self.rank, self.on_exit = rank, on_exit
        self.done = threading.Event()
        self.pid: int | None = None
        self.why_not = ""


_current: Forkserver | None = None
_current_lock = threading.Lock()


def forkserver() -> Forkserver:
    """This process's forkserver. Starts one if none is alive."""
    global _current
    with _current_lock, uninterrupted():  # a forkserver that is not `_current` is never closed
        if _current is None or not _current.alive:
            _current = Forkserver()
        return _current


def warm() -> None:
    """Starts the forkserver in the background if forking is the default here: it imports torch before a launch."""
    if start_methods()[:1] == ("fork",):
        forkserver()


def _close() -> None:
    if _current is not None and _current.alive:
        _current.close()


def _after_fork() -> None:
    global _current, _current_lock
    _current_lock = threading.Lock()
    if _current is not None:
        _current.forget()
        _current = None


atexit.register(_close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
