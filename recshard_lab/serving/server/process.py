"""One server process: it loads the model, listens, swaps versions, drains and ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Coroutine, Iterator
from typing import Any

import torch
import uvicorn

from recshard_lab.serving.server.app import App, State
from recshard_lab.serving.server.batcher import Batcher
from recshard_lab.serving.server.config import ServerConfig
from recshard_lab.serving.server.connections import Limits, connection_class
from recshard_lab.serving.server.errors import Refused
from recshard_lab.serving.server.log import Forward, Log
from recshard_lab.serving.server.metrics import Metrics
from recshard_lab.serving.server.versions import Versions

CANNOT_START = 2
"""Exit status of a server that cannot start. A supervisor does not start it again."""

KEEP_ALIVE_S = 75


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers: `Process` drains first, and the exit status is 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(config: ServerConfig) -> socket.socket:
    """A socket that listens on the address of `config`.

    Raises:
        OSError: the address is taken or not one of this machine.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((config.host, config.port))
        found.listen(2048)
    except OSError as error:
        found.close()
        raise OSError(
            error.errno,
            f"cannot listen on {config.host}:{config.port}: {error.strerror}. Fix: pass another --port, or "
            f"--port 0 for a free one",
        ) from None
    found.setblocking(False)
    return found


def address_of(sock: socket.socket) -> str:
    """``http://host:port`` of a listening socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Process:
    """A server in this process. `run` returns when it has drained.

    Args:
        config: options.
        sock: listens already; it is closed at the end.
        lifeline: file descriptor of a pipe. The server drains when its other end is closed.
        in_group: whether a supervisor runs this process beside others.
    """

    def __init__(
        self, config: ServerConfig, sock: socket.socket, lifeline: int | None = None, in_group: bool = False
    ) -> None:
        self._config, self._sock, self._lifeline = config, sock, lifeline
        self._log, metrics = Log(config.log_level), Metrics()
        self.state = State(config, Versions(config, metrics, self._log), metrics, self._log, in_group=in_group)
        limits = Limits(config.read_timeout_s, config.max_connections, self._refused, metrics.connections.set)
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                App(self.state, config.token()),
                http=connection_class(limits),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(config.timeout_s + config.read_timeout_s + 1),
            )
        )
        self._status = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def _refused(self, refused: Refused) -> None:
        self.state.metrics.requests.labels(str(refused.status)).inc()
        self._log.info("request", status=refused.status, reason=refused.reason)

    def run(self) -> int:
        """Serves until SIGTERM, SIGINT or the end of the lifeline. Returns the exit status."""
        logger = logging.getLogger("uvicorn")
        logger.handlers, logger.propagate = [Forward(self._log)], False
        logger.setLevel(logging.WARNING)
        torch.set_num_threads(self._config.torch_threads)
        gc.collect()
        gc.freeze()  # modules stay; collecting after a swap looks at the models only
        with asyncio.Runner(loop_factory=self._uvicorn.config.get_loop_factory()) as runner:
            runner.run(self._serve())
        self._log.info("stopped", status=self._status)
        self._log.close()
        return self._status

    async def _serve(self) -> None:
        loop, config = asyncio.get_running_loop(), self._config
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._stop, signal.Signals(number).name)
            loop.add_signal_handler(signal.SIGHUP, lambda: self._start(self._reload()))
        if self._lifeline is not None:
            loop.add_reader(self._lifeline, self._lifeline_ended)
        self.state.batcher = Batcher(
            self.state.metrics,
            max_batch=config.max_batch,
            delay_ms=config.delay_ms,
            queue=config.queue,
            threads=config.model_threads,
        )
        self.state.metrics.queue_limit.set(config.queue)
        address = address_of(self._sock)
        self._log.info("listening", address=address, version=None)
        if not config.is_loopback and config.token() is None:
            self._log.warning(
                "open_to_others",
                address=address,
                message="other machines can connect, and no token is set. Fix: pass --token-file.",
            )
        self._start(self._load())
        await self._uvicorn.serve([self._sock])
        for task in self._tasks:
            task.cancel()
        if not await asyncio.to_thread(self.state.batcher.close):
            self._log.warning("model_busy", message="a call of the model has not ended")

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self) -> None:
        """Loads the first version; ends the process if none loads."""
        try:
            refusals = await asyncio.to_thread(self.state.versions.refresh)
        except OSError as error:
            refusals = [str(error)]
        if self.state.versions.current is None:
            self._log.warning("cannot_start", message="; ".join(refusals))
            self._status = CANNOT_START
            self._uvicorn.should_exit = True
            return
        self._log.info("ready", address=address_of(self._sock), version=self.state.versions.current.name)
        if self._config.watch_s:
            await self.state.versions.watch()

    async def _reload(self) -> None:
        try:
            await asyncio.to_thread(self.state.versions.refresh, True)
        except OSError as error:
            self._log.error("reload_failed", error)

    def _lifeline_ended(self) -> None:
        assert self._lifeline is not None
        asyncio.get_running_loop().remove_reader(self._lifeline)
        self._stop("parent ended")

    def _stop(self, why: str) -> None:
        """Drains. A second signal ends at once, without waiting for the requests."""
        if self.state.draining:
            self._uvicorn.should_exit = self._uvicorn.force_exit = True
            return
        self.state.draining = True
        self._log.info("draining", why=why)
        self._start(self._drain())

    async def _drain(self) -> None:
        await asyncio.sleep(self._config.drain_s)
        self._uvicorn.should_exit = True


def run_process(
    config: ServerConfig, sock: socket.socket | None = None, lifeline: int | None = None, in_group: bool = False
) -> int:
    """Serves in this process. Returns the exit status."""
    return Process(config, sock or listen(config), lifeline, in_group).run()


def main() -> None:
    """A process that another one started: its options are in the environment, see `spawn.command`."""
    from recshard_lab.serving.server.spawn import Inherited

    inherited = Inherited.from_environment()
    sock = socket.socket(fileno=inherited.sock)
    sock.setblocking(False)
    os.set_inheritable(inherited.lifeline, False)
    if inherited.config.workers > 1 and not inherited.in_group:
        from recshard_lab.serving.server.workers import supervise

        sys.exit(supervise(inherited.config, sock, inherited.lifeline))
    sys.exit(run_process(inherited.config, sock, inherited.lifeline, inherited.in_group))


if __name__ == "__main__":
    main()
