"""Ranks forked from the zygote: the fastest, and what a notebook gets unless it asks for something else."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..forkserver import Forkserver, forkserver
from .engine import OnExit, resident_bytes

if TYPE_CHECKING:
    from ..shape import Shape

__all__ = ["ForkEngine", "why_not_fork"]


def why_not_fork() -> str:
    """Why this process's forkserver must not fork, as far as it has imported; empty when it may."""
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
    """A child of the zygote, signalled through it: it alone knows that the number is still that process."""

    def __init__(self, server: Forkserver, pid: Callable[[], int]) -> None:
        self._server, self._pid = server, pid

    @property
    def pid(self) -> int:
        return self._pid()

    def kill(self, number: int) -> None:
        self._server.kill(self.pid, number)

    def memory_bytes(self) -> int:
        return resident_bytes(self.pid)
