"""What the launcher asks of an engine, and how a local rank's process is looked at."""

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
    "Ending",
    "Engine",
    "OnExit",
    "RankProcess",
    "adopt_orphans",
    "children",
    "descendants",
    "end_children",
    "kill_all",
    "kill_group",
    "resident_bytes",
]

ORPHANS_S = 1.0  # for processes that were killed to end

Ending = int | str  # exit code, negative for a signal (as multiprocess has it); or a sentence where no code is known
OnExit = Callable[[Ending], None]


class RankProcess(Protocol):
    """One rank's process, here or elsewhere."""

    @property
    def pid(self) -> int:
        """Its number on its machine; waits until it is known. Raises LaunchError if it never will be."""

    def kill(self, number: int) -> None:
        """Signals the rank and all that it started; one that is gone already is left in peace."""

    def memory_bytes(self) -> int:
        """Its resident set; 0 when it is gone."""


class Engine(Protocol):
    """Starts the ranks of one world.

    shape: what was asked for, or what came of it where the engine decides (the nodes of a Ray cluster).
    """

    shape: Shape

    def store(self, generation: int) -> str:
        """Where ranks meet to make their process groups, the `generation`-th time: a path or a tcp:// address."""

    def start(self, rank: int, spec: dict[str, Any], fds: Sequence[int], on_exit: OnExit) -> RankProcess:
        """Begins to start a rank. fds: its ends of control socket, stdout and stderr; the caller closes his copies.

        on_exit: called once, from a thread, when the process has ended.
        """

    def close(self) -> None:
        """After every rank has ended: lets go of what the world needed."""


def resident_bytes(pid: int) -> int:
    """Resident set of a process of this machine; 0 when it is gone."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def kill_group(pid: int, number: int) -> None:
    """Signals a rank's session, or the rank alone in the moment before it has one.

    Only for a process that is not reaped yet: afterwards its number may be another process's.
    """
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def adopt_orphans() -> None:
    """Linux: descendants of this process whose parent ends become its children, in whatever session they are."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def children() -> set[int]:
    """The processes whose parent is this one, those that ended unreaped included."""
    try:
        tasks = os.listdir("/proc/self/task")
        return {int(pid) for task in tasks for pid in _read(f"/proc/self/task/{task}/children").split()}
    except FileNotFoundError:  # not Linux, or a thread that has just ended
        return {process.pid for process in psutil.Process().children()}


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def end_children(kept: Collection[int] = (), elsewhere: bool = False) -> None:
    """Kills the children of this process, then what these leave behind, until none is left but those in `kept`.

    elsewhere: only those in other sessions than this process. Gives up after `ORPHANS_S`: a process in an
    uninterruptible system call, or of another user, does not end.
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
    """All that a process of this machine has started and that is its descendant still."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def kill_all(processes: Sequence[psutil.Process]) -> None:
    """SIGKILL to each that still is the process it was."""
    for process in processes:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.kill()
