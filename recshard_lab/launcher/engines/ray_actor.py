"""A Ray actor that starts one rank, and carries the three streams between that rank and the notebook.

The rank is a separate process, because Ray runs an actor's methods on threads, which receive no signals and so no
interrupts. Its output is then all that the process writes, not only what Ray's logs contain.
"""

from __future__ import annotations

import os
import selectors
import socket
import sys
from contextlib import suppress
from typing import Any

from .engine import Ending
from .spawn import SpawnedRank

__all__ = ["RankActor"]

CHUNK = 1 << 20


class RankActor:
    """One rank's host. `read` and `write` run on separate threads (Ray's concurrency groups)."""

    def __init__(self) -> None:
        self._rank: SpawnedRank | None = None
        self._listener: socket.socket | None = None
        self._ending: Ending | None = None
        self._pipes: dict[str, int] = {}
        self._selector = selectors.PollSelector()
        self._wakeup, self._wake = socket.socketpair()
        self._selector.register(self._wakeup, selectors.EVENT_READ, "")

    def place(self) -> tuple[str, list[str]]:
        """The address of this machine, and the GPUs that Ray has given to this actor."""
        import ray

        gpus = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        return ray.util.get_node_ip_address(), [str(gpu) for gpu in gpus]

    def listen(self, host: str) -> int:
        """Opens the port at which this rank will serve the store. Returns its number."""
        self._listener = socket.create_server((host, 0), backlog=1024)
        return int(self._listener.getsockname()[1])

    def start(self, spec: dict[str, Any]) -> int:
        """Starts the rank and returns its pid. Its environment is this machine's, with the variables of the launch."""
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
        """New output of the rank as (stream, bytes), and ("exit", Ending) at the end. Waits until there is any.

        Output that was printed before a message precedes it.
        """
        self._selector.select()
        over = self._ending is not None
        control = self._take_control()
        received = [(name, self._take(name)) for name in ("stdout", "stderr")]
        received.append(("control", control))
        events: list[tuple[str, Any]] = [(name, data) for name, data in received if data]
        if over and not events:
            events.append(("exit", self._ending))
        return events

    def write(self, data: bytes) -> None:
        """Sends data to the rank's control socket. Does nothing if the rank has ended."""
        with suppress(OSError):
            self._control.sendall(data)

    def hang_up(self) -> None:
        """Ends the rank after the notebook has ended."""
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)

    def kill(self, number: int) -> None:
        """Sends a signal to the rank and to all processes that it started."""
        if self._rank is not None:
            self._rank.kill(number)

    def memory_bytes(self) -> int:
        """The rank's resident set in bytes."""
        return self._rank.memory_bytes() if self._rank is not None else 0

    def _on_exit(self, ending: Ending) -> None:
        self._ending = ending
        self._wake.send(b"x")  # never read: later calls of `read` return at once

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
