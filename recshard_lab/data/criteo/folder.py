"""The output folder of preprocessing: a manifest of the finished steps, and files that are complete or absent.

A file is written under another name and renamed once it is whole and on disk; then the manifest, which is replaced in
one step as well, names it with its size and checksum. So a run can resume after any interruption.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

MANIFEST = "manifest.json"
_VERSION = 1
_HEADER = 128  # of an npy file: its length does not depend on the rows, which are known last
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PIECE = 1 << 22


@dataclass(frozen=True)
class FileEntry:
    """A finished file: its name, bytes, and the CRC-32 of what follows its first `header` bytes."""

    name: str
    bytes: int
    crc32: int
    header: int = 0


@dataclass
class Day:
    """One input file and its finished outputs."""

    name: str
    source: str
    source_bytes: int
    source_mtime_ns: int
    text_bytes: int = 0  # of its lines, unzipped
    rows: int = -1  # not parsed yet
    clicks: int = 0
    bad_lines: int = 0
    bad: list[str] = field(default_factory=list)
    files: dict[str, FileEntry] = field(default_factory=dict)


@dataclass
class Column:
    """One category: `num_embeddings` of its table, distinct ids in the files, and passes of counting."""

    name: str
    num_embeddings: int
    distinct: int = -1  # not counted: ids are hashed
    passes: int = 0
    files: dict[str, FileEntry] = field(default_factory=dict)


@dataclass
class Manifest:
    """Contents of a folder, with the input and the settings."""

    settings: dict[str, Any]
    days: list[Day]
    columns: list[Column] = field(default_factory=list)
    complete: bool = False

    def entries(self) -> list[FileEntry]:
        """All finished files."""
        of_days = [entry for day in self.days for entry in day.files.values()]
        return of_days + [entry for column in self.columns for entry in column.files.values()]

    def save(self, folder: Path) -> None:
        """Replaces the folder's manifest in one step."""
        text = json.dumps({"recshard_criteo": _VERSION, **asdict(self)}, indent=1)
        part = folder / f"{MANIFEST}.part"
        with naming_full_disk(part), part.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(folder / MANIFEST)

    @staticmethod
    def load(folder: Path) -> Manifest:
        """Reads a folder's manifest.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it is none of ours or of another version.
        """
        path = folder / MANIFEST
        if not path.exists():
            raise FileNotFoundError(
                f"{folder} has no {MANIFEST}: make it with `recshard data criteo IN... --out {folder}`"
            )
        try:
            told = json.loads(path.read_text())
            if told.pop("recshard_criteo") != _VERSION:
                raise ValueError(f"version is not {_VERSION}")
            days = [Day(**{**day, "files": _entries(day["files"])}) for day in told["days"]]
            columns = [Column(**{**own, "files": _entries(own["files"])}) for own in told["columns"]]
            return Manifest(told["settings"], days, columns, told["complete"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a manifest of preprocessed clicks: {error}") from None


def _entries(told: dict[str, Any]) -> dict[str, FileEntry]:
    return {kind: FileEntry(**entry) for kind, entry in told.items()}


class FileWriter:
    """Writes a file that gets its name when it is complete, and computes its checksum.

    Args:
        path: where it will be.
        row: dtype and width of an npy file's rows; a file of plain bytes when left out.
    """

    def __init__(self, path: Path, row: tuple[type[np.generic], int] | None = None) -> None:
        self.path, self.row = path, row
        self.part = path.with_name(f"{path.name}.part")
        self.crc, self.size = 0, 0
        self.file: BinaryIO = self.part.open("wb", buffering=0)
        self.header = _HEADER if row else 0
        with naming_full_disk(self.part):
            self._put(memoryview(b" " * self.header))

    def write(self, numbers: NDArray[Any]) -> None:
        """Appends an array's bytes."""
        view = memoryview(numbers.reshape(-1).data).cast("B") if numbers.size else memoryview(b"")
        self.crc = zlib.crc32(view, self.crc)
        with naming_full_disk(self.part):
            self._put(view)
        self.size += len(view)

    def _put(self, view: memoryview) -> None:
        while len(view):  # a disk may take less than it is given, and refuse only the rest
            view = view[self.file.write(view) :]

    def finish(self) -> FileEntry:
        """Flushes the file to disk and renames it."""
        with naming_full_disk(self.part):
            if self.row:
                kind, width = np.dtype(self.row[0]), self.row[1]
                shape = (self.size // (kind.itemsize * width), width)
                self.file.seek(0)
                self._put(memoryview(_npy_header(kind, shape)))
            os.fsync(self.file.fileno())
        self.file.close()
        self.part.replace(self.path)
        return FileEntry(self.path.name, self.size + self.header, self.crc, self.header)

    def abandon(self) -> None:
        """Removes the incomplete file."""
        self.file.close()
        self.part.unlink(missing_ok=True)


def _npy_header(kind: np.dtype[Any], shape: tuple[int, int]) -> bytes:
    """Version 1.0 of numpy's format: magic, length, a dict padded with blanks."""
    told = f"{{'descr': '{kind.str}', 'fortran_order': False, 'shape': {shape}, }}"
    start = b"\x93NUMPY\x01\x00" + (_HEADER - 10).to_bytes(2, "little")
    return start + told.encode().ljust(_HEADER - 11) + b"\n"


@contextmanager
def naming_full_disk(path: Path) -> Iterator[None]:
    """Adds the file's name and a fix to the error of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        why = f"{os.strerror(error.errno)}: {path} could not be written"
        advice = "what was finished is kept: make room and run it again with --resume"
        raise OSError(error.errno, f"{why}; {advice}") from error


@contextmanager
def only_user(folder: Path) -> Iterator[None]:
    """Prevents a second run on the same folder.

    Raises:
        ValueError: another run holds the lock.
    """
    with (folder / "lock").open("w") as lock:
        try:
            _lock(lock.fileno())
        except (BlockingIOError, PermissionError):
            raise ValueError(
                f"{folder} is in use: another run writes to it. Fix: wait for its end, or choose another folder."
            ) from None
        yield


def _lock(file: int) -> None:
    """Locks an open file. Raises BlockingIOError, on Windows PermissionError, if another process holds the lock."""
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def check_sizes(folder: Path, entries: list[FileEntry]) -> None:
    """Raises for files that are missing or differ in length from the manifest.

    Raises:
        ValueError: by name.
    """
    for entry in entries:
        path = folder / entry.name
        size = path.stat().st_size if path.exists() else None
        if size != entry.bytes:
            found = "is missing" if size is None else f"has {size:,} bytes"
            raise ValueError(f"{path} {found}, the manifest says {entry.bytes:,}: make the folder anew")


def check_sums(folder: Path, entries: list[FileEntry]) -> None:
    """Raises for files whose checksum differs from the manifest.

    Raises:
        ValueError: by name.
    """
    check_sizes(folder, entries)
    for entry in entries:
        crc = 0
        with (folder / entry.name).open("rb") as file:
            file.seek(entry.header)
            while piece := file.read(_PIECE):
                crc = zlib.crc32(piece, crc)
        if crc != entry.crc32:
            raise ValueError(
                f"{folder / entry.name} has CRC-32 {crc:08x}, the manifest says {entry.crc32:08x}: it was changed or "
                f"damaged; make the folder anew"
            )
