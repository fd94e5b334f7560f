"""Ranks as clean interpreters, started by ``multiprocess``: slower than a fork, and possible where forks are not.

Nothing of the notebook is in them but what is sent, and no library's state is shared with a parent: the way to
find out whether an oddity comes from forking. The notebook's ``__main__`` is not imported again in a rank (functions
travel by value), so scripts need no ``if __name__ == "__main__"``. The rest of a rank is as with ``fork``. It needs a
POSIX system: interrupts are signals, and output comes through pipes.

On Linux a rank adopts what its processes start and leave, and kills that when it is stopped or when the notebook ends.
If the rank itself is killed by others than the launcher, or crashes, its processes in separate sessions live on.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import multiprocess
from multiprocess import context, popen_spawn_posix, resource_tracker, spawn, util
from multiprocess.connection import Connection

from .engine import OnExit, descendants, kill_all, kill_group, resident_bytes

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
        self._pidfd = os.pidfd_open(self.pid) if hasattr(os, "pidfd_open") else None
        threading.Thread(target=self._wait, args=(on_exit,), name=f"recshard-wait-{self.pid}", daemon=True).start()

    def kill(self, number: int) -> None:
        """Signals the rank and its session; SIGKILL ends all that it has started."""
        with self._reaping:
            if not self._ended and self._unreaped():
                started = descendants(self.pid) if number == signal.SIGKILL else []  # of any session: it adopts them
                kill_group(self.pid, number)
                kill_all(started)

    def _unreaped(self) -> bool:
        """Whether the number is still that process. Other code of this process may have reaped every child."""
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
            multiprocess.connection.wait([self._process.sentinel])
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


class _Popen(popen_spawn_posix.Popen):
    """Starts a child as multiprocess does, but for ``__main__``: the child does not import the notebook or script."""

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
    """While a child is started: no interrupt reaches it before it can ignore them."""
    resource_tracker.ensure_running()  # it unblocks SIGINT when it has to start
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
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
