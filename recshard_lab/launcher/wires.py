"""The kernel's side of a world of ranks: start them, write to them, and hear everything they say on one thread."""

from __future__ import annotations

import codecs
import os
import pickle
import queue
import selectors
import signal
import socket
import sys
import threading
from collections import deque
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from .channel import Channel, Message
from .collectives import RING
from .engines import Ending, Engine, RankProcess
from .shape import Shape

__all__ = ["Event", "Wires"]

LAST_LINES = 2000  # characters of a rank's output kept, to be shown if it dies


class Event(NamedTuple):
    """kind: ``stdout``, ``stderr`` (data: text), ``died`` (data: its Ending), or a Message's kind."""

    rank: int
    kind: str
    cell: int
    data: Any


class Wires:
    """One world's processes, control channels and output pipes."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.shape = engine, engine.shape
        shape = self.shape
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.pressed: deque[int] = deque()  # the cells that the reader wants to end
        self.last_output = [deque[str](maxlen=64) for _ in range(shape.world_size)]
        self.dead: dict[int, Ending] = {}
        self.channels: list[Channel] = []
        self.attached: dict[tuple[int, int], int] = {}  # (rank, cell) -> shared memory that came with the answer
        self.board: list[dict[str, bytes]] = [{} for _ in range(shape.world_size)]  # what ranks put up (`board.post`)
        self._pipes: dict[tuple[int, str], int] = {}
        self._decoders: dict[tuple[int, str], codecs.IncrementalDecoder] = {}
        self._gone = [threading.Event() for _ in range(shape.world_size)]
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._wake = socket.socketpair()
        self._wakeup.setblocking(False)
        self._selector.register(self._wakeup, selectors.EVENT_READ, None)
        store = engine.store(0)
        self.processes = [self._start(rank, store) for rank in range(shape.world_size)]
        self._thread = threading.Thread(target=self._listen, name="recshard-ranks", daemon=True)
        self._thread.start()
        self.pids = [process.pid for process in self.processes]

    def _start(self, rank: int, store: str) -> RankProcess:
        ours, theirs = socket.socketpair()
        fds = [theirs.fileno()]
        for stream in ("stdout", "stderr"):
            read, write = os.pipe()
            os.set_blocking(read, False)
            self._pipes[rank, stream] = read
            self._decoders[rank, stream] = codecs.getincrementaldecoder("utf-8")(errors="replace")
            self._selector.register(read, selectors.EVENT_READ, (rank, stream))
            fds.append(write)
        self.channels.append(Channel(ours))
        self._selector.register(ours, selectors.EVENT_READ, (rank, "control"))
        try:
            return self.engine.start(rank, rank_spec(self.shape, rank, store), fds, partial(self._on_exit, rank))
        finally:
            theirs.close()
            for fd in fds[1:]:
                os.close(fd)

    def send(self, rank: int, kind: str, cell: int = 0, payload: bytes = b"", fds: tuple[int, ...] = ()) -> None:
        """To a rank that is gone, nothing happens: its death is an event of its own."""
        with suppress(OSError):
            self.channels[rank].send(Message(kind, cell, payload, fds))

    def alive(self) -> list[int]:
        """The ranks whose process has not ended."""
        return [rank for rank in range(self.shape.world_size) if rank not in self.dead]

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Signals a rank and what it started."""
        if rank not in self.dead:
            self.processes[rank].kill(number)

    def stop(self, patience_s: float) -> None:
        """Asks every rank to leave, kills those that have not after `patience_s`, and lets go of everything."""
        for rank in self.alive():
            self.send(rank, "stop")
        for rank, gone in enumerate(self._gone):
            if not gone.wait(patience_s):
                patience_s = 0
                self.kill(rank)
        for gone in self._gone:
            gone.wait(10)
        self._wake.send(b"x")
        self._thread.join(10)
        self.close()

    def close(self) -> None:
        """Closes every descriptor; ranks still alive notice and end."""
        self._selector.close()
        for channel in self.channels:
            channel.close()
        for fd in self._pipes.values():
            os.close(fd)
        self._pipes.clear()
        self.drop_attached()
        self._wakeup.close()
        self._wake.close()

    def drop_attached(self) -> None:
        """Closes shared memory of answers that nobody asked for any more."""
        while self.attached:
            os.close(self.attached.popitem()[1])

    # -- the listening thread ----------------------------------------------------------------------

    def _on_exit(self, rank: int, ending: Ending) -> None:
        self._gone[rank].set()
        self.dead[rank] = ending
        with suppress(OSError):  # closed already
            self._wake.send(bytes([1, rank]))  # reported by the listening thread, after the rank's last words

    def _listen(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    word = self._wakeup.recv(1)
                    if word == b"x":
                        return
                    self._bury(self._wakeup.recv(1)[0])
                else:
                    rank, stream = key.data
                    if stream == "control":
                        self._hear(rank)
                    else:
                        self._drain(rank, stream)

    def _hear(self, rank: int) -> None:
        try:
            messages = self.channels[rank].receive_some()
        except (EOFError, OSError):
            self._selector.unregister(self.channels[rank].sock)
            return
        for message in messages:
            if message.kind == "post":
                name, value = opened(message.payload)
                self.board[rank][name] = value
                continue
            if message.kind in ("done", "display"):  # what was printed before comes before
                self._drain(rank, "stdout")
                self._drain(rank, "stderr")
            if message.fds:
                self.attached[rank, message.cell] = message.fds[0]
            self.events.put(Event(rank, message.kind, message.cell, message.payload))
            if message.kind == "display":
                self.send(rank, "shown")

    def _drain(self, rank: int, stream: str) -> None:
        fd = self._pipes[rank, stream]
        parts = []
        while True:
            try:
                data = os.read(fd, 1 << 16)
            except BlockingIOError:
                break
            if not data:
                if fd in self._selector.get_map():
                    self._selector.unregister(fd)
                break
            parts.append(data)
            if len(parts) >= 64:  # a rank that floods must not keep the others unheard
                break
        if parts:
            text = self._decoders[rank, stream].decode(b"".join(parts))
            self.last_output[rank].append(text[-LAST_LINES:])
            self.events.put(Event(rank, stream, 0, text))

    def _bury(self, rank: int) -> None:
        self._drain(rank, "stdout")
        self._drain(rank, "stderr")
        self.events.put(Event(rank, "died", 0, self.dead[rank]))


def rank_spec(shape: Shape, rank: int, store: str) -> dict[str, Any]:
    """What a fresh process needs to become this rank; the kernel's surroundings, and torchrun's variables."""
    loopback = "lo" if sys.platform == "linux" else "lo0"
    local = shape.local_world_size
    variables = {
        "TORCH_FR_BUFFER_SIZE": os.environ.get("TORCH_FR_BUFFER_SIZE", RING),
        "RANK": str(rank),
        "WORLD_SIZE": str(shape.world_size),
        "LOCAL_RANK": str(rank % local),
        "LOCAL_WORLD_SIZE": str(local),
        "GROUP_RANK": str(rank // local),
        "NODE_RANK": str(rank // local),
        "GROUP_WORLD_SIZE": str(shape.nodes),
        "OMP_NUM_THREADS": str(shape.threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
        **shape.variables(),
    }
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RECSHARD_INTER_NODE_")}
    return {
        "rank": rank,
        "world_size": shape.world_size,
        "backend": shape.backend,
        "threads": shape.threads,
        "gpu": rank % (shape.world_size // shape.hosts),  # virtual nodes share a machine's GPUs out among them
        "store": store,
        "environment": {**inherited, **variables},
        "variables": variables,
        "path": list(sys.path),
        "folder": os.getcwd(),
    }


def exit_text(ending: Ending) -> tuple[str, str]:
    """How a process ended, as (short name, sentence).

    >>> exit_text(-9), exit_text(3)
    (('SIGKILL', 'was killed by SIGKILL'), ('exit', 'exited with code 3'))
    """
    if isinstance(ending, str):
        return "gone", ending
    if ending < 0:
        name = signal.Signals(-ending).name
        return name, f"was killed by {name}"
    return "exit", f"exited with code {ending}"


def opened(data: bytes) -> Any:
    """A plain payload, opened."""
    return pickle.loads(data)
