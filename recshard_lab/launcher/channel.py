"""Messages over an unnamed socket pair: a small pickled header, then payload bytes that only the receiver opens.

No other process can connect to a socket pair. All messages therefore come from the process that was started.
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
from typing import NamedTuple, Protocol
from weakref import WeakSet

__all__ = ["Channel", "FrameReader", "Message", "Outbox", "forget_in_forks", "pipe", "socket_pair"]

MOST_FDS = 4  # that come with one message
_CLOSED = (errno.EPIPE, errno.ECONNRESET, errno.EBADF, errno.EPROTOTYPE)  # the last on macOS, while an end closes
_LENGTHS = struct.Struct("!IQ")  # header bytes, payload bytes


class Message(NamedTuple):
    """One message. kind: its type. cell: the number of its cell or call. payload: bytes of pickle or dill.

    fds: open file descriptors sent with the message. The receiver closes them.
    """

    kind: str
    cell: int = 0
    payload: bytes = b""
    fds: tuple[int, ...] = ()


class FrameReader:
    """Splits a byte stream into messages. The bytes may arrive in chunks of any size."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._fds: list[int] = []

    def feed(self, data: bytes, fds: Sequence[int] = ()) -> list[Message]:
        """The messages that `data` completes. `fds` arrived with it: those of a message arrive with its first byte."""
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
        """Closes the descriptors of an incomplete message."""
        while self._fds:
            os.close(self._fds.pop())


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets with descriptors above 2. A process that closed 0 to 2 may still print to them."""
    first, second = socket.socketpair()
    return socket.socket(fileno=_above_streams(first.detach())), socket.socket(fileno=_above_streams(second.detach()))


def pipe() -> tuple[int, int]:
    """``(read, write)`` descriptors of a pipe, both above 2. Reads do not block."""
    read, write = (_above_streams(fd) for fd in os.pipe())
    os.set_blocking(read, False)
    return read, write


def _above_streams(fd: int) -> int:
    """The same open file as a descriptor above 2. Closes `fd` if it had to be duplicated."""
    if fd > 2:
        return fd
    import fcntl  # not on Windows

    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(fd)


class Channel:
    """One end of a control connection. Any thread may send whole messages; one thread receives.

    The channel belongs to the process that created it. In a fork of that process its descriptor is closed and `send`
    raises OSError: two writers would mix their messages, and an open copy would hide the end of the connection.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._owner = os.getpid()
        forget_in_forks(self)
        self._lock = threading.Lock()
        self._reader = FrameReader()
        self._ready: list[Message] = []

    def send(self, message: Message) -> None:
        """Sends a message. Raises OSError if the other end is closed, or in a fork of the owning process."""
        if os.getpid() != self._owner:
            raise OSError(f"the control channel of process {self._owner} was used by its fork {os.getpid()}")
        start = _start(message)
        with self._lock:
            sent = socket.send_fds(self.sock, [start], message.fds) if message.fds else 0
            self.sock.sendall(start[sent:])
            if message.payload:
                self.sock.sendall(message.payload)

    def receive(self) -> Message:
        """Waits for the next message. Raises EOFError if the other end is closed."""
        while not self._ready:
            self._ready = self.receive_some()
        return self._ready.pop(0)

    def receive_some(self) -> list[Message]:
        """The messages that one read completes, possibly none. Raises EOFError if the other end is closed."""
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
        """Reads exactly one message, because the next bytes may carry file descriptors. Do not mix with `receive`."""
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
    """Queue of messages to a non-blocking socket. Any thread may add one."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._lock = threading.Lock()
        self._parts: deque[tuple[memoryview, list[int]]] = deque()  # bytes, and the descriptors that go with the first

    def put(self, message: Message) -> bool:
        """Queues a message and sends what the socket accepts. Drops it if the other end is closed.

        Returns whether the queue is empty. If not, call `write` when the socket is writable.
        """
        with self._lock:
            self._parts.append((memoryview(_start(message)), [os.dup(fd) for fd in message.fds]))
            if message.payload:
                self._parts.append((memoryview(message.payload), []))
            return self._write()

    def write(self) -> bool:
        """Sends what the socket accepts now. Returns whether the queue is empty."""
        with self._lock:
            return self._write()

    def clear(self) -> None:
        """Drops all unsent messages."""
        with self._lock:
            self._clear()

    def forget_lock(self) -> None:
        """Resets the lock in a forked child, where the thread that held it does not exist."""
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


class Holder(Protocol):
    """Holds descriptors of the parent process. `forget` runs in a forked child and must not send or wait."""

    def forget(self) -> None: ...


_holders: WeakSet[Holder] = WeakSet()


def forget_in_forks(holder: Holder) -> None:
    """Calls ``holder.forget()`` in every process forked from this one while `holder` exists."""
    _holders.add(holder)


def _in_child() -> None:
    for holder in list(_holders):
        holder.forget()
    _holders.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
