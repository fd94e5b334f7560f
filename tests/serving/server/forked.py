"""Server processes that are forked from one which has imported everything: each starts 1.5 s of CPU time sooner.

Tests of how a process starts use `Inherited.start` as it is, see `real_start` in the conftest.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.reduction import DupFd
from typing import IO, Any

from recshard_lab.serving.server import process
from recshard_lab.serving.server.config import TOKEN_VARIABLE
from recshard_lab.serving.server.spawn import VARIABLE, Inherited

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["recshard_lab.serving.server.process", "tests.serving.server.stub"])


class Forked:
    """The part of `subprocess.Popen` that servers use."""

    def __init__(self, child: Any) -> None:
        self._child, self.pid = child, int(child.pid)

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self.poll()

    def poll(self) -> int | None:
        """As `subprocess.Popen.poll`."""
        found: int | None = self._child.exitcode
        return found

    def wait(self, timeout: float | None = None) -> int:
        """As `subprocess.Popen.wait`."""
        self._child.join(timeout)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired("a forked server", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        """As `subprocess.Popen.send_signal`."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """As `subprocess.Popen.kill`."""
        self.send_signal(signal.SIGKILL)


def start(
    own: Inherited,
    token: str | None = None,
    stderr: IO[bytes] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Forked:
    """As `Inherited.start`."""
    variables = {**os.environ, **(environment or {}), **({} if token is None else {TOKEN_VARIABLE: token})}
    log = sys.stderr.fileno() if stderr is None else stderr.fileno()
    parts = variables, own.config.as_json(), own.in_group, Descriptors(own.sock, own.lifeline, log)
    child = _context.Process(target=_serve, args=parts)
    child.start()
    return Forked(child)


class Descriptors:
    """File descriptors that a child gets under other numbers."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers

    def __reduce__(self) -> Any:
        return _descriptors, tuple(DupFd(number) for number in self.numbers)


def _descriptors(*copies: Any) -> Descriptors:
    return Descriptors(*(copy.detach() for copy in copies))


def _serve(variables: dict[str, str], config: str, in_group: bool, descriptors: Descriptors) -> None:
    sock, lifeline, log = descriptors.numbers
    os.setsid()
    os.dup2(log, sys.stderr.fileno())
    os.close(log)
    os.environ.clear()
    os.environ.update(variables)
    os.environ[VARIABLE] = json.dumps({"config": config, "in_group": in_group, "fds": [sock, lifeline]})
    process.main()
