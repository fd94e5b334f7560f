"""Finds the rank that has not entered a collective, from the records of all ranks.

torch pairs the collectives of a group by their order. If one rank has entered more than another, the next collective
hangs or mixes up data. If collectives with the same number differ in kind or size, data are already mixed up.

When a cell stalls or is stopped, `diagnose` compares the positions of the ranks and `card` shows the result. After
every cell `disagreeing` compares counts and digests, which is cheap and warns before the next cell hangs.
"""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .collectives import Entered, Line, Position, Window
from .errors import ranks_text
from .lines import Printer
from .wires import Wires, opened

__all__ = ["Finding", "Watch", "card", "diagnose", "disagreeing", "waits"]

Place = Callable[[Line], str]


@dataclass(frozen=True)
class Finding:
    """The first collective of a group that the ranks do not agree on.

    entered: rank -> what it entered at that number; missing: the ranks that have not.
    """

    group: str
    members: tuple[int, ...]
    entered: dict[int, Entered]
    missing: tuple[int, ...]

    def headline(self, world_size: int) -> str:
        """One sentence. Ranks in the same collective are grouped."""
        alike: dict[str, list[int]] = {}
        for rank, entry in self.entered.items():
            alike.setdefault(str(entry), []).append(rank)
        which = "" if len(self.members) == world_size else f" of the group of {ranks_text(self.members)}"
        if self.missing:
            return f"{ranks_text(self.missing)} never entered {next(iter(alike))}{which}"
        listed = ", ".join(f"{ranks_text(ranks)} entered {what}" for what, ranks in alike.items())
        return f"the ranks are in different collectives{which}: {listed}"


def shared_groups(members: Mapping[int, Mapping[str, list[int]]]) -> dict[str, list[int]]:
    """Group -> ranks, for the groups that all their members have reported equally."""
    everything = {name: who for groups in members.values() for name, who in groups.items()}
    return {
        name: who
        for name, who in everything.items()
        if all(rank in members and members[rank].get(name) == who for rank in who)
    }


def disagreeing(members: Mapping[int, Mapping[str, list[int]]], windows: Mapping[int, Mapping[str, Window]]) -> bool:
    """Whether some group's ranks entered different numbers of collectives, or different ones in the last cell."""
    for name, who in shared_groups(members).items():
        told = [windows[rank][name] for rank in who if name in windows.get(rank, ())]
        if len({window.entered for window in told}) > 1:
            return True
        if len({window.since for window in told}) == 1 and len({window.digest for window in told}) > 1:
            return True
    return False


def diagnose(positions: Mapping[int, Position]) -> list[Finding]:
    """One finding per group whose ranks differ. Empty if none differ, or if torch's flight recorder is off."""
    found = []
    for name, who in shared_groups({rank: position.members for rank, position in positions.items()}).items():
        counts = {rank: positions[rank].entered(name) for rank in who}
        finding = _differing(name, who, positions, min(counts.values()))
        if finding is None and len(set(counts.values())) > 1:
            number = min(counts.values()) + 1
            entered = {rank: positions[rank].at(name, number) for rank in who if counts[rank] >= number}
            known = {
                rank: entry or Entered("a collective", number, line=positions[rank].line)
                for rank, entry in entered.items()
            }
            finding = Finding(name, tuple(who), known, tuple(r for r in who if counts[r] < number))
        if finding is not None:
            found.append(finding)
    return found


def _differing(name: str, who: list[int], positions: Mapping[int, Position], upto: int) -> Finding | None:
    """The first recorded number at which the ranks entered different collectives."""
    for number in range(max(1, upto - 31), upto + 1):
        entries = {rank: entry for rank in who if (entry := positions[rank].at(name, number)) is not None}
        if len(entries) == len(who) and len({entry.comparable for entry in entries.values()}) > 1:
            return Finding(name, tuple(who), entries, ())
    return None


def waits(positions: Mapping[int, Position]) -> bool:
    """Whether some rank is inside a collective."""
    return any(
        not entry.done for position in positions.values() for history in position.history.values() for entry in history
    )


def card(
    findings: list[Finding], positions: Mapping[int, Position], title: str, advice: str, place: Place = str
) -> dict[str, str]:
    """The findings as text and HTML, each rank with its source line. place: formats a source line."""
    rows: list[tuple[str, str]] = []
    headlines = []
    for finding in findings:
        headline = finding.headline(len(positions))
        if len(finding.missing) == 1:
            headline += f"; it {_whereabouts(positions[finding.missing[0]], place)}"
        headlines.append(headline)
        for rank in finding.members:
            rows.append((f"rank {rank}", _state(finding.entered.get(rank), positions[rank], place)))
    text = [title, *(f"  {line}" for line in headlines), *(f"    {who}: {what}" for who, what in rows), f"  {advice}"]
    cells = "".join(
        f"<tr><th style='text-align:left'>{who}</th><td style='text-align:left'>{html.escape(what)}</td></tr>"
        for who, what in rows
    )
    page = (
        "<div role='status' style='border-left:4px solid #b45309;padding:.4em .8em;margin:.3em 0'>"
        f"<b>{html.escape(title)}</b>"
        + "".join(f"<p style='margin:.3em 0'>{html.escape(line)}</p>" for line in headlines)
        + f"<table style='margin:0'>{cells}</table><p style='margin:.3em 0'>{html.escape(advice)}</p></div>"
    )
    return {"text/plain": "\n".join(text), "text/html": page}


def _whereabouts(position: Position, place: Place) -> str:
    if position.cell is None:
        return "has finished the cell"
    return f"is at {place(position.line)}" if position.line is not None else "runs no line of the notebook's"


def _state(entry: Entered | None, position: Position, place: Place) -> str:
    if entry is None:
        return _whereabouts(position, place)
    line = entry.line if entry.line is not None or entry.done else position.line  # it waits where it is
    where = f" at {place(line)}" if line is not None else ""
    return f"{'entered' if entry.done else 'waits in'} {entry}{where}"


FIRST_S = 1.0  # most cells are over by then and are never asked
EVERY_S = 0.5
POSITIONS_S = 1.0  # for all ranks to report their position; a rank that holds the GIL cannot
LINES_S = 1.0  # for the lines of what they entered
STALL_S = 3.0  # without progress on any rank

STALLED = "It may still continue. Stop the cell to free the ranks; their variables are kept."
STOPPED = "The ranks are being freed; their variables are kept."
AFTERWARDS = (
    "The next collective of this group will pair up with the wrong one: it hangs or mixes up data. Run what is "
    "missing on the ranks that lack it (%%recshard --ranks), or start fresh ranks: %recshard_restart."
)


class Watch:
    """Requests the positions of ranks while a cell runs, and shows findings. clock: seconds, for tests."""

    def __init__(self, wires: Wires, cell: int, printer: Printer, clock: Callable[[], float] = time.monotonic) -> None:
        self.wires, self.cell, self.printer, self.clock = wires, cell, printer, clock
        self._begun = self._asked = self._moved = clock()
        self._pulses: dict[int, Any] = {}
        self._positions: dict[int, Position] | None = None  # being collected
        self._why = STALLED
        self._told: set[str] = set()
        self._placing: tuple[str, dict[int, Position]] | None = None  # to be shown when the source lines have arrived
        self._unplaced: set[int] = set()
        self._until = 0.0

    def expecting(self) -> bool:
        """Whether answers of ranks may still arrive. Late answers are not waited for."""
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
        """Requests the position of every rank. Shows a card if the answers differ."""
        self._why, self._positions, self._placing = why, {}, None
        self._until = self.clock() + POSITIONS_S
        self._ask("position")

    def hear(self, rank: int, kind: str, data: bytes) -> None:
        """Handles an answer to `tick` or `look`."""
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
        """Requests the source lines of what differs, if anything does."""
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
            STALLED: f"No rank has made progress for {STALL_S:g} s.",
            STOPPED: "Where the ranks were when the cell was stopped:",
            AFTERWARDS: "The ranks have not entered the same collectives.",
        }[why]
        self.printer.card(card(findings, positions, title, why, self.printer.place))

    def _ask(self, kind: str) -> None:
        for rank in self.wires.alive():
            self.wires.send(rank, kind, self.cell)
