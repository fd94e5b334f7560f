"""HTTP connections of uvicorn, with bounds on slow, large and many requests.

uvicorn has no time limit for the head or the body of a request, and httptools has no size limit for the head.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from recshard_lab.serving.server.errors import Refused

MAX_HEAD_BYTES = 65_536
"""Request line and headers of one request."""

_PHRASES = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large"}
_PHRASES[503] = b"Service Unavailable"


@dataclass
class Limits:
    """Bounds of all connections of a process.

    Args:
        read_timeout_s: seconds from the first byte of a request to its last.
        max_connections: open connections.
        refused: called with each request that is refused here.
        opened: called with the number of open connections when it changes.
    """

    read_timeout_s: float
    max_connections: int
    refused: Callable[[Refused], None]
    opened: Callable[[int], None]
    sockets: set[Any] = field(default_factory=set)


class Connection(HttpToolsProtocol):
    """One connection. `connection_class` sets its limits."""

    limits: Limits

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer: asyncio.TimerHandle | None = None
        self._head, self._whole, self._head_bytes = True, False, 0
        self._refused = False
        self.limits.sockets.add(self)
        self.limits.opened(len(self.limits.sockets))
        if len(self.limits.sockets) > self.limits.max_connections:
            message = (
                f"{self.limits.max_connections:,} connections are open: this is the limit. Fix: close idle "
                f"connections, or try again later."
            )
            self._refuse(Refused(503, "too_many_connections", message, retry_after_s=1))
        else:
            self._arm()  # a connection without a request is slow, too

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self.limits.sockets.discard(self)
        self.limits.opened(len(self.limits.sockets))
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        if self._head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                message = f"the headers have more than {MAX_HEAD_BYTES:,} bytes. Fix: send fewer headers."
                self._refuse(Refused(431, "headers_too_large", message))
                return
        if self._whole:
            self._disarm()
        elif self._timer is None:
            self._arm()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head, self._whole, self._head_bytes = True, False, 0

    def on_headers_complete(self) -> None:
        self._head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._whole = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._whole and not self.pipeline:
            self._head, self._whole, self._head_bytes = True, True, 0  # idle: the keep-alive timer of uvicorn runs

    def send_400_response(self, msg: str) -> None:
        self._refuse(Refused(400, "malformed_http", f"{msg} Fix: send HTTP/1.1."))

    def _arm(self) -> None:
        self._timer = self.loop.call_later(self.limits.read_timeout_s, self._too_slow)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        if self.flow.read_paused and self.pipeline:  # its turn has not come
            self._arm()
            return
        seconds = self.limits.read_timeout_s
        message = f"the request is not complete after {seconds:g} s. Fix: send it faster, or start with a larger limit."
        self._refuse(Refused(408, "slow_request", message))

    def _refuse(self, refused: Refused) -> None:
        """Answers without the application, where no other answer is on its way, and closes the connection."""
        self._refused = True
        self._disarm()
        self.limits.refused(refused)
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = orjson.dumps(refused.body(None))
            head = [b"HTTP/1.1 %d %s" % (refused.status, _PHRASES[refused.status])]
            head += [name + b": " + value for name, value in refused.headers()]
            head += [b"content-type: application/json", b"content-length: %d" % len(body), b"connection: close"]
            self.transport.write(b"\r\n".join([*head, b"", body]))
        self.transport.close()


def connection_class(limits: Limits) -> type[Connection]:
    """`Connection` with its limits, for ``uvicorn.Config(http=...)``."""
    return type("LimitedConnection", (Connection,), {"limits": limits})
