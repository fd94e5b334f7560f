"""Frames over an unnamed socket pair: a small header in pickle, a payload of bytes that only its reader opens.

No other process can connect to a socket pair, so all that arrives was written by the process that we started.
"""

from __future__ import annotations

import errno
import os
import pickle
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from .forks import forget_in_forks

__all__ = ["Channel", "FrameReader", "Message", "Outbox", "pipe", "socket_pair"]

MOST_FDS = 4  # that come with one message
_CLOSED = (errno.EPIPE, errno.ECONNRESET, errno.EBADF)  # by the other end, or by us
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

    def close(self) -> None:
        """Closes the descriptors of a message whose end never came."""
        while self._fds:
            os.close(self._fds.pop())


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets, never numbered 0 to 2: a process that closed those still prints to the numbers."""
    first, second = socket.socketpair()
    return socket.socket(fileno=_above_streams(first.detach())), socket.socket(fileno=_above_streams(second.detach()))


def pipe() -> tuple[int, int]:
    """``(read, write)`` of a pipe, never numbered 0 to 2. Reading does not wait."""
    read, write = (_above_streams(fd) for fd in os.pipe())
    os.set_blocking(read, False)
    return read, write


def _above_streams(fd: int) -> int:
    """The same open file under a number above 2; closes `fd` if that is another one."""
    if fd > 2:
        return fd
    import fcntl  # not on Windows

    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(fd)


class Channel:
    """One end of a control connection. Sends are whole and from any thread; one thread receives.

    It belongs to the process that made it. A fork of that process loses it: its copy of the descriptor is closed, and
    `send` raises OSError there. Two writers would mix their messages, and an open copy would hide the end of one.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._owner = os.getpid()
        forget_in_forks(self)
        self._lock = threading.Lock()
        self._reader = FrameReader()
        self._ready: list[Message] = []

    def send(self, message: Message) -> None:
        """Raises OSError when the other end is gone, and in a fork of the process that made the channel."""
        if os.getpid() != self._owner:
            raise OSError(f"the control channel of process {self._owner} was used by its fork {os.getpid()}")
        start = _start(message)
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
        except BlockingIOError:
            return []
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
        self._reader.close()

    forget = close  # in forks


class Outbox:
    """Messages on their way through a socket that never waits. Any thread may put one."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._lock = threading.Lock()
        self._parts: deque[tuple[memoryview, list[int]]] = deque()  # bytes, and the descriptors that go with the first

    def put(self, message: Message) -> bool:
        """Sends a message after those put before it, or drops it if the other end is closed.

        Returns whether all of it is sent. If not, call `write` when the socket can be written.
        """
        with self._lock:
            self._parts.append((memoryview(_start(message)), [os.dup(fd) for fd in message.fds]))
            if message.payload:
                self._parts.append((memoryview(message.payload), []))
            return self._write()

    def write(self) -> bool:
        """Sends what the socket takes now. Returns whether all is sent."""
        with self._lock:
            return self._write()

    def clear(self) -> None:
        """Drops what is not sent."""
        with self._lock:
            self._clear()

    def forget_lock(self) -> None:
        """In a forked child: the thread that held the lock is not there."""
        self._lock = threading.Lock()

    def _write(self) -> bool:
        while self._parts:
            data, fds = self._parts[0]
            try:
                sent = socket.send_fds(self._sock, [data], fds) if fds else self._sock.send(data)
            except BlockingIOError:
                return False
            except OSError as error:
                if error.errno not in _CLOSED:
                    raise
                self._clear()
                return True
            while fds:
                os.close(fds.pop())
            if sent < len(data):
                self._parts[0] = data[sent:], fds
            else:
                self._parts.popleft()
        return True

    def _clear(self) -> None:
        while self._parts:
            for fd in self._parts.popleft()[1]:
                os.close(fd)


def _start(message: Message) -> bytes:
    """The bytes of a message before its payload."""
    header = pickle.dumps((message.kind, message.cell, len(message.fds)))
    return _LENGTHS.pack(len(header), len(message.payload)) + header
