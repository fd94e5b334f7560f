"""Torture: what clients do wrong leaves nothing behind, and every request is answered or refused with a status.

By day one round of it runs, at night `ROUNDS`.
"""

import asyncio
import json
import os
import signal
import struct
import threading
from pathlib import Path
from socket import SO_LINGER, SOL_SOCKET

import psutil
import pytest

from recshard_lab.serving.server import Server, serve
from tests.grid import NIGHT
from tests.patience import wait_until
from tests.serving.server.stub import LOADER, request, write
from tests.serving.server.traffic import ROUNDS, Traffic, connect, post, raw

DISCONNECTS = 1000
GOOD = json.dumps(request()).encode()


def held(server: Server) -> tuple[int, int]:
    """File descriptors and threads of the process."""
    process = psutil.Process(server.pid)
    return process.num_fds(), process.num_threads()


def abrupt(server: Server, content: bytes) -> None:
    """Sends bytes and resets the connection."""
    with connect(server.address) as sock:
        sock.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
        sock.sendall(content)


def is_empty(server: Server) -> bool:
    with server.client() as client:
        metrics = client.metrics()
    return (
        metrics["recshard_queue_requests"],
        metrics["recshard_buffered_bytes"],
        metrics["recshard_connections"],
    ) == (0, 0, 1)


@pytest.mark.nightly
@pytest.mark.timeout(900 if NIGHT else 120)
def test_bad_clients_leave_nothing_behind(tmp_path: Path) -> None:
    write(tmp_path, "v1", sleep_s=0.002)
    bad = [post(GOOD), post(GOOD)[:-9], post(GOOD)[:30], b"", b"\x00\xff" * 50, post(b"[" * 4000), post(GOOD * 40)[:-1]]

    def attack() -> None:
        for number in range(DISCONNECTS):
            abrupt(server, bad[number % len(bad)])
        for content in (post(b"{" * 3000), post(b" " * 60_000), post(GOOD, "text/plain"), b"nonsense\r\n\r\n"):
            for _ in range(10):
                assert raw(server.address, content)[0] in (400, 413, 415)
        slow = [connect(server.address) for _ in range(100)]  # slowloris
        for sock in slow:
            sock.sendall(b"POST /v1/predict HTTP/1.1\r\nX-Slow: ")
        for sock in slow:
            assert b" 408 " in sock.recv(65536)
            sock.close()

    options = {"read_timeout_s": 1.0, "max_body_mb": 0.05, "watch_s": 0, "log_level": "warning"}
    with serve(tmp_path, loader=LOADER, **options) as server:  # type: ignore[arg-type]
        attack()  # buffers and threads that stay are there after the first round
        wait_until(lambda: is_empty(server))
        before, memory = held(server), psutil.Process(server.pid).memory_info().rss
        for _ in range(ROUNDS):
            attack()
        wait_until(lambda: is_empty(server))
        wait_until(lambda: held(server) <= before)
        grown = psutil.Process(server.pid).memory_info().rss - memory
        print(
            f"{ROUNDS * DISCONNECTS} disconnects: {held(server)} fds and threads, {before} before, {grown:,} bytes more"
        )
        assert grown < 30e6
        with server.client() as client:
            assert client.predict(**request()) == {"probability": [12.0]}


def test_sigterm_under_load_answers_every_accepted_request(tmp_path: Path) -> None:
    write(tmp_path, "v1", sleep_s=0.005)

    async def test(server: Server) -> Traffic:
        async with Traffic(server.address, 16, {"v1": 1.0}) as traffic:
            await traffic.answered(200)
            os.kill(server.pid, signal.SIGTERM)
            await asyncio.to_thread(wait_until, lambda: not server.is_running())
        return traffic

    with serve(tmp_path, loader=LOADER, watch_s=0, drain_s=0.5) as server:
        traffic = asyncio.run(test(server))
        lines = [json.loads(line) for line in server.log_path.read_text().splitlines()]
        assert server.stop() == 0
    assert set(traffic.statuses) == {200}
    assert traffic.wrong == []
    answered = sum(line["event"] == "request" and line["status"] == 200 for line in lines)
    assert answered == traffic.statuses[200]  # what the server took, its clients got
    assert any(line["event"] == "draining" for line in lines)


def test_clients_that_disconnect_in_the_queue_are_never_computed(tmp_path: Path) -> None:
    write(tmp_path, "v1", sleep_s=0.5)
    with serve(tmp_path, loader=LOADER, max_batch=1, watch_s=0, drain_s=0) as server:
        first = threading.Thread(target=raw, args=(server.address, post(GOOD)))
        first.start()
        sockets = [connect(server.address) for _ in range(20)]
        for sock in sockets:
            sock.sendall(post(GOOD))
        with server.client() as client:
            wait_until(lambda: client.metrics()["recshard_queue_requests"] >= 18)
            for sock in sockets:
                sock.close()
            wait_until(lambda: client.metrics()["recshard_queue_requests"] == 0)
            assert client.metrics()['recshard_dropped_total{reason="disconnected"}'] >= 18
        first.join()
