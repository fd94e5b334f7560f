"""From a fresh process to a rank: its own session, streams, environment; then it serves."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

from .channel import Channel
from .rank import Rank

__all__ = ["die_with_parent", "run_rank"]


def run_rank(spec: dict[str, Any], control: int, stdout: int, stderr: int) -> int:
    """Turns a fresh process into a rank and serves it; returns the exit status."""
    os.setsid()  # a session of its own: Jupyter's interrupt goes to the kernel, which forwards it
    null = os.open(os.devnull, os.O_RDONLY)
    for number, fd in enumerate((null, stdout, stderr)):
        os.dup2(fd, number)
        os.close(fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(spec["environment"])
    sys.path[:] = spec["path"]
    sys.argv[:] = [""]
    with suppress(OSError):  # removed meanwhile: stay where the forkserver is
        os.chdir(spec["folder"])
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = open(number, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.set_inheritable(control, False)  # descriptors that come over a socket are inheritable
    gc.enable()
    return Rank(spec, Channel(socket.socket(fileno=control))).serve()


def die_with_parent(parent: int) -> None:
    """Linux: SIGKILL when process `parent`, which forked this one, ends; the end of the channel does it everywhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it ended before
            os.kill(os.getpid(), signal.SIGKILL)
