"""Log lines: one JSON object each, on stderr. Bodies, tokens and ids of users are never in them.

Logging never blocks a request. If stderr is a pipe whose reader is slow, lines wait in a buffer of `BUFFER` bytes.
Lines that do not fit are dropped. The event ``lines_dropped`` reports their number as soon as the reader goes on. If
the reader has ended, all lines are dropped.
"""

from __future__ import annotations

import logging
import os
import select
import sys
import threading
import time
import traceback
from typing import Any

import orjson

BUFFER = 1_000_000


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
        self._lock, self._waiting, self._dropped = threading.Lock(), bytearray(), 0

    def line(self, level: str, event: str, **details: Any) -> bytes:
        """One line: time (seconds since 1970), level, process, event, details."""
        head = {"time": round(time.time(), 6), "level": level, "pid": self._pid, "event": event}
        return orjson.dumps(head | details, default=str, option=orjson.OPT_APPEND_NEWLINE)

    def _write(self, line: bytes) -> None:
        with self._lock:
            if self._waiting:
                self._flush()
            if self._dropped and not self._waiting:
                self._waiting += self.line("warning", "lines_dropped", lines=self._dropped)
                self._dropped = 0
            if len(self._waiting) + len(line) > BUFFER:
                self._dropped += 1
                return
            self._waiting += line
            self._flush()

    def _flush(self, patience_ms: int = 0) -> None:
        """Writes what stderr takes without blocking: `select.PIPE_BUF` bytes whenever it is ready."""
        ready = select.poll()
        try:
            ready.register(sys.stderr.fileno(), select.POLLOUT)
            while self._waiting and ready.poll(patience_ms):
                del self._waiting[: os.write(sys.stderr.fileno(), self._waiting[: select.PIPE_BUF])]
        except OSError:  # no process reads the log any more
            self._waiting.clear()

    def close(self) -> None:
        """Writes the lines that wait. Gives up after 1 s in which no line is read."""
        with self._lock:
            self._flush(1000)

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
