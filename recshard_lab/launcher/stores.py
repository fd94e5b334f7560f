"""Where ranks meet to make process groups: a file on one machine, an address where they live on several."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from urllib.parse import urlsplit

from torch._C._distributed_c10d import FileStore, Store, TCPStore
from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import PrefixStore

from .errors import SPACE, LaunchError

__all__ = ["host_store", "is_store_port", "open_store", "space_needed", "spans_hosts"]

TIMEOUT = timedelta(minutes=5)

_hosted: list[Store] = []  # the server lives as long as its store
_addresses: set[tuple[str, int]] = set()


def open_store(where: str, world_size: int) -> Store:
    """The store at `where`, a path or ``tcp://host:port/name``: names are stores of their own on one server."""
    if not where.startswith("tcp://"):
        return FileStore(where, world_size)
    parts = urlsplit(where)
    assert parts.hostname is not None
    assert parts.port is not None
    _addresses.add((parts.hostname, parts.port))
    client = TCPStore(parts.hostname, parts.port, world_size, False, TIMEOUT)
    return PrefixStore(parts.path.strip("/"), client)


@contextmanager
def space_needed(where: str) -> Iterator[None]:
    """Around what writes to the store at `where`: a full disk raises a LaunchError that names the folder."""
    try:
        yield
    except DistStoreError as error:  # torch names no file
        if where.startswith("tcp://") or os.strerror(errno.ENOSPC) not in str(error):
            raise
        raise LaunchError(
            f"{os.strerror(errno.ENOSPC)} in {os.path.dirname(where)}, where ranks meet. {SPACE}"
        ) from None


def host_store(listener: socket.socket) -> None:
    """Serves stores on a socket that listens already, from this process."""
    host, port = listener.getsockname()[:2]
    server = TCPStore(host, port, None, True, TIMEOUT, wait_for_workers=False, master_listen_fd=listener.detach())
    _hosted.append(server)


def is_store_port(port: int) -> bool:
    """Whether a connection with this port at one end leads to a store, which outlives process groups."""
    return any(port == known for _, known in _addresses)


def spans_hosts() -> bool:
    """Whether ranks may be connected by more than the loopback interface."""
    return any(not host.startswith("127.") and host != "::1" for host, _ in _addresses)
