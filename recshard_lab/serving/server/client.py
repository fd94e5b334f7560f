"""A client of a server: one connection that is kept open, JSON or tensors."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from safetensors.torch import load, save
from torch import Tensor

from recshard_lab.serving.bundle import Batch

_JSON, _BINARY = "application/json", "application/x-safetensors"


class ServeError(RuntimeError):
    """A request that the server refused.

    Args:
        status: HTTP status.
        content: the ``error`` object of the answer.
        retry_after_s: seconds after which the server may accept it; None if the server does not say.
    """

    def __init__(self, status: int, content: Mapping[str, Any], retry_after_s: int | None = None) -> None:
        super().__init__(f"{status}: {content.get('message', 'no message')}")
        self.status, self.retry_after_s = status, retry_after_s
        self.reason: str | None = content.get("reason")
        self.field: str | None = content.get("field")
        self.position: int | None = content.get("position")
        self.request_id: str | None = content.get("request_id")


class Client:
    """Requests to one server. A thread needs a separate client.

    Args:
        address: ``http://host:port``.
        token: bearer token, if the server has one.
        timeout_s: seconds that an answer may take.

    Raises (all methods):
        ServeError: the server refused the request.
        OSError: no connection, or it ended.
    """

    def __init__(self, address: str, token: str | None = None, timeout_s: float = 30.0) -> None:
        parts = urlsplit(address)
        if parts.scheme != "http" or parts.hostname is None:
            raise ValueError(f"address {address!r} is not http://host:port. Fix: pass the address of the server.")
        self.address = address
        self._connection = http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=timeout_s)
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_connection"):
            self.close()

    def close(self) -> None:
        """Closes the connection. The next request opens another."""
        self._connection.close()

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> bytes:
        """The body of one answer."""
        reused = self._connection.sock is not None
        try:
            answer = self._exchange(method, path, body, headers)
        except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
            self._connection.close()
            if not reused:
                raise
            answer = self._exchange(method, path, body, headers)  # an idle connection may have been closed
        content = answer.read()
        if answer.status >= 400:
            try:
                error = json.loads(content)["error"]
            except (ValueError, KeyError, TypeError):
                error = {"message": content[:200].decode("utf-8", "replace")}
            retry = answer.headers.get("Retry-After")
            raise ServeError(answer.status, error, None if retry is None else int(retry))
        return content

    def _exchange(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str] | None
    ) -> http.client.HTTPResponse:
        try:
            self._connection.request(method, path, body, {**self._headers, **(headers or {})})
            return self._connection.getresponse()
        except BaseException:
            self._connection.close()
            raise

    def _get(self, path: str) -> Any:
        return json.loads(self.request("GET", path))

    def predict(
        self,
        dense: Mapping[str, Sequence[float]] | None = None,
        sparse: Mapping[str, Sequence[Sequence[int]]] | None = None,
        weights: Mapping[str, Sequence[Sequence[float]]] | None = None,
    ) -> dict[str, Any]:
        """Outputs of B samples, as JSON.

        Args:
            dense: column -> B numbers.
            sparse: feature -> B lists of ids.
            weights: weighted feature -> B lists of weights.

        Returns:
            Output -> list of B values. NaN and infinity are None; `predict_batch` returns them unchanged.
        """
        parts = {"dense": dense, "sparse": sparse, "weights": weights}
        body = json.dumps({name: part for name, part in parts.items() if part is not None}).encode()
        found: dict[str, Any] = json.loads(self.request("POST", "/v1/predict", body, {"Content-Type": _JSON}))
        return found

    def predict_batch(self, batch: Batch) -> dict[str, Tensor]:
        """Outputs of B samples, as tensors ``[B]`` or ``[B, ...]``; the request is binary."""
        tensors = {"dense": batch.dense, "values": batch.values, "lengths": batch.lengths}
        if batch.weights is not None:
            tensors["weights"] = batch.weights
        body = save({name: tensor.contiguous() for name, tensor in tensors.items()})
        return load(self.request("POST", "/v1/predict", body, {"Content-Type": _BINARY}))

    def model(self) -> dict[str, Any]:
        """What the model expects, with an example: ``GET /v1/model``."""
        found: dict[str, Any] = self._get("/v1/model")
        return found

    def metrics(self) -> dict[str, float]:
        """Counters, gauges and histograms: name with labels -> value."""
        lines = self.request("GET", "/metrics").decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def is_ready(self) -> bool:
        """Whether the server answers requests now. False where it loads, stops, or cannot be reached."""
        try:
            self.request("GET", "/readyz")
        except (OSError, ServeError, http.client.HTTPException):
            return False
        return True

    def reload(self) -> str:
        """Serves the newest version now. Returns its name. The server must have a token."""
        found: str = json.loads(self.request("POST", "/v1/reload"))["version"]
        return found
