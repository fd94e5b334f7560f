"""Options of a server, checked once. Worker processes receive them as JSON."""

from __future__ import annotations

import ipaddress
import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path

TOKEN_VARIABLE = "RECSHARD_SERVE_TOKEN"
"""Environment variable with the bearer token."""

LOADER = "recshard_lab.serving.bundle:load_bundle"


@dataclass(frozen=True)
class ServerConfig:
    """Options of `recshard serve`.

    Args:
        path: a bundle, or a folder of bundles of which the newest by name is served.
        host: address to listen on. Default: loopback, so that only this machine can connect.
        port: port to listen on. 0: a free one.
        workers: number of processes. Each loads the model. A killed one is restarted.
        max_batch: samples that are merged into one call of the model, at most.
        delay_ms: how long the first request of a batch waits for others. 0: it does not wait.
        model_threads: threads of one process that call the model.
        torch_threads: threads of one torch operator.
        queue: requests that wait for the model, at most. More are refused with 503.
        timeout_s: seconds from a whole request to its answer. Later ones are refused with 504.
        read_timeout_s: seconds from the first byte of a request to its last. Later ones are refused with 408.
        max_body_mb: size of one body, in units of 1,000,000 bytes.
        max_buffered_mb: size of all bodies that are held at one time.
        max_samples: samples of one request.
        max_ids: ids of one request, over all features.
        max_connections: open connections of one process.
        drain_s: seconds between SIGTERM and the end of listening. New requests are still answered in that time.
        watch_s: seconds between two looks for a new version. 0: only at ``POST /v1/reload`` or SIGHUP.
        token_file: file that contains the bearer token. Default: the environment variable RECSHARD_SERVE_TOKEN.
        log_level: ``"info"`` logs each request, ``"warning"`` only refusals and errors.
        loader: ``module:function`` that loads a folder. Default: `recshard_lab.serving.bundle.load_bundle`.

    Raises:
        ValueError: an option is outside its range, with its name.

    >>> ServerConfig("model", max_batch=0)
    Traceback (most recent call last):
    ValueError: max_batch=0 is less than 1. Fix: pass max_batch=1 or more.
    >>> ServerConfig.from_json(ServerConfig("model", port=80).as_json()).port
    80
    """

    path: str
    host: str = "127.0.0.1"
    port: int = 8500
    workers: int = 1
    max_batch: int = 256
    delay_ms: float = 0.0
    model_threads: int = 1
    torch_threads: int = 1
    queue: int = 1024
    timeout_s: float = 10.0
    read_timeout_s: float = 10.0
    max_body_mb: float = 8.0
    max_buffered_mb: float = 256.0
    max_samples: int = 4096
    max_ids: int = 1_000_000
    max_connections: int = 1024
    drain_s: float = 0.5
    watch_s: float = 5.0
    token_file: str | None = None
    log_level: str = "info"
    loader: str = LOADER

    def __post_init__(self) -> None:
        least = {"port": 0, "delay_ms": 0, "drain_s": 0, "watch_s": 0}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float):
                bound = least.get(field.name, 1 if isinstance(field.default, int) else 0.001)
                if not value >= bound:
                    raise ValueError(
                        f"{field.name}={value} is less than {bound}. Fix: pass {field.name}={bound} or more."
                    )
        if self.port > 65535:
            raise ValueError(f"port={self.port} is more than 65535. Fix: pass a port from 0 to 65535.")
        if self.max_buffered_mb < self.max_body_mb:
            raise ValueError(
                f"max_buffered_mb={self.max_buffered_mb} is less than max_body_mb={self.max_body_mb}: no body of the "
                f"largest size could be read. Fix: pass max_buffered_mb={self.max_body_mb} or more."
            )
        if self.log_level not in ("info", "warning"):
            raise ValueError(f"log_level={self.log_level!r} is not a level. Fix: pass 'info' or 'warning'.")

    @property
    def max_body_bytes(self) -> int:
        """Size of one body, in bytes."""
        return int(self.max_body_mb * 1e6)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def token(self) -> str | None:
        """The bearer token of `token_file` or the environment; None if there is none.

        Raises:
            ValueError: the token is empty.
        """
        if self.token_file is not None:
            found, source = Path(self.token_file).read_text().strip(), self.token_file
        elif TOKEN_VARIABLE in os.environ:
            found, source = os.environ[TOKEN_VARIABLE].strip(), f"the environment variable {TOKEN_VARIABLE}"
        else:
            return None
        if not found:
            raise ValueError(f"the token of {source} is empty: every request would pass. Fix: write a token there.")
        return found

    def as_json(self) -> str:
        """All options. The token is not among them."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ServerConfig:
        """The options that `as_json` wrote."""
        return cls(**json.loads(text))
