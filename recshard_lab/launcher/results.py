"""What comes back from ranks: a cell's result, and how each rank is doing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .engines import Ending, RankProcess
from .wires import exit_text

__all__ = ["CellResult", "RankStatus", "rank_status"]


@dataclass(frozen=True)
class CellResult:
    """What one rank's cell gave. data: MIME type -> content of the last expression, empty if it has none."""

    rank: int
    data: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def text(self) -> str | None:
        """The repr of the last expression, None when the cell ends in none."""
        return self.data.get("text/plain")


@dataclass(frozen=True)
class RankStatus:
    """One rank now. state: ``idle``, ``running`` or how it ended; memory_bytes: resident set, 0 when gone."""

    rank: int
    pid: int
    state: str
    node: int
    memory_bytes: int


def rank_status(rank: int, process: RankProcess, node: int, busy: bool, dead: Mapping[int, Ending]) -> RankStatus:
    """How one rank is doing; dead: how those that ended did."""
    pid = process.pid
    if rank in dead:
        return RankStatus(rank, pid, exit_text(dead[rank])[1], node, 0)
    memory = process.memory_bytes()
    if not memory:
        return RankStatus(rank, pid, "ended", node, 0)
    return RankStatus(rank, pid, "running" if busy else "idle", node, memory)
