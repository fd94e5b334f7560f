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
POSITIONS_S = 1.0  # for all ranks to say where they are; one that keeps the interpreter to itself cannot
LINES_S = 1.0  # for the lines of what they entered
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
        self._placing: tuple[str, dict[int, Position]] | None = None  # to be told, when the lines are known
        self._unplaced: set[int] = set()
        self._until = 0.0

    def expecting(self) -> bool:
        """Ranks were asked something and may still answer; what has not come in time is done without."""
        if self.clock() > self._until:
            self._positions = None
            if self._placing is not None:
                self._tell(*self._placing)
        return self._positions is not None or self._placing is not None

    def tick(self) -> None:
        """Called often while the cell runs."""
        now = self.clock()
        if now - self._begun < FIRST_S or now - self._asked < EVERY_S:
            return
        self._asked = now
        self._ask("pulse")
        if now - self._moved > STALL_S and not self.expecting():
            self._moved = now  # the next look is as long away
            self.look(STALLED)

    def look(self, why: str) -> None:
        """Asks every rank for its position; a card follows when the answers show something."""
        self._why, self._positions, self._placing = why, {}, None
        self._until = self.clock() + POSITIONS_S
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
                self._compare(self._positions)
        elif kind == "lines" and self._placing is not None:
            self._placing[1][rank] = self._placing[1][rank].with_lines(opened(data))
            self._unplaced.discard(rank)
            if not self._unplaced:
                self._tell(*self._placing)

    def _compare(self, positions: dict[int, Position]) -> None:
        """If there is something to tell, asks for the lines that go with it."""
        self._positions = None
        if self._why is AFTERWARDS or waits(positions):
            findings = diagnose(positions)
            if any(found.headline(len(positions)) not in self._told for found in findings):
                self._placing, self._unplaced = (self._why, positions), set(positions)
                self._until = self.clock() + LINES_S
                self._ask("lines")

    def _tell(self, why: str, positions: dict[int, Position]) -> None:
        self._placing = None
        findings = diagnose(positions)
        self._told |= {found.headline(len(positions)) for found in findings}
        title = {
            STALLED: f"No rank has moved on for {STALL_S:g} s.",
            STOPPED: "Where the ranks were when the cell was stopped:",
            AFTERWARDS: "The ranks have not entered the same collectives.",
        }[why]
        self.printer.card(card(findings, positions, title, why, self.printer.place))

    def _ask(self, kind: str) -> None:
        for rank in self.wires.alive():
            self.wires.send(rank, kind, self.cell)
