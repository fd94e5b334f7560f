"""Connections to hosts that no longer answer."""

import socket
import threading

import pytest

from recshard_lab import sockets
from tests.patience import scaled


@pytest.mark.parametrize("answers", [True, False])
def test_a_connection_is_judged_only_after_an_acknowledgement_was_requested(
    answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was stopped before the first look finds its connections silent, whatever the host does."""
    looks: list[object] = []
    enough = threading.Event()

    def seconds_silent(sock: socket.socket) -> float:
        looks.append(sock.getpeername())
        if len(looks) == 20:
            enough.set()
        return 0.0 if answers and looks.count(sock.getpeername()) > 1 else 25.0

    monkeypatch.setattr(sockets, "_LOOK_S", 0.05)
    monkeypatch.setattr(sockets, "SILENT_S", 0.06)
    monkeypatch.setattr(sockets, "_seconds_silent", seconds_silent)
    monkeypatch.setattr(sockets, "_silent", set())
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as ours,
        server.accept()[0] as theirs,
    ):
        theirs.settimeout(scaled(10))
        try:
            sockets.watch_hosts({"127.0.0.1": "the other host"})
            if answers:
                assert enough.wait(scaled(10))
                ours.sendall(b"x")
            assert theirs.recv(1) == (b"x" if answers else b"")
            assert sockets.silent_hosts() == ([] if answers else ["the other host"])
        finally:
            sockets.watch_hosts({})
