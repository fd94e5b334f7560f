"""What ranks print, as whole lines marked by rank; a line that all of them print is shown once.

[0] rank 0 holds users
[1] rank 1 holds movies
[all] loss 0.6931
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from .collectives import Line as SourceLine

__all__ = ["LineMerger", "Printer", "mark"]

HOLD_S = 0.25  # how long a line waits for the same line from the other ranks


class Line(NamedTuple):
    at: float
    stream: str  # "stdout", "stderr" or "display"
    content: Any  # a line's text, or a displayed value's MIME bundle


def mark(ranks: Sequence[int], everyone: Sequence[int]) -> str:
    """How a line is marked.

    >>> mark([0, 1], [0, 1]), mark([2], [0, 1, 2]), mark([0, 1, 2, 5], range(8)), mark([3], [3])
    ('[all]', '[2]', '[0-2,5]', '[3]')
    """
    if len(ranks) == len(everyone) > 1:
        return "[all]"
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return "[" + ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs) + "]"


class LineMerger:
    """Collects text from ranks; calls ``emit(ranks, stream, line)`` for each whole line, in each rank's order.

    A part that ends in a carriage return (a progress bar) goes to ``progress(rank, text)`` instead.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self._partial: dict[tuple[int, str], str] = {}
        self._pending: dict[int, deque[Line]] = {rank: deque() for rank in self.ranks}
        self._finished: set[int] = set()
        self.kept: deque[str] | None = None  # where lines are kept, whatever becomes of them on the page

    def emit(self, ranks: tuple[int, ...], stream: str, content: Any) -> None:
        """A whole line that `ranks` printed, or a MIME bundle that they displayed."""
        raise NotImplementedError

    def progress(self, rank: int, text: str) -> None:
        """The latest state of a progress bar; empty when it has ended."""

    def feed(self, rank: int, stream: str, text: str) -> None:
        """Text as it came from one rank, cut anywhere."""
        if rank not in self._pending:  # a background thread of a rank that this cell does not run on
            self._pending[rank] = deque()
        text = self._partial.pop((rank, stream), "") + text
        *whole, rest = text.replace("\r\n", "\n").split("\n")
        for line in whole:
            # a bar redraws itself: of what it wrote over itself the last state stays
            states = [state for state in line.split("\r") if state.strip()]
            self._pending[rank].append(Line(time.monotonic(), stream, states[-1] if states else ""))
            if "\r" in line:
                self.progress(rank, "")
        if "\r" in rest:
            before, _, rest = rest.rpartition("\r")
            shown = rest if rest.strip() else before.rpartition("\r")[2]
            self.progress(rank, shown)
            rest = "\r" + rest
        if rest:
            self._partial[rank, stream] = rest
        self.flush()

    def display(self, rank: int, bundle: dict[str, Any]) -> None:
        """A value that one rank displayed, in its place between the lines; shown by the next `flush`."""
        self._pending.setdefault(rank, deque()).append(Line(time.monotonic(), "display", bundle))

    def finish(self, rank: int) -> None:
        """This rank prints no more in this cell; what it left unended becomes a line."""
        for stream in ("stdout", "stderr"):
            rest = self._partial.pop((rank, stream), "")
            states = [state for state in rest.split("\r") if state.strip()]
            if states:
                self._pending[rank].append(Line(time.monotonic(), stream, states[-1]))
            if "\r" in rest:
                self.progress(rank, "")
        self._finished.add(rank)
        self.flush()

    def flush(self, everything: bool = False) -> None:
        """Emits what need not wait any longer for the same line from other ranks."""
        while (line := self._next(everything)) is not None:
            same = tuple(r for r in self.ranks_heard if self._head(r) == line[1:])
            for rank in same:
                self._pending[rank].popleft()
            if self.kept is not None and line.stream != "display":
                self.kept.append(f"{mark(same, self.ranks)} {line.content}")
            self.emit(tuple(sorted(same)), line.stream, line.content)

    @property
    def ranks_heard(self) -> list[int]:
        return [rank for rank, lines in self._pending.items() if lines]

    def _head(self, rank: int) -> tuple[str, Any]:
        return self._pending[rank][0][1:]

    def _next(self, everything: bool) -> Line | None:
        """The oldest first line that is either everyone's turn, or has waited long enough."""
        heads = sorted((self._pending[rank][0] for rank in self.ranks_heard), key=lambda line: line.at)
        ripe = [line for line in heads if everything or not self._may_still_come(line)]
        for line in ripe:
            later = [r for r in self.ranks_heard if self._head(r) != line[1:] and self._holds(r, line)]
            if not later:
                return line
        crossed = len(ripe) == len(heads)  # A, B on one rank and B, A on another: in order of age
        return ripe[0] if ripe and crossed else None

    def _holds(self, rank: int, line: Line) -> bool:
        return any(other[1:] == line[1:] for other in self._pending[rank])

    def _may_still_come(self, line: Line) -> bool:
        if time.monotonic() - line.at > HOLD_S:
            return False
        return any(r not in self._finished and not self._holds(r, line) for r in self.ranks)


class Printer(LineMerger):
    """Output of ranks on this process's own stdout and stderr."""

    def emit(self, ranks: tuple[int, ...], stream: str, content: Any) -> None:
        out = sys.stderr if stream == "stderr" else sys.stdout
        lines = str(content.get("text/plain", "")).splitlines() if stream == "display" else [content]
        for line in lines:
            print(mark(ranks, self.ranks), line, file=out, flush=True)

    def notice(self, text: str) -> None:
        """A word of the launcher's own."""
        print(text, file=sys.stderr, flush=True)

    def card(self, bundle: dict[str, str]) -> None:
        """What the doctor found, as a MIME bundle."""
        self.notice(bundle["text/plain"])

    def place(self, line: SourceLine) -> str:
        """How a line of source is called here."""
        return str(line)

    def close(self) -> None:
        """The cell is over."""
        self.flush(everything=True)
