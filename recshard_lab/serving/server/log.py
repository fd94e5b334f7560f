"""Log lines: one JSON object each, on stderr. Bodies, tokens and ids of users are never in them."""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from contextlib import suppress
from typing import Any

import orjson


class Log:
    """Writes JSON lines.

    Args:
        level: ``"info"`` or ``"warning"``.

    >>> Log("info").line("info", "ready", version="v1").partition(b'"event"')[2]
    b':"ready","version":"v1"}\\n'
    """

    def __init__(self, level: str) -> None:
        self.requests = level == "info"
        self._pid = os.getpid()

    def line(self, level: str, event: str, **details: Any) -> bytes:
        """One line: time (seconds since 1970), level, process, event, details."""
        head = {"time": round(time.time(), 6), "level": level, "pid": self._pid, "event": event}
        return orjson.dumps(head | details, default=str, option=orjson.OPT_APPEND_NEWLINE)

    def _write(self, line: bytes) -> None:
        with suppress(OSError):  # if no process reads the log any more, requests go on
            os.write(sys.stderr.fileno(), line)

    def info(self, event: str, **details: Any) -> None:
        """Logs an event, at level info."""
        if self.requests:
            self._write(self.line("info", event, **details))

    def warning(self, event: str, **details: Any) -> None:
        """Logs something that a person should look at."""
        self._write(self.line("warning", event, **details))

    def error(self, event: str, error: BaseException, **details: Any) -> None:
        """Logs an exception with its traceback."""
        trace = "".join(traceback.format_exception(error))
        self._write(self.line("error", event, error=f"{type(error).__name__}: {error}", traceback=trace, **details))


class Forward(logging.Handler):
    """Passes warnings of other packages, such as uvicorn, to a `Log`."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """Logs one record as a line."""
        details: dict[str, Any] = {"logger": record.name, "message": record.getMessage()}
        if record.exc_info and record.exc_info[1] is not None:
            self._log.error("library", record.exc_info[1], **details)
        else:
            self._log.warning("library", **details)
