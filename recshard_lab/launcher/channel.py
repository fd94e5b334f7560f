"""Frames over an unnamed socket pair: a small header in pickle, a payload of bytes that only its reader opens.

Nobody else can connect to a socket pair, so whatever arrives was written by the process we started.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import threading
import weakref
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Channel", "FrameReader", "Message"]

MOST_FDS = 4  # that come with one message
_LENGTHS = struct.Struct("!IQ")  # header bytes, payload bytes


class Message(NamedTuple):
    """kind: what it is; cell: the number of the cell or call it belongs to; payload: pickled or dilled.

    fds: open files that travel along; who receives them closes them.
    """

    kind: str
    cell: int = 0
    payload: bytes = b""
    fds: tuple[int, ...] = ()


class FrameReader:
    """Cuts a byte stream into messages, however the bytes arrive."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._fds: list[int] = []

    def feed(self, data: bytes, fds: Sequence[int] = ()) -> list[Message]:
        """The messages completed by `data`, with which `fds` came; a message's come with its first byte."""
        self._buffer += data
        self._fds += fds
        messages = []
        while len(self._buffer) >= _LENGTHS.size:
            header, payload = _LENGTHS.unpack_from(self._buffer)
            start, end = _LENGTHS.size + header, _LENGTHS.size + header + payload
            if len(self._buffer) < end:
                break
            kind, cell, count = pickle.loads(self._buffer[_LENGTHS.size : start])
            messages.append(Message(kind, cell, bytes(self._buffer[start:end]), tuple(self._fds[:count])))
            del self._fds[:count]
            del self._buffer[:end]
        return messages


class Channel:
    """One end of a control connection. Sends are whole and from any thread; one thread receives.

    It belongs to the process that made it. A fork of that process loses it: its copy of the descriptor is closed, and
    `send` raises OSError there. Two writers would mix their messages, and an open copy would hide the end of one.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._owner = os.getpid()
        _channels.add(self)
        self._lock = threading.Lock()
        self._reader = FrameReader()
        self._ready: list[Message] = []

    def send(self, message: Message) -> None:
        """Raises OSError when the other end is gone, and in a fork of the process that made the channel."""
        if os.getpid() != self._owner:
            raise OSError(f"the control channel of process {self._owner} was used by its fork {os.getpid()}")
        header = pickle.dumps((message.kind, message.cell, len(message.fds)))
        start = _LENGTHS.pack(len(header), len(message.payload)) + header
        with self._lock:
            sent = socket.send_fds(self.sock, [start], message.fds) if message.fds else 0
            self.sock.sendall(start[sent:])
            if message.payload:
                self.sock.sendall(message.payload)

    def receive(self) -> Message:
        """The next message, waiting for it; EOFError when the other end is gone."""
        while not self._ready:
            self._ready = self.receive_some()
        return self._ready.pop(0)

    def receive_some(self) -> list[Message]:
        """One read's worth of messages, maybe none; EOFError when the other end is gone."""
        try:
            data, fds, _, _ = socket.recv_fds(self.sock, 1 << 20, MOST_FDS)
        except ConnectionResetError:
            data, fds = b"", []
        if not data:
            raise EOFError("the other end of the control channel is closed")
        return self._reader.feed(data, fds)

    def receive_exactly(self) -> Message:
        """The next message and not a byte more: what follows may carry file descriptors. Do not mix with `receive`."""
        header, payload = _LENGTHS.unpack(self._take(_LENGTHS.size))
        kind, cell, _ = pickle.loads(self._take(header))
        return Message(kind, cell, self._take(payload))

    def _take(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self.sock.recv(count - len(data))
            if not more:
                raise EOFError("the other end of the control channel is closed")
            data += more
        return data

    def close(self) -> None:
        self.sock.close()


_channels: weakref.WeakSet[Channel] = weakref.WeakSet()


def _after_fork() -> None:
    for channel in list(_channels):
        channel.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
