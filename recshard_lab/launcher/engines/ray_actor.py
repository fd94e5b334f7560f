"""What runs inside a Ray actor: one rank beside it, and the three streams between that rank and the notebook.

The rank is a process of its own, because Ray runs an actor's methods on threads, where no signal and so no interrupt
arrives; and because its output is then whatever it writes, not only what Ray's logs catch.
"""

from __future__ import annotations

import os
import selectors
import socket
import sys
from contextlib import suppress
from typing import Any

import psutil

from .engine import Ending
from .spawn import SpawnedRank

__all__ = ["RankActor"]

CHUNK = 1 << 20


class RankActor:
    """One rank's host. `read` and `write` each run on a thread of their own (Ray's concurrency groups)."""

    def __init__(self) -> None:
        self._rank: SpawnedRank | None = None
        self._listener: socket.socket | None = None
        self._ending: Ending | None = None
        self._pipes: dict[str, int] = {}
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._wake = socket.socketpair()
        self._selector.register(self._wakeup, selectors.EVENT_READ, "")

    def place(self) -> tuple[str, str, list[str]]:
        """(address of this machine, name of the network interface that has it, GPUs that Ray lent)."""
        import ray

        address = ray.util.get_node_ip_address()
        return (
            address,
            interface_of(address),
            [str(gpu) for gpu in ray.get_runtime_context().get_accelerator_ids()["GPU"]],
        )

    def listen(self, host: str) -> int:
        """Opens the port at which this rank will host the store."""
        self._listener = socket.create_server((host, 0), backlog=1024)
        return int(self._listener.getsockname()[1])

    def start(self, spec: dict[str, Any]) -> int:
        """Starts the rank; its pid. Its surroundings are this machine's, with the variables of the launch."""
        spec = {**spec, "environment": {**os.environ, **spec["variables"]}}
        spec["path"] = [*sys.path, *(entry for entry in spec["path"] if entry not in sys.path)]
        self._control, theirs = socket.socketpair()
        self._control.setblocking(True)
        fds = [theirs.fileno()]
        for name in ("stdout", "stderr"):
            read, write = os.pipe()
            os.set_blocking(read, False)
            self._pipes[name] = read
            self._selector.register(read, selectors.EVENT_READ, name)
            fds.append(write)
        self._selector.register(self._control, selectors.EVENT_READ, "control")
        self._rank = SpawnedRank(spec, fds, self._on_exit, self._listener)
        theirs.close()
        for fd in fds[1:]:
            os.close(fd)
        if self._listener is not None:
            self._listener.close()
        return self._rank.pid

    def read(self) -> list[tuple[str, Any]]:
        """What the rank has sent since: (stream, bytes), then ("exit", Ending). Waits until there is something.

        What was printed before a message comes before it.
        """
        self._selector.select()
        over = self._ending is not None
        control = self._take_control()
        heard = [(name, self._take(name)) for name in ("stdout", "stderr")]
        heard.append(("control", control))
        found: list[tuple[str, Any]] = [(name, data) for name, data in heard if data]
        if over and not found:
            found.append(("exit", self._ending))
        return found

    def write(self, data: bytes) -> None:
        """To the rank's control socket; nothing happens when it is gone."""
        with suppress(OSError):
            self._control.sendall(data)

    def hang_up(self) -> None:
        """The notebook is gone: the rank notices and ends."""
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)

    def kill(self, number: int) -> None:
        """Signals the rank and all that it started."""
        if self._rank is not None:
            self._rank.kill(number)

    def memory_bytes(self) -> int:
        """The rank's resident set."""
        return self._rank.memory_bytes() if self._rank is not None else 0

    def _on_exit(self, ending: Ending) -> None:
        self._ending = ending
        self._wake.send(b"x")  # never read: from now on nobody need wait

    def _take_control(self) -> bytes:
        try:
            data = self._control.recv(CHUNK, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return b""
        except OSError:
            data = b""
        if not data and self._control in self._selector.get_map():
            self._selector.unregister(self._control)
        return data

    def _take(self, name: str) -> bytes:
        parts: list[bytes] = []
        while sum(map(len, parts)) < CHUNK:
            try:
                data = os.read(self._pipes[name], 1 << 16)
            except BlockingIOError:
                break
            if not data:
                if self._pipes[name] in self._selector.get_map():
                    self._selector.unregister(self._pipes[name])
                break
            parts.append(data)
        return b"".join(parts)


def interface_of(address: str) -> str:
    """The network interface that has an address of this machine; empty when none does."""
    for name, found in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in found):
            return name
    return ""
