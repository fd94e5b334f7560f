"""Ranks as clean interpreters, started by ``multiprocess``: slower than a fork, and the default on macOS.

A rank shares no state of libraries with the notebook. Use this engine to test whether a fault comes from forking. A
rank does not import the notebook's ``__main__`` (functions are sent by value), so scripts need no
``if __name__ == "__main__"``. The rest of a rank is as with ``fork``. The engine needs a POSIX system: interrupts are
signals, and output arrives through pipes.

On Linux a rank adopts what its processes start and leave, and kills that when it is stopped or when the notebook ends.
If the rank itself is killed by others than the launcher, or crashes, its processes in separate sessions live on.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psutil
from multiprocess import context, popen_spawn_posix, resource_tracker, spawn, util
from multiprocess.connection import Connection

from .engine import OnExit, descendants, has_ended, kill_all, kill_group, resident_bytes

if TYPE_CHECKING:
    from ..shape import Shape

__all__ = ["SpawnEngine", "SpawnedRank"]

LOOK_S = 0.02  # between looks at a rank's process, on a system without waitid

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
        """listener: the socket at which this rank hosts the store of all ranks."""
        control = socket.socket(fileno=os.dup(fds[0]))
        streams = [Connection(os.dup(fd), readable=False) for fd in fds[1:]]
        names = {"spec": spec, "control": control, "out": streams[0], "err": streams[1], "listener": listener}
        self._process = _Process(target=exec, args=(_BOOT, names), name=f"rank {spec['rank']}")
        with _starting, _no_interrupt():
            self._process.start()
        control.close()
        for stream in streams:
            stream.close()
        self.pid = int(self._process.pid)
        self._reaping = threading.Lock()
        self._ended = False
        self._pidfd = pidfd(self.pid)
        threading.Thread(target=self._wait, args=(on_exit,), name=f"recshard-wait-{self.pid}", daemon=True).start()

    def kill(self, number: int) -> None:
        """Signals the rank and its session. SIGKILL ends all that it has started."""
        with self._reaping:
            if not self._ended and self._unreaped():
                started = descendants(self.pid) if number == signal.SIGKILL else []  # of any session: it adopts them
                kill_group(self.pid, number)
                kill_all(started)

    def _unreaped(self) -> bool:
        """Whether no other process can have the rank's number. Other code may have reaped every child."""
        if self._pidfd is None:
            return True
        try:
            signal.pidfd_send_signal(self._pidfd, 0)
        except ProcessLookupError:
            return False
        return True

    def memory_bytes(self) -> int:
        return 0 if self._ended else resident_bytes(self.pid)

    def _wait(self, on_exit: OnExit) -> None:
        reaped = False
        if hasattr(os, "waitid"):
            try:
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            except ChildProcessError:
                reaped = True
        else:  # macOS before Python 3.13
            while not has_ended(self.pid):  # a sentinel stays open while a process that the rank forked holds it
                time.sleep(LOOK_S)
            reaped = not psutil.pid_exists(self.pid)
        with self._reaping:
            if not reaped:
                kill_group(self.pid, signal.SIGKILL)  # what the rank itself had started
            self._ended = True
            self._process.join()
            if self._pidfd is not None:
                os.close(self._pidfd)
        code = self._process.exitcode
        if code is not None:
            self._process.close()
        on_exit("ended, and other code of this process took its exit code" if code is None else int(code))


def pidfd(pid: int) -> int | None:
    """A descriptor of a process; None on macOS, on Linux before 5.3, and in containers that forbid it."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM):
            raise
        return None


class _Popen(popen_spawn_posix.Popen):
    """Starts a child as multiprocess does, except that the child does not import the notebook or script."""

    def _launch(self, process_obj: Any) -> None:
        tracker = resource_tracker.getfd()
        preparation = spawn.get_preparation_data(process_obj.name)
        for main in ("init_main_from_name", "init_main_from_path"):
            preparation.pop(main, None)
        data = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            context.reduction.dump(preparation, data)
            context.reduction.dump(process_obj, data)
        finally:
            context.set_spawning_popen(None)
        self.sentinel, child_end = os.pipe()
        child_start, start = os.pipe()
        try:
            self.finalizer = util.Finalize(self, util.close_fds, (self.sentinel, start))
            command = spawn.get_command_line(tracker_fd=tracker, pipe_handle=child_start)
            fds = [*self._fds, tracker, child_start, child_end]
            self.pid = util.spawnv_passfds(spawn.get_executable(), command, fds)
            with open(start, "wb", closefd=False) as file:
                file.write(data.getbuffer())
        finally:
            os.close(child_start)
            os.close(child_end)


class _Process(context.SpawnProcess):
    """A `multiprocess` process that starts by `_Popen`.

    In the child it is a plain one: importing our modules there would come before the variables that they read are set.
    """

    @staticmethod
    def _Popen(process_obj: Any) -> _Popen:
        return _Popen(process_obj)

    def __reduce__(self) -> tuple[Any, ...]:
        return object.__new__, (context.SpawnProcess,), vars(self)


@contextmanager
def _no_interrupt() -> Iterator[None]:
    """Blocks SIGINT while a child starts, until the child ignores it."""
    resource_tracker.ensure_running()  # it unblocks SIGINT when it has to start
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def become_rank(
    spec: dict[str, Any], control: socket.socket, out: Any, err: Any, listener: socket.socket | None
) -> None:
    """Runs a rank in the child, after `_BOOT`. Does not return."""
    status = 1
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        fds = [os.dup(stream.fileno()) for stream in (control, out, err)]
        for stream in (control, out, err):
            stream.close()
        from ..groups import host_store
        from ..rank import run_rank
        from .engine import adopt_orphans

        adopt_orphans()
        if listener is not None:
            host_store(listener)
        status = run_rank(spec, *fds)
    except BaseException:
        import traceback

        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)
