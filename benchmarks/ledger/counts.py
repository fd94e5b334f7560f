"""What a device costs its host: operators, synchronisations, copies, collectives and bytes, counted while recording.

>>> with record() as counts:
...     pass
>>> counts.launches, len(counts.syncs), counts.peak_extra_bytes
(0, 0, 0)
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Literal

import torch
from torch import Tensor

import recshard_lab

Kind = Literal["weights", "state", "activations", "buffers"]
KINDS: tuple[Kind, ...] = ("weights", "state", "activations", "buffers")

_PACKAGE = str(Path(recshard_lab.__file__).parent)
_HERE = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
_lock = threading.RLock()


@dataclass(frozen=True)
class Sync:
    """One wait of the host for the device.

    Attributes:
        cause: the operator, for example ``_local_scalar_dense``, or ``copy to host``.
        where: ``file:line function``, the innermost frame inside recshard_lab.
    """

    cause: str
    where: str


@dataclass
class Copies:
    """Copies in one direction.

    Attributes:
        count: copies.
        bytes: all of their bytes.
        pinned_bytes: bytes from or to pinned host memory.
    """

    count: int = 0
    bytes: int = 0
    pinned_bytes: int = 0


@dataclass
class Counts:
    """What was counted while a recording was open.

    Attributes:
        operators: dispatched operators by name, views included.
        events: operators that launch a kernel, and collectives (``c10d::...``), in order.
        syncs: each wait of the host for the device.
        to_device, to_host: copies.
        collectives: each collective's name and the bytes that this rank sends, its own share included.
        live_at_start: bytes by kind.
        peak: bytes by kind when their sum was largest.
    """

    operators: Counter[str] = field(default_factory=Counter)
    events: list[str] = field(default_factory=list)
    syncs: list[Sync] = field(default_factory=list)
    to_device: Copies = field(default_factory=Copies)
    to_host: Copies = field(default_factory=Copies)
    collectives: list[tuple[str, int]] = field(default_factory=list)
    live_at_start: dict[Kind, int] = field(default_factory=dict)
    peak: dict[Kind, int] = field(default_factory=dict)

    @property
    def launches(self) -> int:
        """Operators that launch a kernel: no views, no allocations, no collectives."""
        return sum(not name.startswith("c10d::") for name in self.events)

    @property
    def reads(self) -> list[Sync]:
        """The synchronisations that bring numbers to the host: all but blocking copies to the device."""
        return [sync for sync in self.syncs if sync.cause != "copy to device"]

    @property
    def peak_extra_bytes(self) -> int:
        """The largest sum of live bytes, less the bytes that were live at the start."""
        return sum(self.peak.values()) - sum(self.live_at_start.values())

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sends in collectives, its own share included."""
        return sum(size for _, size in self.collectives)

    def launches_after_last_collective(self) -> int:
        """Kernels after the last collective."""
        count = 0
        for name in reversed(self.events):
            if name.startswith("c10d::"):
                break
            count += 1
        return count


@dataclass(eq=False)
class Block:
    """One allocation on the device. It is freed when the last tensor that views it is."""

    size: int
    kind: Kind

    def __post_init__(self) -> None:
        with _lock:
            live[self.kind] += self.size
            for counts in _open:
                if sum(live.values()) > sum(counts.peak.values()):
                    counts.peak = dict(live)

    def __del__(self) -> None:
        with _lock:
            live[self.kind] -= self.size

    def mark(self, kind: Kind) -> None:
        """Counts the block as this kind."""
        with _lock:
            live[self.kind] -= self.size
            self.kind = kind
            live[kind] += self.size


live: dict[Kind, int] = dict.fromkeys(KINDS, 0)
"""Bytes on the device now, by kind."""

_open: list[Counts] = []
_kinds: list[Kind] = ["buffers"]


@contextmanager
def record() -> Iterator[Counts]:
    """Counts everything that happens on the device inside the block, on every thread."""
    with _lock:
        counts = Counts(live_at_start=dict(live), peak=dict(live))
        _open.append(counts)
    try:
        yield counts
    finally:
        with _lock:
            _open[:] = [other for other in _open if other is not counts]


@contextmanager
def allocating(kind: Kind) -> Iterator[None]:
    """New device memory inside the block is of this kind. Outside of all such blocks it counts as buffers."""
    _kinds.append(kind)
    try:
        yield
    finally:
        _kinds.pop()


def current_kind() -> Kind:
    """The kind of memory allocated now."""
    return _kinds[-1]


def note_operator(name: str, launch: bool) -> None:
    """Counts one dispatched operator."""
    with _lock:
        for counts in _open:
            counts.operators[name] += 1
            if launch:
                counts.events.append(name)


def note_sync(cause: str) -> None:
    """Counts one wait of the host, with the line that causes it."""
    if _open:
        sync = Sync(cause, _where())
        with _lock:
            for counts in _open:
                counts.syncs.append(sync)


def note_copy(to_device: bool, tensor: Tensor, pinned: bool, blocking: bool) -> None:
    """Counts one copy. A blocking one is a synchronisation too: CUDA waits for its stream after it."""
    size = tensor.numel() * tensor.element_size()
    with _lock:
        for counts in _open:
            copies = counts.to_device if to_device else counts.to_host
            copies.count += 1
            copies.bytes += size
            copies.pinned_bytes += size if pinned else 0
    if blocking:
        note_sync("copy to device" if to_device else "copy to host")


def note_collective(name: str, size: int) -> None:
    """Counts one collective."""
    with _lock:
        for counts in _open:
            counts.collectives.append((name, size))
            counts.events.append(f"c10d::{name}")


def _where() -> str:
    """The innermost frame inside recshard_lab; where there is none, the innermost that is not torch's."""
    frame: FrameType | None = sys._getframe(1)
    other = ""
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_HERE):
            if path.startswith(_PACKAGE):
                return f"{Path(path).relative_to(Path(_PACKAGE).parent)}:{frame.f_lineno} {frame.f_code.co_name}"
            if not other and not path.startswith(_TORCH):
                other = f"{path}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return other
