"""The interface of an engine, and functions for the processes of local ranks."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import psutil

if TYPE_CHECKING:
    from ..shape import Shape

__all__ = [
    "THREAD_VARIABLES",
    "Ending",
    "Engine",
    "OnExit",
    "RankProcess",
    "adopt_orphans",
    "children",
    "descendants",
    "end_children",
    "has_ended",
    "kill_all",
    "kill_group",
    "resident_bytes",
]

ORPHANS_S = 1.0  # for processes that were killed to end

# Read by a library when it is loaded: OpenMP, MKL, OpenBLAS, Apple's Accelerate.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")

Ending = int | str  # exit code, negative for a signal (as multiprocess has it); or a sentence where no code is known
OnExit = Callable[[Ending], None]


class RankProcess(Protocol):
    """One rank's process, on this machine or another."""

    @property
    def pid(self) -> int:
        """The process id on its machine. Waits until it is known. Raises LaunchError if the process did not start."""

    def kill(self, number: int) -> None:
        """Signals the rank and all that it started. Does nothing if the rank has ended."""

    def memory_bytes(self) -> int:
        """The resident set in bytes, 0 if the process has ended."""


class Engine(Protocol):
    """Starts the ranks of one world.

    shape: the requested shape. On Ray, the engine chooses the nodes.
    """

    shape: Shape

    def store(self, generation: int) -> str:
        """The address of the store for the `generation`-th process groups: a path or a tcp:// address."""

    def start(self, rank: int, spec: dict[str, Any], fds: Sequence[int], on_exit: OnExit) -> RankProcess:
        """Begins to start a rank.

        fds: the rank's ends of control socket, stdout and stderr. The caller closes its copies.
        on_exit: called once, from a thread, when the process has ended.
        """

    def close(self) -> None:
        """Frees what the world used. Call it after every rank has ended."""


def has_ended(pid: int) -> bool:
    """Whether a child has ended. It is not reaped, so no other process can have its number yet."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def resident_bytes(pid: int) -> int:
    """The resident set in bytes of a process of this machine, 0 if it has ended."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def kill_group(pid: int, number: int) -> None:
    """Signals a rank's session, or the rank alone before it has one.

    Call it only before the process is reaped. Afterwards another process may have its number.
    """
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def adopt_orphans() -> None:
    """On Linux, descendants of this process become its children when their parent ends, in any session."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def children() -> set[int]:
    """The process ids of this process's children. On Linux with those that ended and are not reaped."""
    try:
        tasks = os.listdir("/proc/self/task")
        return {int(pid) for task in tasks for pid in _read(f"/proc/self/task/{task}/children").split()}
    except FileNotFoundError:  # not Linux, or a thread that has just ended
        return {process.pid for process in psutil.Process().children()}


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def end_children(kept: Collection[int] = (), elsewhere: bool = False) -> None:
    """Kills the children of this process and the orphans that they leave, except those in `kept`.

    elsewhere: kills only children in other sessions. Returns after `ORPHANS_S` at the latest: a process of another
    user, or in an uninterruptible system call, does not end.
    """
    until = time.monotonic() + ORPHANS_S
    while left := {pid for pid in children() if pid not in kept and not (elsewhere and _session(pid) == os.getsid(0))}:
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)  # not reaped yet
            with suppress(ChildProcessError):  # reaped elsewhere
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > until:
            break
        time.sleep(0.001)


def _session(pid: int) -> int:
    with suppress(ProcessLookupError):
        return os.getsid(pid)
    return 0


def descendants(pid: int) -> list[psutil.Process]:
    """The descendants of a process of this machine."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def kill_all(processes: Sequence[psutil.Process]) -> None:
    """Sends SIGKILL to each process whose number was not reused."""
    for process in processes:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.kill()
