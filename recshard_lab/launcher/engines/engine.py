"""What the launcher asks of an engine, and how a local rank's process is looked at."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import psutil

if TYPE_CHECKING:
    from ..shape import Shape

__all__ = ["Ending", "Engine", "OnExit", "RankProcess", "kill_group", "resident_bytes"]

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
    """Signals a rank's session, or the rank alone in the moment before it has one."""
    try:
        os.killpg(pid, signal.Signals(number))
    except (ProcessLookupError, PermissionError):
        with suppress(ProcessLookupError):
            os.kill(pid, number)
