"""A real Redis server on a socket in a folder."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import redis

from tests.patience import wait_until


@contextmanager
def redis_server() -> Iterator[str]:
    """Its url. It opens no port, keeps nothing on disk, and ends with the context."""
    with TemporaryDirectory() as folder:
        socket = Path(folder, "redis.sock")
        arguments = ["--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", folder]
        server = subprocess.Popen(["redis-server", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_until(lambda: _answers(f"unix://{socket}", server))
            yield f"unix://{socket}"
        finally:
            server.terminate()
            server.wait(20)


def _answers(url: str, server: subprocess.Popen[bytes]) -> bool:
    assert server.poll() is None, f"redis-server ended with {server.returncode}"
    try:
        with redis.Redis.from_url(url) as client:
            return bool(client.ping())
    except redis.exceptions.ConnectionError:
        return False
