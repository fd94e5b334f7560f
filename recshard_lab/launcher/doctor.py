"""Which rank has not entered which collective: found by comparing what the ranks say of themselves.

Collectives of a group pair up by their order. Where one rank has entered more of them than another, the next
one hangs or mixes up data; where the same number of them differs in kind or size, it already has.

When a cell stalls or is stopped, the ranks' positions are compared (`diagnose`) and shown as a card. After every
cell, their counts and digests are (`disagreeing`): cheap, so that the warning comes before the next cell hangs.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .collectives import Entered, Line, Position, Window
from .errors import ranks_text

__all__ = ["Finding", "card", "diagnose", "disagreeing", "waits"]

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
        """One sentence; only the ranks that behave alike are taken together."""
        alike: dict[str, list[int]] = {}
        for rank, entry in self.entered.items():
            alike.setdefault(str(entry), []).append(rank)
        which = "" if len(self.members) == world_size else f" of the group of {ranks_text(self.members)}"
        if self.missing:
            return f"{ranks_text(self.missing)} never entered {next(iter(alike))}{which}"
        told = ", ".join(f"{ranks_text(ranks)} entered {what}" for what, ranks in alike.items())
        return f"the ranks are in different collectives{which}: {told}"


def shared_groups(members: Mapping[int, Mapping[str, list[int]]]) -> dict[str, list[int]]:
    """Group -> ranks, for groups whose members all say the same of them and of whom all have been heard."""
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
    """A finding for each group whose ranks do not agree; empty when all is well, or nobody keeps records."""
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
    """The first number, among those that every rank still remembers, at which the ranks entered different things."""
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
    """The findings as a MIME bundle, text and HTML: each rank with the line it is at. place: how a line is called."""
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
