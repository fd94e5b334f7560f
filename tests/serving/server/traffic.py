"""Sockets for tests: raw requests, and clients that send until they are told to stop and check every answer."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import Counter
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from tests.grid import NIGHT
from tests.patience import scaled
from tests.serving.server.stub import request

ROUNDS = 10 if NIGHT else 1
"""Rounds of the tests that torture a server: the gate runs one of each."""


def connect(address: str, timeout_s: float = 10) -> socket.socket:
    parts = urlsplit(address)
    return socket.create_connection((parts.hostname, parts.port), timeout_s)


def raw(address: str, content: bytes, timeout_s: float = 10) -> tuple[int, dict[str, str], bytes]:
    """Sends bytes and reads one answer: status (0: the connection ended without one), headers, body."""
    with connect(address, timeout_s) as sock:
        with suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(content)
        return read_answer(sock)


def read_answer(sock: socket.socket) -> tuple[int, dict[str, str], bytes]:
    data = b""
    while b"\r\n\r\n" not in data:
        try:
            part = sock.recv(65536)
        except ConnectionResetError:
            part = b""
        if not part:
            return 0, {}, data
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    while len(body) < int(headers.get("content-length", 0)):
        if not (part := sock.recv(65536)):
            break
        body += part
    return int(lines[0].split()[1]), headers, body


def post(body: bytes, content_type: str = "application/json", *more: str, path: str = "/v1/predict") -> bytes:
    """The bytes of a request."""
    lines = [f"POST {path} HTTP/1.1", "Host: test", f"Content-Length: {len(body)}"]
    if content_type:
        lines.append(f"Content-Type: {content_type}")
    return "\r\n".join([*lines, *more, "", ""]).encode() + body


class Traffic:
    """Clients on connections that are kept open. Each checks its answers against the scales of the versions.

    Args:
        address: of the server.
        clients: connections at a time.
        scales: version -> the factor of its answers.

    Attributes:
        statuses: answers by status.
        versions: answers 200 by version.
        wrong: answers that no version computes.
        lost: requests without an answer on a connection that had answered before or was accepted.
        refused: connections that were not accepted.
    """

    def __init__(self, address: str, clients: int, scales: dict[str, float]) -> None:
        parts = urlsplit(address)
        self._host, self._port, self._clients, self._scales = parts.hostname, parts.port, clients, scales
        self.statuses: Counter[int] = Counter()
        self.versions: Counter[str] = Counter()
        self.wrong: list[Any] = []
        self.lost = self.refused = 0
        self._stop = False

    async def __aenter__(self) -> Traffic:
        self._tasks = [asyncio.create_task(self._client(number)) for number in range(self._clients)]
        return self

    async def __aexit__(self, *error: object) -> None:
        self._stop = True
        await asyncio.wait_for(asyncio.gather(*self._tasks), scaled(30))

    async def answered(self, more: int) -> None:
        """Waits for so many further answers."""
        goal = self.statuses.total() + more
        async with asyncio.timeout(scaled(60)):
            while self.statuses.total() < goal:
                await asyncio.sleep(0.01)

    async def version(self, name: str) -> None:
        """Waits for an answer of a version."""
        async with asyncio.timeout(scaled(60)):
            while not self.versions[name]:
                await asyncio.sleep(0.01)

    async def _client(self, number: int) -> None:
        ids = 0
        while not self._stop:
            try:
                reader, writer = await asyncio.open_connection(self._host, self._port)
            except OSError:
                self.refused += 1
                await asyncio.sleep(0.05)
                continue
            try:
                while not self._stop:
                    ids += 1
                    movie, user = 100 + ids % 200, 1000 + number
                    writer.write(post(json.dumps(request(movie, user)).encode()))
                    head = await reader.readuntil(b"\r\n\r\n")
                    headers = {
                        name.lower(): value.strip()
                        for name, _, value in (line.partition(":") for line in head.decode().split("\r\n")[1:])
                    }
                    body = json.loads(await reader.readexactly(int(headers["content-length"])))
                    status = int(head.split()[1])
                    self.statuses[status] += 1
                    if status == 200:
                        version = headers["x-model-version"]
                        self.versions[version] += 1
                        if body != {"probability": [self._scales[version] * (movie + user)]}:
                            self.wrong.append((version, movie, user, body))
                    if headers.get("connection") == "close":
                        break
            except (asyncio.IncompleteReadError, ConnectionError):
                self.lost += 1
            finally:
                writer.close()
