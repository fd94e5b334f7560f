"""What comes back from ranks: a cell's result, and how each rank is doing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["CellResult", "RankStatus"]


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
