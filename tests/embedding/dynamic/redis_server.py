"""A real Redis server on a socket in a folder."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import redis


@contextmanager
def redis_server() -> Iterator[str]:
    """Its url. It opens no port, keeps nothing on disk, and ends with the context."""
    with TemporaryDirectory() as folder:
        socket = Path(folder, "redis.sock")
        arguments = ["--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", folder]
        server = subprocess.Popen(["redis-server", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            _wait(f"unix://{socket}", server)
            yield f"unix://{socket}"
        finally:
            server.terminate()
            server.wait(20)


def _wait(url: str, server: subprocess.Popen[bytes]) -> None:
    """Returns when the server answers."""
    while True:
        try:
            with redis.Redis.from_url(url) as client:
                client.ping()
            return
        except redis.exceptions.ConnectionError:
            if server.poll() is not None:
                pytest.fail(f"redis-server ended with {server.returncode}")
            time.sleep(0.02)
