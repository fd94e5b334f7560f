"""A Criteo file, plain or gzipped, in blocks of complete lines. Errors name file and line."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from recshard_lab.data.criteo import CAT_FEATURE_COUNT, INT_FEATURE_COUNT

CHUNK_BYTES = 8 << 20
_COLUMNS = 1 + INT_FEATURE_COUNT + CAT_FEATURE_COUNT
_GZIP = b"\x1f\x8b"
_SHOWN = 60


@dataclass(frozen=True)
class Chunk:
    """Whole lines: the first `size` bytes of `text`; `position` counts bytes of the file on disk."""

    text: NDArray[np.uint8]
    size: int
    position: int


def chunks(path: Path) -> Iterator[Chunk]:
    """Reads a file in chunks that end with a newline. The last line of the file may lack it.

    Raises:
        ValueError: a gzip stream that is cut off or corrupt, a line longer than a chunk.
    """
    lines, chunk_bytes = 0, CHUNK_BYTES
    with path.open("rb", buffering=0) as raw:
        zipped = raw.read(2) == _GZIP
        if path.suffix == ".gz" and not zipped and os.path.getsize(path):
            raise ValueError(f"{path} is named .gz but is not a gzip file. Fix: rename it if it is plain text")
        raw.seek(0)
        text: BinaryIO = gzip.GzipFile(fileobj=raw) if zipped else raw  # type: ignore[assignment]
        rest = np.empty(0, np.uint8)
        while True:
            piece = np.empty(chunk_bytes, np.uint8)
            piece[: len(rest)] = rest
            try:
                size = _fill(text, piece, len(rest))
            except EOFError:
                raise ValueError(f"{path} is cut off: its gzip stream ends after line {lines:,} or later") from None
            except (gzip.BadGzipFile, zlib.error) as error:
                raise ValueError(f"{path} is corrupt after line {lines:,} or later: {error}") from None
            if size < chunk_bytes:  # the end
                if size and piece[size - 1] != ord("\n"):
                    piece[size] = ord("\n")
                    size += 1
                if size:
                    yield Chunk(piece, size, raw.tell())
                return
            cut = _after_last_newline(piece)
            if not cut:
                raise ValueError(f"{path}, line {lines + 1:,} or later: a line of more than {chunk_bytes:,} bytes")
            rest = piece[cut:].copy()
            lines += int(np.count_nonzero(piece[:cut] == ord("\n")))
            yield Chunk(piece, cut, raw.tell())


def _fill(text: BinaryIO, piece: NDArray[np.uint8], size: int) -> int:
    view = memoryview(piece.data)
    while size < len(piece):
        got = text.readinto(view[size:])  # type: ignore[attr-defined]
        if not got:
            break
        size += got
    return size


def _after_last_newline(piece: NDArray[np.uint8]) -> int:
    span = 1 << 14
    while True:
        ends = np.flatnonzero(piece[-span:] == ord("\n"))
        if len(ends):
            return len(piece) - min(span, len(piece)) + int(ends[-1]) + 1
        if span >= len(piece):
            return 0
        span *= 16


def complaint(line: bytes) -> str:
    """Describes the problem of a malformed line.

    >>> complaint(b"2" + b"\\t" * 39)
    "the label must be 0 or 1, got '2'"
    >>> complaint(b"1\\t5")
    'expected 40 columns separated by tabs, got 2'
    """
    fields = line.rstrip(b"\r\n").split(b"\t")
    if len(fields) != _COLUMNS:
        return f"expected {_COLUMNS} columns separated by tabs, got {len(fields)}"
    if fields[0] not in (b"0", b"1"):
        return f"the label must be 0 or 1, got {_shown(fields[0])}"
    for number, field in enumerate(fields[1:]):
        if number < INT_FEATURE_COUNT:
            digits = field.removeprefix(b"-")
            whole = digits.isdigit() and len(digits) <= 10 and int(digits) < 2**31
            if not (whole or field == b""):
                return f"int_{number} must be empty or an integer of 32 bits, got {_shown(field)}"
        elif len(field) > 8 or field.strip(b"0123456789abcdefABCDEF"):
            return f"cat_{number - INT_FEATURE_COUNT} must be empty or up to 8 hex digits, got {_shown(field)}"
    return "malformed"


def _shown(field: bytes) -> str:
    text = field.decode("ascii", "backslashreplace")
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")
