"""The kernel's hold on the zygote: start it, have ranks forked, hear of their end."""

from __future__ import annotations

import atexit
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from .channel import Channel, Message
from .engines.engine import OnExit
from .errors import LaunchError

__all__ = ["Forkserver", "forkserver", "warm"]

# Imported in the zygote while nobody waits, if they are installed: what a rank would otherwise import itself.
LATER = (
    "torch.nn.parallel.distributed",
    "fbgemm_gpu",
    "llvmlite.binding",  # loads the compiled loops of lookups
    "torch._dynamo",  # optimizers and DDP import it on first use: 0.6 to 4 s in every rank otherwise
    "recshard_lab.distributed",
    "recshard_lab.models",
    "recshard_lab.train",
)

LEAVE_S = 0.3  # for the zygote to clear up when we end

_BOOT = """
import sys
sys.path[:] = {path!r}
from recshard_lab.launcher import zygote
zygote.main({fd}, {later!r})
"""

# Read when a library is loaded, so they must be set before the zygote's first import.
_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",  # waiting threads sleep: more ranks than cores would starve one another
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # counting GPUs must not start CUDA before the fork
    "OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES",  # macOS
}


class Forkserver:
    """One zygote process, talked to over a socket pair that only it inherits."""

    def __init__(self, later: Sequence[str] = LATER) -> None:
        ours, theirs = socket.socketpair()
        boot = _BOOT.format(path=list(sys.path), fd=theirs.fileno(), later=tuple(later))
        self.process = subprocess.Popen(
            [sys.executable, "-c", boot],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, **_ENVIRONMENT},
            start_new_session=True,  # Jupyter interrupts the kernel's process group
        )
        theirs.close()
        self.channel = Channel(ours)
        self.alive = True
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
        """A folder only we can read; the zygote removes it when it ends. Waits for the zygote to be up."""
        self._hello.wait(120)
        self._check()
        return self._folder

    def fork(self, spec: dict[str, Any], fds: Sequence[int], on_exit: OnExit) -> Callable[[], int]:
        """Asks for a rank; what is returned waits for its pid. on_exit is called from a thread."""
        self._check()
        fork = _Fork(on_exit)
        with self._lock:
            self._count += 1
            number = self._count
            self._forks[number] = fork
            self._send(Message("fork", number, pickle.dumps(spec)), fds)

        def pid() -> int:
            fork.done.wait(120)
            if fork.pid is None:
                self._check()
                raise LaunchError("the forkserver did not answer within 120 s; restart the kernel.")
            return fork.pid

        return pid

    def kill(self, pid: int, number: int = signal.SIGKILL) -> None:
        """Signals a rank and all that it started; a rank that is gone already is left in peace."""
        with self._lock:
            if self.alive:
                with suppress(OSError):  # the zygote is gone, and took its children along
                    self._send(Message("kill", 0, pickle.dumps((pid, int(number)))), ())

    def close(self) -> None:
        """Ends the zygote, and with it every rank."""
        with suppress(OSError):
            self.channel.sock.shutdown(socket.SHUT_RDWR)
        try:
            self.process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:  # in the midst of an import
            self.process.kill()
            self.process.wait()
            if self._folder:
                shutil.rmtree(self._folder, ignore_errors=True)
        self._thread.join(5)

    def forget(self) -> None:
        """In a fork of the kernel: the zygote is the parent's."""
        self.channel.close()
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
                message = self.channel.receive()
                if message.kind == "hello":
                    self._folder = pickle.loads(message.payload)
                    self._hello.set()
                elif message.kind == "forked":
                    fork = self._forks.pop(message.cell)
                    fork.pid = pickle.loads(message.payload)
                    self._on_exit[fork.pid] = fork.on_exit
                    fork.done.set()
                elif message.kind == "exited":
                    pid, status = pickle.loads(message.payload)
                    self._on_exit.pop(pid)(os.waitstatus_to_exitcode(status))
                elif message.kind == "warm":
                    self.warmed.set()
        except (EOFError, OSError):
            self._end()

    def _end(self) -> None:
        stderr = self.process.stderr
        assert stderr is not None
        self._last_words = stderr.read().decode(errors="replace").strip()
        stderr.close()
        self.process.wait()
        if self._folder:  # a zygote that was killed could not remove it
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
    """A fork asked for and not yet answered."""

    def __init__(self, on_exit: OnExit) -> None:
        self.on_exit = on_exit
        self.done = threading.Event()
        self.pid: int | None = None


_current: Forkserver | None = None
_current_lock = threading.Lock()


def forkserver() -> Forkserver:
    """This process's zygote, started when there is none."""
    global _current
    with _current_lock:
        if _current is None or not _current.alive:
            _current = Forkserver()
        return _current


def warm() -> None:
    """Starts the zygote in the background, so that the first launch finds torch imported."""
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
