"""`serve`: a server in another process, for notebooks, tests and benchmarks."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from recshard_lab.serving.server.client import Client
from recshard_lab.serving.server.config import ServerConfig
from recshard_lab.serving.server.process import address_of, listen
from recshard_lab.serving.server.spawn import start_with_lifeline


class Server:
    """A running server. Use it as a context, or call `stop`. It also stops when this process ends.

    Attributes:
        address: ``http://host:port``.
        pid: of the process, or of the supervisor of several workers.
        log_path: its log, JSON lines.

    Args:
        config: options.
        token: bearer token, passed in the environment of the process.
        wait_s: seconds until the model must be loaded.

    Raises:
        RuntimeError: the server cannot start, or is not ready in time.
    """

    def __init__(self, config: ServerConfig, token: str | None = None, wait_s: float = 120.0) -> None:
        self._token = token
        sock = listen(config)
        handle, name = tempfile.mkstemp(prefix="recshard-serve-", suffix=".log")
        self.log_path = Path(name)
        try:
            with sock, os.fdopen(handle, "wb") as log:
                self.address = address_of(sock)
                self._process, self._lifeline = start_with_lifeline(
                    config, sock, in_group=False, token=token, stderr=log
                )
        except BaseException:
            self.log_path.unlink()
            raise
        self.pid = self._process.pid
        try:
            self._wait(wait_s)
        except BaseException:
            self.stop(kill=True)
            raise

    def _wait(self, wait_s: float) -> None:
        end = time.monotonic() + wait_s
        with Client(self.address, self._token, timeout_s=5) as client:
            while not client.is_ready():
                status = self._process.poll()
                if status is not None:
                    raise RuntimeError(f"the server ended with status {status}: {self._last_words()}")
                if time.monotonic() > end:
                    raise RuntimeError(f"the server is not ready after {wait_s:g} s: {self._last_words()}")
                time.sleep(0.02)

    def _last_words(self) -> str:
        """The message of the event ``cannot_start``, or the end of the log."""
        text = self.log_path.read_text(errors="replace").strip()
        for line in reversed(text.splitlines()):
            with suppress(ValueError, TypeError, KeyError):
                record = json.loads(line)
                if record["event"] == "cannot_start":
                    return str(record["message"])
        return text[-2000:]

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def client(self, timeout_s: float = 30.0) -> Client:
        """A new client with the token of this server."""
        return Client(self.address, self._token, timeout_s)

    def is_running(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def stop(self, timeout_s: float = 40.0, kill: bool = False) -> int:
        """Drains the server and waits for its end. The log is deleted. Calling it again does nothing.

        Args:
            timeout_s: seconds until the process is killed.
            kill: kill it at once.

        Returns:
            The exit status; 0 after a drain.
        """
        if self._process.poll() is None:
            if kill:
                self._process.kill()
            else:
                with suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGTERM)
            try:
                self._process.wait(timeout_s)
            except Exception:
                self._process.kill()
                self._process.wait()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
            self.log_path.unlink(missing_ok=True)
        return self._process.returncode


def serve(
    path: str | Path, port: int = 0, *, token: str | None = None, wait_s: float = 120.0, **options: Any
) -> Server:
    """Serves a bundle, or a folder of versions, from another process. Returns when the model is loaded.

    Args:
        path: the folder.
        port: port to listen on. 0: a free one.
        token: bearer token that clients must send. It is passed in the environment of the process.
        wait_s: seconds until the model must be loaded.
        options: as of `ServerConfig`.

    Raises:
        RuntimeError: the server cannot start, or is not ready in time.

    ::

        with serve("model") as server:
            print(server.client().predict(sparse={"movie": [[1, 5]]}))
    """
    return Server(ServerConfig(str(path), port=port, **options), token, wait_s)
