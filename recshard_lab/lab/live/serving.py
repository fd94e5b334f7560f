"""The server that `%recshard_serve` starts beside a notebook. One at a time; it ends with the kernel."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from recshard_lab.lab.draw.theme import counted

if TYPE_CHECKING:
    from recshard_lab.serving.server import Server

_running: Server | None = None


def current() -> Server | None:
    """The running server, if there is one."""
    global _running
    if _running is not None and not _running.is_running():
        _running.stop()
        _running = None
    return _running


def start(path: str | Path, **options: Any) -> Server:
    """Starts a server, then stops the old one. If the new server fails, the old one continues.

    An old server on the same port is stopped first.

    Args:
        path: a bundle, or a folder of bundles.
        options: as of `recshard_lab.serving.server.serve`.

    Raises:
        ValueError: the folder has no bundle, or an option is wrong.
        RuntimeError: the server cannot load the bundle, or listen.
        ImportError: the packages of the extra "serving" are not installed.
    """
    global _running
    from recshard_lab.serving.server import serve
    from recshard_lab.serving.server.versions import find_versions

    find_versions(Path(path))
    old = current()
    if old is not None and old.address.endswith(f":{options.get('port', 0)}"):
        stop()
    started = serve(path, **options)
    stop()
    _running = started
    return started


def stop() -> str | None:
    """Drains and stops the server. Returns its address, or None if none was running."""
    global _running
    server, _running = current(), None
    if server is None:
        return None
    server.stop()
    return server.address


def status(server: Server) -> str:
    """The served version and the number of answered requests, in one line."""
    with server.client(5.0) as client:
        version = client.model()["version"]
        metrics = client.metrics()
    answered = int(sum(value for name, value in metrics.items() if name.startswith("recshard_requests_total")))
    return f"{server.address} serves {version}; {counted(answered, 'request')} answered"
