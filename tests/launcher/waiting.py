"""Waiting in tests of ranks: for a line of a running cell, and for the ends of processes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable
from itertools import count

import psutil

from recshard_lab.launcher import Ranks
from tests.patience import scaled, wait_until

_numbers = count()


def then(ranks: Ranks, act: Callable[[], object], on: Iterable[int] | None = None) -> str:
    """A line for a cell. `act` runs in this process as soon as all ranks, or those of `on`, have reached the line."""
    number, awaited = next(_numbers), range(ranks.world_size) if on is None else on

    def work() -> None:
        wait_until(lambda: {ranks.posted("reached")[rank] for rank in awaited} == {number}, 60)
        act()

    threading.Thread(target=work, daemon=True).start()
    return f"from recshard_lab.launcher.board import post; post('reached', {number})\n"


def interrupt() -> None:
    """The stop button: a signal to this process."""
    os.kill(os.getpid(), signal.SIGINT)


def running(ranks: Ranks) -> bool:
    return ranks.status()[0].state == "running"


def is_alive(process: psutil.Process) -> bool:
    """Whether a process has not ended. One that has ended but is not reaped yet is not alive."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def left(processes: Iterable[psutil.Process], seconds: float = 5) -> list[psutil.Process]:
    """Those that are alive after that time, scaled to this machine."""
    return [process for process in psutil.wait_procs(processes, scaled(seconds))[1] if is_alive(process)]
