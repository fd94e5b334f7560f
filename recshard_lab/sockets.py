"""The TCP connections of this process, and the end of those whose other host no longer answers."""

from __future__ import annotations

import os
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import psutil

__all__ = [
    "SILENT_S",
    "hosts_in",
    "interface_of",
    "loopback",
    "loopback_interface",
    "plain",
    "route_to",
    "silent_hosts",
    "tcp_sockets",
    "watch_hosts",
]

SILENT_S = 20.0  # without an acknowledgement, until a host counts as lost
_LOOK_S = 1.0
_LAST_ACK = struct.Struct("=8B13I")  # Linux's tcp_info, up to tcpi_last_ack_recv (ms)
_hosts: dict[str, str] = {}  # address -> name
_silent: set[str] = set()


def tcp_sockets() -> Iterator[socket.socket]:
    """A copy of each open TCP socket of this process. A copy is closed when the next one is taken."""
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # closed meanwhile
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as copy:
                    if copy.type == socket.SOCK_STREAM and copy.family in (socket.AF_INET, socket.AF_INET6):
                        yield copy


def loopback(address: str) -> bool:
    """Whether an address is one of this machine's loopback interface.

    >>> loopback("127.0.1.1"), loopback("::1"), loopback("10.0.0.1")
    (True, True, False)
    """
    return address.startswith("127.") or address == "::1"


def loopback_interface() -> str:
    """The name of the loopback interface: ``lo`` on Linux, ``lo0`` on macOS.

    >>> loopback_interface() in ("lo", "lo0")
    True
    """
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "lo")


def route_to(host: str) -> str:
    """The address of this machine from which packets to `host` leave. Sends nothing.

    Raises:
        OSError: `host` has no address, or no route leads there.

    >>> route_to("127.0.0.1")
    '127.0.0.1'
    """
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return plain(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """The network interface that has an address of this machine; empty if none has it."""
    for name, entries in psutil.net_if_addrs().items():
        if any(plain(entry.address) == address for entry in entries):
            return name
    return ""


def watch_hosts(hosts: Mapping[str, str]) -> None:
    """Closes connections to a host that acknowledges nothing for `SILENT_S` seconds, so that waits on them end.

    The kernel of a reachable host acknowledges at once, even if the process there computes, is stopped, or reads
    nothing. Without this, a wait for a host that has lost power or network lasts for 15 minutes, or for ever.
    Linux only: elsewhere nothing is closed.

    Args:
        hosts: address -> what errors call the host there. Replaces the hosts of an earlier call; none ends the watch.
    """
    global _hosts
    running, _hosts = bool(_hosts), dict(hosts)
    if _hosts and not running and sys.platform == "linux":
        threading.Thread(target=_watch, name="recshard-hosts", daemon=True).start()


def hosts_in(text: str) -> list[str]:
    """What errors call the watched hosts whose addresses are in a text of torch, as ``[address]``."""
    return sorted({name for address, name in _hosts.items() if f"[{address}]" in text})


def silent_hosts() -> list[str]:
    """What errors call the hosts to which `watch_hosts` has closed connections."""
    return sorted(_silent & set(_hosts.values()))


def _watch() -> None:
    first_seen: dict[Any, float] = {}  # the two addresses of a connection -> when
    while _hosts:
        time.sleep(_LOOK_S)
        now, seen = time.monotonic(), dict[Any, float]()
        for sock in tcp_sockets():
            with suppress(OSError):  # not connected
                ends = sock.getsockname(), sock.getpeername()
                if name := _hosts.get(plain(ends[1][0])):
                    seen[ends] = first_seen.get(ends, now)
                    # no acknowledgement was requested before the first look, which a stopped process makes late
                    if min(_seconds_silent(sock), now - seen[ends]) > SILENT_S:
                        _silent.add(name)
                        sock.shutdown(socket.SHUT_RDWR)
        first_seen = seen


def _seconds_silent(sock: socket.socket) -> float:
    """Seconds since the last acknowledgement from the other host, which is asked for one every few seconds."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 3), (socket.TCP_KEEPINTVL, 3), (socket.TCP_KEEPCNT, 127)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ACK.size)
    return float(_LAST_ACK.unpack(info)[-1]) / 1e3


def plain(address: str) -> str:
    """An address without its scope, and IPv4 without IPv6's prefix."""
    return address.partition("%")[0].removeprefix("::ffff:")
