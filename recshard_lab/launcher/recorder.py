"""The collectives that this rank has entered, per group, from torch's flight recorder.

The recorder is in C++ below torch.distributed, DDP and functional collectives. It costs about 1 us per collective.
Its ring of last entries is read after each cell and on request of the notebook. It has no point-to-point sends.
"""

from __future__ import annotations

import hashlib
import linecache
import os
import pickle
import sys
import sysconfig
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch._C._distributed_c10d as c10d

from . import groups
from .collectives import Entered, Line, Position, Window

__all__ = ["Recorder", "users_line"]

KEPT = 32  # entries of a group that are sent on request

# Code whose lines are not the user's: Python's, installed packages', this package's.
_INSTALLED = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_NOT_USERS = (*_INSTALLED, os.path.dirname(os.path.dirname(__file__)) + os.sep, "<string>", "<frozen")


@dataclass
class _Group:
    """The recorded state of one group. backend: torch's number of its connections, which grows when rebuilt."""

    backend: int = -1
    entered: int = 0
    since: int = 0  # the digest covers the collectives after this one
    digest: Any = None


class Recorder:
    """Reads the flight recorder of this process. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: dict[str, _Group] = {}
        self._last_record = -1
        self._last_pulse: tuple[int, ...] = ()

    def windows(self) -> dict[str, Window]:
        """Group name -> the collectives that this rank has entered since the last call."""
        with self._lock:
            for seen in self._groups.values():
                seen.since, seen.digest = seen.entered, hashlib.blake2b(digest_size=8)
            pulse = groups.issue_counts()
            if pulse != self._last_pulse:
                self._last_pulse = pulse
                for entry in _entries():
                    self._follow(entry)
            names = groups.group_names()
            empty = _Group()
            found = {}
            for name in names:
                seen = self._groups.get(name, empty)
                digest = seen.digest.hexdigest() if seen.digest is not None else ""
                found[name] = Window(seen.since, seen.entered, digest)
            return found

    def _follow(self, entry: dict[str, Any]) -> None:
        if entry["record_id"] <= self._last_record:
            return
        self._last_record = entry["record_id"]
        name, backend, number = entry["process_group"][0], entry["pg_id"], entry["collective_seq_id"]
        if entry["is_p2p"]:
            return
        seen = self._groups.setdefault(name, _Group())
        if backend != seen.backend or number != seen.entered + 1:  # rebuilt, or more than the ring holds
            seen.backend, seen.since, seen.digest = backend, number - 1, hashlib.blake2b(digest_size=8)
        seen.entered = number
        seen.digest.update(repr(_entered(entry).comparable).encode())

    def position(self, cell: int | None, line: Line | None) -> Position:
        """`cell` and `line` as given, with the last collectives of each group."""
        members = groups.group_names()
        found = _newest(_entries())
        history = {name: tuple(_entered(entry) for entry in found.get(name, ())) for name in members}
        return Position(cell, line if cell is not None else None, members, history)

    def lines(self) -> dict[str, dict[int, Line | None]]:
        """Group -> number of a collective -> the user's line it came from. At first torch imports for it."""
        found = _newest(_entries(lines=True))
        return {name: {entry["collective_seq_id"]: _line(entry) for entry in kept} for name, kept in found.items()}


def _newest(entries: list[dict[str, Any]]) -> dict[str, deque[dict[str, Any]]]:
    """The last entries by group, none from before the group was rebuilt."""
    collectives = [entry for entry in entries if not entry["is_p2p"]]
    newest = {entry["process_group"][0]: entry["pg_id"] for entry in collectives}
    found: dict[str, deque[dict[str, Any]]] = {}
    for entry in collectives:
        name = entry["process_group"][0]
        if entry["pg_id"] == newest[name]:
            found.setdefault(name, deque(maxlen=KEPT)).append(entry)
    return found


def _entries(lines: bool = False) -> list[dict[str, Any]]:
    """The ring, oldest first; empty where TORCH_FR_BUFFER_SIZE=0 has switched torch's recorder off."""
    found = []
    for name in ("_dump_fr_trace", "_dump_nccl_trace"):
        dump = getattr(c10d, name, None)
        if dump is not None:
            # bytes that torch in this very process has just written
            found += pickle.loads(dump(True, lines, False)).get("entries", [])
    return found


def _line(entry: dict[str, Any]) -> Line | None:
    for frame in entry.get("frames", ()):  # innermost first
        if not frame["filename"].startswith(_NOT_USERS):
            return Line(frame["filename"], frame["line"])
    return None


def _entered(entry: dict[str, Any]) -> Entered:
    return Entered(
        op=entry["profiling_name"].rpartition(":")[2],
        number=entry["collective_seq_id"],
        dtypes=tuple(entry["input_dtypes"] or entry["output_dtypes"]),
        sizes=tuple(tuple(size) for size in entry["input_sizes"] or entry["output_sizes"]),
        done=bool(entry["retired"]),
    )


def users_line() -> Line | None:
    """The innermost line of user code in the main thread.

    The loop is short, because the main thread may leave the frames that it visits.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_USERS):
        frame = frame.f_back
    if frame is None:
        return None
    filename, number = frame.f_code.co_filename, frame.f_lineno
    return Line(filename, number, linecache.getline(filename, number).strip())
