"""Output of ranks as whole lines, marked by rank. A line that all ranks print is shown once.

[0] rank 0 holds users
[1] rank 1 holds movies
[all] loss 0.6931
"""

from __future__ import annotations

import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from .collectives import Line as SourceLine

__all__ = ["LineMerger", "Printer", "mark"]

HOLD_S = 0.25  # how long a line waits for the same line from the other ranks
LINE_CHARS = 100_000  # of one line that are shown


class Line(NamedTuple):
    at: float
    stream: str  # "stdout", "stderr" or "display"
    content: Any  # a line's text, or a displayed value's MIME bundle

    @property
    def key(self) -> tuple[str, str]:
        """Equal for lines that are shown once."""
        return self.stream, self.content if isinstance(self.content, str) else repr(self.content)


class Open:
    """An unfinished line: text, or the last state of a progress bar. Keeps `LINE_CHARS` and counts the rest."""

    def __init__(self) -> None:
        self.bar = False  # it has redrawn itself
        self._before = ""  # the last state that was not blank
        self._parts: list[str] = []
        self._kept = self._cut = 0

    def add(self, text: str) -> None:
        """Text without a newline."""
        *redrawn, rest = text.split("\r")
        for part in redrawn:
            self._write(part)
            self._before, self.bar = self.state, True
            self._parts, self._kept, self._cut = [], 0, 0
        self._write(rest)

    def _write(self, text: str) -> None:
        kept = text[: LINE_CHARS - self._kept]
        if kept:
            self._parts.append(kept)
            self._kept += len(kept)
        self._cut += len(text) - len(kept)

    @property
    def state(self) -> str:
        """The line as a terminal shows it."""
        text = "".join(self._parts)
        if not text.strip():
            return self._before
        return f"{text} ... [{self._cut:,} more characters are not shown]" if self._cut else text


def mark(ranks: Sequence[int], everyone: Sequence[int]) -> str:
    """The mark of a line.

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
        self._partial: dict[tuple[int, str], Open] = {}
        self._pending: dict[int, deque[Line]] = {}
        self._counts: dict[int, Counter[tuple[str, str]]] = {}  # of the pending lines
        self._finished: set[int] = set()
        self.kept: deque[str] | None = None  # where all lines are kept, shown or not

    def emit(self, ranks: tuple[int, ...], stream: str, content: Any) -> None:
        """A whole line that `ranks` printed, or a MIME bundle that they displayed."""
        raise NotImplementedError

    def progress(self, rank: int, text: str) -> None:
        """The latest state of a progress bar; empty when it has ended."""

    def feed(self, rank: int, stream: str, text: str) -> None:
        """Adds text from one rank. The text may end within a line."""
        *whole, rest = text.replace("\r\n", "\n").split("\n")
        for line in whole:
            self._end(rank, stream, line)
        if rest:
            unended = self._partial.setdefault((rank, stream), Open())
            unended.add(rest)
            if unended.bar:
                self.progress(rank, unended.state)
        self.flush()

    def _end(self, rank: int, stream: str, text: str) -> None:
        """A line ends with `text`."""
        line = self._partial.pop((rank, stream), None) or Open()
        line.add(text)
        self._add(rank, stream, line.state)
        if line.bar:
            self.progress(rank, "")

    def _add(self, rank: int, stream: str, content: Any) -> None:
        line = Line(time.monotonic(), stream, content)
        self._pending.setdefault(rank, deque()).append(line)
        self._counts.setdefault(rank, Counter())[line.key] += 1

    def display(self, rank: int, bundle: dict[str, Any]) -> None:
        """A value that one rank displayed, in its place between the lines; shown by the next `flush`."""
        self._add(rank, "display", bundle)

    def finish(self, rank: int) -> None:
        """Ends the output of a rank in this cell. Its unfinished text becomes a line."""
        for stream in ("stdout", "stderr"):
            line = self._partial.get((rank, stream))
            if line is not None and line.state.strip():
                self._end(rank, stream, "")
            elif line is not None:
                self._partial.pop((rank, stream))
                self.progress(rank, "")
        self._finished.add(rank)
        self.flush()

    def flush(self, everything: bool = False) -> None:
        """Emits lines that no longer wait for the same line from other ranks."""
        while (line := self._next(everything)) is not None:
            same = tuple(rank for rank in self._printed if self._pending[rank][0].key == line.key)
            for rank in same:
                self._take(rank)
            if self.kept is not None and line.stream != "display":
                self.kept.append(f"{mark(same, self.ranks)} {line.content}")
            self.emit(tuple(sorted(same)), line.stream, line.content)

    def _take(self, rank: int) -> None:
        key = self._pending[rank].popleft().key
        self._counts[rank][key] -= 1
        if not self._counts[rank][key]:
            del self._counts[rank][key]

    @property
    def _printed(self) -> list[int]:
        """The ranks with lines that are not emitted yet."""
        return [rank for rank, lines in self._pending.items() if lines]

    def _next(self, everything: bool) -> Line | None:
        """The oldest line that is next on all ranks, or that has waited long enough."""
        heads = sorted((self._pending[rank][0] for rank in self._printed), key=lambda line: line.at)
        ripe = [line for line in heads if everything or not self._may_still_come(line)]
        for line in ripe:
            if not any(self._pending[r][0].key != line.key and self._holds(r, line) for r in self._printed):
                return line
        crossed = len(ripe) == len(heads)  # A, B on one rank and B, A on another: in order of age
        return ripe[0] if ripe and crossed else None

    def _holds(self, rank: int, line: Line) -> bool:
        return rank in self._counts and self._counts[rank][line.key] > 0

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
        """Shows a message of the launcher."""
        print(text, file=sys.stderr, flush=True)

    def card(self, bundle: dict[str, str]) -> None:
        """Shows the findings of `hangs`, a MIME bundle."""
        self.notice(bundle["text/plain"])

    def place(self, line: SourceLine) -> str:
        """A line of source as text."""
        return str(line)

    def close(self) -> None:
        """The cell is over."""
        self.flush(everything=True)
