"""The ASGI application: ``POST /v1/predict``, and beside it health, metrics, schema and the page.

`Predict` is written in plain ASGI. Starlette routes the other paths.

Bodies of less than `LARGE` bytes are parsed in the event loop, in less than 1 ms. Larger ones are parsed in a thread,
so that other requests do not wait for them.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import itertools
import os
import re
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from recshard_lab.serving.server import metrics as metrics_of
from recshard_lab.serving.server.batcher import Batcher, Disconnected
from recshard_lab.serving.server.bodies import CONTENT_TYPES, JSON, encode, json_example
from recshard_lab.serving.server.config import ServerConfig
from recshard_lab.serving.server.errors import Refused
from recshard_lab.serving.server.log import Log
from recshard_lab.serving.server.metrics import Metrics
from recshard_lab.serving.server.schema import openapi
from recshard_lab.serving.server.versions import Version, Versions

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

LARGE = 65_536
_PAGE = Path(__file__).with_name("page.html")
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,64}")
_DISCARD_TIMES = 16
"""A body that is too large is read up to this many times the limit, so that its sender reads the refusal."""


@dataclass
class State:
    """What all requests of a process share.

    Args:
        config: options.
        versions: the served model.
        metrics: counters.
        log: log lines.
        batcher: the queue; None until the event loop runs.
        draining: whether the process is about to stop.
        buffered: bytes of all bodies in memory.
        in_group: whether a supervisor runs this process beside others.
    """

    config: ServerConfig
    versions: Versions
    metrics: Metrics
    log: Log
    batcher: Batcher | None = None
    draining: bool = False
    buffered: int = 0
    in_group: bool = False

    def version(self) -> Version:
        """The served version.

        Raises:
            Refused: 503 while it loads.
        """
        if self.versions.current is None:
            raise Refused(503, "loading", "the model loads. Fix: wait for /readyz.", retry_after_s=1)
        return self.versions.current


class RequestIds:
    """Ids of requests that bring none: unique over processes.

    >>> ids = RequestIds()
    >>> ids.next() != ids.next()
    True
    """

    def __init__(self) -> None:
        self._head, self._count = os.urandom(6).hex(), itertools.count()

    def next(self) -> bytes:
        """A new id."""
        return b"%s-%x" % (self._head.encode(), next(self._count))


class Predict:
    """``POST /v1/predict`` in plain ASGI."""

    def __init__(self, state: State, ids: RequestIds) -> None:
        self.state, self._ids = state, ids

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Answers one request."""
        begun = time.perf_counter()
        state = self.state
        headers = dict(scope["headers"])
        request_id = headers.get(b"x-request-id", b"")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = self._ids.next()
        size = samples = 0
        reason: str | None = None
        try:
            if scope["method"] != "POST":
                raise Refused(405, "method_not_allowed", f"{scope['method']} is not supported here. Fix: send POST.")
            content_type = headers.get(b"content-type", b"").decode("latin-1")
            answer_type = _answer_type(headers, content_type)
            timeout_s = _timeout_s(headers, state.config.timeout_s)
            if state.batcher is None:
                raise Refused(503, "loading", "the model loads. Fix: wait for /readyz.", retry_after_s=1)
            version = state.version()
            body = await self._read(headers, receive)
            size = len(body)
            try:
                if size < LARGE:
                    batch = version.decoder.decode(content_type, body)
                else:
                    batch = await asyncio.to_thread(version.decoder.decode, content_type, body)
                del body
                samples = len(batch.dense)
                answer = await state.batcher.predict(version, batch, timeout_s, receive)
                del batch
            finally:
                state.buffered -= size
            content = encode(answer_type, answer)
            status = 200
            extra = [
                (b"content-type", answer_type.encode()),
                (b"x-model-version", version.name.encode("latin-1", "replace")),
            ]
        except Disconnected:
            state.metrics.requests.labels("disconnected").inc()
            if state.log.requests:
                state.log.info("request", id=request_id.decode(), status=None, reason="disconnected")
            return
        except Refused as error:
            status, reason = error.status, error.reason
            content = orjson.dumps(error.body(request_id.decode()))
            extra = [(b"content-type", JSON.encode()), *error.headers()]
            if status == 405:
                extra.append((b"allow", b"POST"))
        except Exception as error:
            state.log.error("model_failed", error, id=request_id.decode())
            failed = Refused(
                500, "model_failed", "the model failed. Fix: look for this request id in the server's log."
            )
            status, reason = 500, failed.reason
            content, extra = orjson.dumps(failed.body(request_id.decode())), [(b"content-type", JSON.encode())]
        extra += [(b"content-length", b"%d" % len(content)), (b"x-request-id", request_id)]
        if state.draining:
            extra.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": status, "headers": extra})
        await send({"type": "http.response.body", "body": content})
        seconds = time.perf_counter() - begun
        state.metrics.requests.labels(str(status)).inc()
        if status == 200:
            state.metrics.request_seconds.observe(seconds)
        if state.log.requests or status >= 500:
            write = state.log.info if status < 500 else state.log.warning
            details = {"id": request_id.decode(), "status": status, "ms": round(1e3 * seconds, 3)}
            write("request", **details, bytes=size, samples=samples, reason=reason)

    async def _read(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        """The body. Its bytes are added to `State.buffered`.

        Raises:
            Refused: 413 or 503 if it is too large, or if all bodies together are.
            Disconnected: the client has gone.
        """
        state, config = self.state, self.state.config
        limit = config.max_body_bytes
        too_large = Refused(
            413,
            "body_too_large",
            f"the body has more than {limit:,} bytes: this is the limit. Fix: send fewer samples a request.",
            close=True,
        )
        declared = int(headers.get(b"content-length", b"0"))
        if declared > limit and (declared > _DISCARD_TIMES * limit or b"expect" in headers):
            raise too_large
        parts, size, held = [], 0, 0
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Disconnected
                part = message.get("body", b"")
                size += len(part)
                if size > _DISCARD_TIMES * limit:
                    raise too_large
                if size <= limit:
                    parts.append(part)
                    held += len(part)
                    state.buffered += len(part)
                    if state.buffered > config.max_buffered_mb * 1e6:
                        sizes = f"{state.buffered / 1e6:,.0f} MB of bodies are in memory: the limit is "
                        sizes += f"{config.max_buffered_mb:,g} MB. Fix: send the request again later."
                        raise Refused(503, "out_of_buffer", sizes, retry_after_s=1, close=True)
                else:
                    parts.clear()
                if not message.get("more_body", False):
                    break
            if size > limit:
                raise too_large
        except BaseException:
            state.buffered -= held
            raise
        return parts[0] if len(parts) == 1 else b"".join(parts)


def _answer_type(headers: dict[bytes, bytes], content_type: str) -> str:
    """The format of the answer: that of ``Accept`` if it names one, else that of the request."""
    encoding = headers.get(b"content-encoding", b"identity").decode("latin-1")
    if encoding != "identity":
        raise Refused(
            415,
            "unsupported_encoding",
            f"the content encoding {encoding[:40]!r} is not supported. Fix: send plain bytes.",
        )
    accept = headers.get(b"accept", b"*/*").decode("latin-1")
    for name in accept.split(","):
        if (kind := CONTENT_TYPES.get(name.partition(";")[0].strip().lower())) is not None:
            return kind
    return CONTENT_TYPES.get(content_type.partition(";")[0].strip().lower(), JSON)


def _timeout_s(headers: dict[bytes, bytes], most_s: float) -> float:
    """Seconds to the deadline: the header ``X-Timeout-Ms``, but not more than the server's."""
    given = headers.get(b"x-timeout-ms")
    if given is None:
        return most_s
    if not given.isdigit() or len(given) > 9 or int(given) == 0:
        shown = given[:40].decode("latin-1")
        message = f"X-Timeout-Ms is {shown!r}. Fix: send whole milliseconds from 1, or leave it out."
        raise Refused(400, "invalid_header", message)
    return min(most_s, int(given) / 1e3)


class App:
    """The whole application. `Predict` comes first; Starlette has the rest.

    Args:
        state: what all requests share.
        token: the bearer token, or None if every client may ask.
    """

    def __init__(self, state: State, token: str | None) -> None:
        self.state, self._ids = state, RequestIds()
        self._token = None if token is None else token.encode()
        self._predict = Predict(state, self._ids)
        self._page = _PAGE.read_bytes()
        self._policy = _content_policy(self._page.decode())
        routes = [
            Route("/", self._get_page),
            Route("/healthz", self._get_health),
            Route("/readyz", self._get_ready),
            Route("/metrics", self._get_metrics),
            Route("/v1/model", self._get_model),
            Route("/v1/reload", self._post_reload, methods=["POST"]),
            Route("/openapi.json", self._get_schema),
        ]
        self._others = Starlette(
            routes=routes, exception_handlers={HTTPException: self._http_error, Exception: self._failed}
        )

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Answers one request."""
        path = scope["path"]
        if self._token is not None and path not in ("/", "/healthz", "/readyz") and not self._is_allowed(scope):
            message = "the bearer token is missing or wrong. Fix: send the header Authorization: Bearer TOKEN."
            await self._json(Refused(401, "unauthorized", message, close=True))(scope, receive, send)
        elif path == "/v1/predict":
            await self._predict(scope, receive, send)
        else:
            await self._others(scope, receive, send)

    def _is_allowed(self, scope: Any) -> bool:
        found = dict(scope["headers"]).get(b"authorization", b"")
        kind, _, token = found.partition(b" ")
        # both are hashed, so that the time does not depend on the token's length either
        given, expected = (hashlib.sha256(each).digest() for each in (token.strip(), self._token or b""))
        return hmac.compare_digest(given, expected) and kind.lower() == b"bearer"

    def _json(self, refused: Refused, is_probe: bool = False) -> Response:
        """The answer of a refusal. Probes are neither counted nor logged."""
        request_id = self._ids.next().decode()
        if not is_probe:
            self.state.metrics.requests.labels(str(refused.status)).inc()
            self.state.log.info("request", id=request_id, status=refused.status, reason=refused.reason)
        headers = {name.decode(): value.decode() for name, value in refused.headers()}
        headers["x-request-id"] = request_id
        if self.state.draining:
            headers["connection"] = "close"
        return Response(orjson.dumps(refused.body(request_id)), refused.status, headers, JSON)

    def _answer(self, content: Any, status: int = 200) -> Response:
        headers = {"cache-control": "no-store"} | ({"connection": "close"} if self.state.draining else {})
        return Response(orjson.dumps(content), status, headers, JSON)

    def _http_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        reasons = {404: "not_found", 405: "method_not_allowed"}
        message = f"{request.method} {request.url.path[:80]}: {error.detail}. Fix: see /openapi.json for the paths."
        found = self._json(Refused(error.status_code, reasons.get(error.status_code, "http_error"), message))
        found.headers.update(error.headers or {})
        return found

    def _failed(self, request: Request, error: Exception) -> Response:
        return self._json(Refused(500, "server_failed", "the server failed. Fix: look at its log."))

    async def _get_page(self, request: Request) -> Response:
        headers = {"content-security-policy": self._policy, "x-content-type-options": "nosniff"}
        headers |= {"referrer-policy": "no-referrer", "cache-control": "no-cache"}
        return Response(self._page, 200, headers, "text/html; charset=utf-8")

    async def _get_health(self, request: Request) -> Response:
        return self._answer({"status": "alive"})

    async def _get_ready(self, request: Request) -> Response:
        if self.state.draining:
            return self._json(
                Refused(503, "draining", "the server stops. Fix: use another one.", retry_after_s=1), True
            )
        try:
            version = self.state.version()
        except Refused as error:
            return self._json(error, True)
        return self._answer({"status": "ready", "version": version.name})

    async def _get_metrics(self, request: Request) -> Response:
        self.state.metrics.buffered.set(self.state.buffered)
        return Response(self.state.metrics.text(), 200, {"cache-control": "no-store"}, metrics_of.CONTENT_TYPE)

    async def _get_model(self, request: Request) -> Response:
        try:
            version = self.state.version()
        except Refused as error:
            return self._json(error)
        config = self.state.config
        return self._answer(
            {
                "version": version.name,
                "inputs": version.model.inputs.to_json(),
                "outputs": list(version.model.outputs),
                "example": json_example(version.model.inputs),
                "limits": {
                    "samples": config.max_samples,
                    "ids": config.max_ids,
                    "body_bytes": config.max_body_bytes,
                    "timeout_s": config.timeout_s,
                },
                "batching": {"max_batch": config.max_batch, "delay_ms": config.delay_ms, "queue": config.queue},
                "workers": config.workers,
                "token": self._token is not None,
            }
        )

    async def _get_schema(self, request: Request) -> Response:
        try:
            version = self.state.version()
        except Refused as error:
            return self._json(error)
        return self._answer(openapi(version.model.inputs, version.model.outputs, version.name, self._token is not None))

    async def _post_reload(self, request: Request) -> Response:
        if self._token is None:
            message = "a server without a bearer token has no reload. Fix: start it with a token, or send SIGHUP."
            return self._json(Refused(401, "token_required", message))
        try:
            refusals = await asyncio.to_thread(self.state.versions.refresh, True)
        except OSError as error:
            refusals = [str(error)]
        if refusals:
            current = self.state.versions.current
            serving = f"{current.name!r} is still served" if current else "no version is served"
            message = f"{'. '.join(refusals)}: {serving}. Fix: write the version again under a new name."
            return self._json(Refused(409, "version_refused", message))
        if self.state.in_group:
            os.kill(os.getppid(), signal.SIGHUP)  # the supervisor forwards it to the other workers
        return self._answer({"version": self.state.version().name})


def _content_policy(page: str) -> str:
    """Content-Security-Policy of the page: its own script and style by their hashes, no other source."""
    from base64 import b64encode

    def hashes(tag: str) -> str:
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digests = (b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in found)
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    return (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; connect-src 'self'; "
        f"img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
    )
