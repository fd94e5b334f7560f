"""Ranks as clean interpreters, started by ``multiprocess``: slower than a fork, and possible where forks are not.

Nothing of the notebook is in them but what is sent, and no library's state is shared with a parent: the way to
find out whether an oddity comes from forking. The notebook's ``__main__`` is not imported again in a rank (functions
travel by value), so scripts need no ``if __name__ == "__main__"``. The rest of a rank is as with ``fork``. It needs a
POSIX system: interrupts are signals, and output comes through pipes.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import multiprocess
from multiprocess import resource_tracker
from multiprocess.connection import Connection

from .engine import OnExit, kill_group, resident_bytes

if TYPE_CHECKING:
    from ..shape import Shape

__all__ = ["SpawnEngine", "SpawnedRank"]

_starting = threading.Lock()

# Before anything of this package, and so torch, is imported in the child: some variables are read then, once.
_BOOT = """
import os, signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
os.dup2(err.fileno(), 2)
os.environ.update(spec["environment"])
from recshard_lab.launcher.engines.spawn import become_rank
become_rank(spec, control, out, err, listener)
"""


class SpawnEngine:
    """One world's folder; each rank is a child of this process."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._folder = tempfile.mkdtemp(prefix="recshard-")  # 0700

    def store(self, generation: int) -> str:
        return os.path.join(self._folder, f"store-{generation}")

    def start(self, rank: int, spec: dict[str, Any], fds: Sequence[int], on_exit: OnExit) -> SpawnedRank:
        return SpawnedRank({**spec, "litter": self._folder}, fds, on_exit)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class SpawnedRank:
    """A child process and a thread that waits for its end."""

    def __init__(
        self, spec: dict[str, Any], fds: Sequence[int], on_exit: OnExit, listener: socket.socket | None = None
    ) -> None:
        """listener: at which this rank is to host the ranks' store."""
        control = socket.socket(fileno=os.dup(fds[0]))
        streams = [Connection(os.dup(fd), readable=False) for fd in fds[1:]]
        context = multiprocess.get_context("spawn")
        names = {"spec": spec, "control": control, "out": streams[0], "err": streams[1], "listener": listener}
        self._process = context.Process(target=exec, args=(_BOOT, names), name=f"rank {spec['rank']}")
        with _starting, _unnoticed():
            self._process.start()
        control.close()
        for stream in streams:
            stream.close()
        self.pid = int(self._process.pid)
        self._reaping = threading.Lock()
        self._ended = False
        threading.Thread(target=self._wait, args=(on_exit,), name=f"recshard-wait-{self.pid}", daemon=True).start()

    def kill(self, number: int) -> None:
        with self._reaping:
            if not self._ended:  # not reaped yet, so the number is still that process
                kill_group(self.pid, number)

    def memory_bytes(self) -> int:
        return 0 if self._ended else resident_bytes(self.pid)

    def _wait(self, on_exit: OnExit) -> None:
        if hasattr(os, "waitid"):
            with suppress(ChildProcessError):  # somebody else reaped it
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        else:  # macOS before Python 3.13
            multiprocess.connection.wait([self._process.sentinel])
        with self._reaping:
            kill_group(self.pid, signal.SIGKILL)  # what the rank itself had started
            self._process.join()
            self._ended = True
        code = self._process.exitcode
        self._process.close()
        on_exit("ended, and something else in this process took its exit code" if code is None else int(code))


@contextmanager
def _unnoticed() -> Iterator[None]:
    """While a child is started: no interrupt reaches it before it can ignore them, and `__main__` looks empty."""
    resource_tracker.ensure_running()  # it unblocks SIGINT when it has to start
    main = sys.modules["__main__"]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        sys.modules["__main__"] = types.ModuleType("__main__")  # multiprocess would run the script again in the child
        yield
    finally:
        sys.modules["__main__"] = main
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def become_rank(
    spec: dict[str, Any], control: socket.socket, out: Any, err: Any, listener: socket.socket | None
) -> None:
    """What the child runs after `_BOOT`: a rank, and never back into multiprocess."""
    status = 1
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        fds = [os.dup(stream.fileno()) for stream in (control, out, err)]
        for stream in (control, out, err):
            stream.close()
        from ..stores import host_store
        from ..worker import run_rank

        if listener is not None:
            host_store(listener)
        status = run_rank(spec, *fds)
    except BaseException:
        import traceback

        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)
