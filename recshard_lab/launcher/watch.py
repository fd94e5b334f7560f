"""Watches the ranks of a running cell: when nobody has moved on for seconds, asks where they are."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from .collectives import Position
from .doctor import card, diagnose, waits
from .lines import Printer
from .wires import Wires, opened

__all__ = ["Watch"]

FIRST_S = 1.0  # most cells are over by then and are never asked
EVERY_S = 0.5
STALL_S = 3.0  # unchanged for so long: nobody progresses

STALLED = "It may still come by itself. Stop the cell to free the ranks; their variables are kept."
STOPPED = "The ranks are being freed; their variables are kept."
AFTERWARDS = (
    "The next collective of this group will pair up with the wrong one: it hangs or mixes up data. Run what is "
    "missing on the ranks that lack it (%%recshard --ranks), or start fresh ranks: %recshard_restart."
)


class Watch:
    """Asks and listens on behalf of one cell in flight. clock: seconds, for tests."""

    def __init__(self, wires: Wires, cell: int, printer: Printer, clock: Callable[[], float] = time.monotonic) -> None:
        self.wires, self.cell, self.printer, self.clock = wires, cell, printer, clock
        self._begun = self._asked = self._moved = clock()
        self._pulses: dict[int, Any] = {}
        self._positions: dict[int, Position] | None = None  # being collected
        self._why = STALLED
        self._told: set[str] = set()

    @property
    def expecting(self) -> bool:
        """Ranks were asked for their positions and have not all answered."""
        return self._positions is not None

    def tick(self) -> None:
        """Called often while the cell runs."""
        now = self.clock()
        if now - self._begun < FIRST_S or now - self._asked < EVERY_S:
            return
        self._asked = now
        self._ask("pulse")
        if now - self._moved > STALL_S and self._positions is None:
            self._moved = now  # the next look is as long away
            self.look(STALLED)

    def look(self, why: str) -> None:
        """Asks every rank for its position; the card follows when all have answered."""
        self._why, self._positions = why, {}
        self._ask("position")

    def hear(self, rank: int, kind: str, data: bytes) -> None:
        """An answer to `tick` or `look`."""
        if kind == "pulse":
            pulse = opened(data)
            if self._pulses.get(rank) != pulse:
                self._pulses[rank] = pulse
                self._moved = self.clock()
        elif kind == "position" and self._positions is not None:
            self._positions[rank] = opened(data)
            if len(self._positions) >= len(self.wires.alive()):
                positions, self._positions = self._positions, None
                self._tell(positions)

    def _tell(self, positions: dict[int, Position]) -> None:
        findings = [] if self._why is not AFTERWARDS and not waits(positions) else diagnose(positions)
        findings = [found for found in findings if found.headline(len(positions)) not in self._told]
        if not findings:
            return
        self._told |= {found.headline(len(positions)) for found in findings}
        title = {
            STALLED: f"No rank has moved on for {STALL_S:g} s.",
            STOPPED: "Where the ranks were when the cell was stopped:",
            AFTERWARDS: "The ranks have not entered the same collectives.",
        }[self._why]
        self.printer.card(card(findings, positions, title, self._why, self.printer.place))

    def _ask(self, kind: str) -> None:
        for rank in self.wires.alive():
            self.wires.send(rank, kind, self.cell)
