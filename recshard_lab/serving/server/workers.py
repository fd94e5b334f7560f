"""Several worker processes that share one listening socket: ``recshard serve --workers N``.

The supervisor loads no model. It restarts a worker that ends, after a pause that doubles while workers keep ending
early. Workers write their counters to files of a temporary folder, so that each of them reports the sums.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass

from recshard_lab.serving.server.config import ServerConfig
from recshard_lab.serving.server.log import Log
from recshard_lab.serving.server.metrics import FOLDER_VARIABLE
from recshard_lab.serving.server.process import CANNOT_START, address_of
from recshard_lab.serving.server.spawn import start_with_lifeline

LONGEST_PAUSE_S = 30.0
HEALTHY_S = 10.0
"""A worker that ran for so long is restarted without a pause."""

_LOOK_S = 0.05


def next_pause(pause_s: float, ran_s: float) -> float:
    """Seconds to wait before a worker is started again.

    Args:
        pause_s: the wait before its last start.
        ran_s: seconds that it ran.

    >>> next_pause(0.0, 60.0), next_pause(0.0, 0.5), next_pause(0.8, 0.5), next_pause(30.0, 0.5)
    (0.0, 0.1, 1.6, 30.0)
    """
    return 0.0 if ran_s >= HEALTHY_S else min(LONGEST_PAUSE_S, max(0.1, 2 * pause_s))


@dataclass
class _Worker:
    process: subprocess.Popen[bytes] | None = None
    lifeline: int = -1
    started: float = 0.0
    pause_s: float = 0.0
    start_at: float = 0.0


class Supervisor:
    """Starts workers, restarts them, passes signals on.

    Args:
        config: options.
        sock: listens already.
        lifeline: file descriptor of a pipe. The workers drain when its other end is closed.
    """

    def __init__(self, config: ServerConfig, sock: socket.socket, lifeline: int | None = None) -> None:
        self._config, self._sock, self._lifeline = config, sock, lifeline
        self._log = Log(config.log_level)
        self._workers = [_Worker() for _ in range(config.workers)]
        self._wake = threading.Event()
        self._stops = 0
        self._reload = False
        self._cannot_start = False

    def run(self) -> int:
        """Serves until SIGTERM, SIGINT or the end of the lifeline. Returns the exit status."""
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        before = {number: signal.signal(number, self._signalled) for number in numbers}
        try:
            with tempfile.TemporaryDirectory(prefix="recshard-serve-") as folder:
                self._log.info("supervising", address=address_of(self._sock), workers=self._config.workers)
                self._run(folder)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        self._log.info("stopped", status=CANNOT_START if self._cannot_start else 0)
        self._log.close()
        return CANNOT_START if self._cannot_start else 0

    def _run(self, folder: str) -> None:
        try:
            while not self._stops and not self._cannot_start:
                for worker in self._workers:
                    self._look_after(worker, folder)
                if self._reload:
                    self._reload = False
                    self._send(signal.SIGHUP)
                if self._lifeline is not None and select.select([self._lifeline], [], [], 0)[0]:
                    break
                self._wake.wait(_LOOK_S)
                self._wake.clear()
        finally:
            self._end()

    def _signalled(self, number: int, frame: object) -> None:
        if number == signal.SIGHUP:
            self._reload = True
        else:
            self._stops += 1
        self._wake.set()

    def _look_after(self, worker: _Worker, folder: str) -> None:
        """Starts the worker where it does not run."""
        if worker.process is not None:
            status = worker.process.poll()
            if status is None:
                return
            self._forget(worker, folder)
            if status == CANNOT_START:
                self._cannot_start = True
                return
            worker.pause_s = next_pause(worker.pause_s, time.monotonic() - worker.started)
            worker.start_at = time.monotonic() + worker.pause_s
            self._log.warning("worker_ended", status=status, restarts_in_s=worker.pause_s)
        if time.monotonic() >= worker.start_at:
            worker.process, worker.lifeline = start_with_lifeline(
                self._config, self._sock, in_group=True, environment={FOLDER_VARIABLE: folder}
            )
            worker.started = time.monotonic()
            self._log.info("worker_started", worker=worker.process.pid)

    def _forget(self, worker: _Worker, folder: str) -> None:
        """Removes the gauges of an ended worker; its counters remain in the sums."""
        assert worker.process is not None
        for name in os.listdir(folder):
            if name.startswith("gauge_live") and name.endswith(f"_{worker.process.pid}.db"):
                os.unlink(os.path.join(folder, name))
        os.close(worker.lifeline)
        worker.process = None

    def _send(self, number: signal.Signals) -> None:
        for worker in self._workers:
            if worker.process is not None and worker.process.poll() is None:
                worker.process.send_signal(number)

    def _end(self) -> None:
        """Drains all workers. Kills them after the longest time that a drain takes, or at a second signal."""
        self._sock.close()
        self._log.info("draining", why="supervisor stops")
        self._send(signal.SIGTERM)
        config, stops = self._config, self._stops
        end = time.monotonic() + config.drain_s + config.timeout_s + config.read_timeout_s + 15
        running = [worker for worker in self._workers if worker.process is not None]
        while any(worker.process and worker.process.poll() is None for worker in running):
            if time.monotonic() > end or self._stops > max(1, stops):
                self._send(signal.SIGKILL)
            self._wake.wait(_LOOK_S)
            self._wake.clear()
        for worker in running:
            os.close(worker.lifeline)


def supervise(config: ServerConfig, sock: socket.socket, lifeline: int | None = None) -> int:
    """Runs the workers of `config`. Returns the exit status."""
    return Supervisor(config, sock, lifeline).run()
