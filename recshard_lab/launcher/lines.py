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

__all__ = ["LineMerger", "Printer", "mark"]

HOLD_S = 0.15  # how long a line waits for the same line from the other ranks


class Line(NamedTuple):
    at: float
    stream: str
    text: str


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

    def emit(self, ranks: tuple[int, ...], stream: str, line: str) -> None:
        """A whole line that `ranks` printed."""
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
        while heads := {rank: lines[0] for rank, lines in self._pending.items() if lines}:
            oldest = min(heads.values(), key=lambda line: line.at)
            same = tuple(r for r, head in heads.items() if head[1:] == oldest[1:])
            may_come = [r for r in self.ranks if r not in heads and r not in self._finished]
            if may_come and not everything and time.monotonic() - oldest.at < HOLD_S:
                return
            for rank in same:
                self._pending[rank].popleft()
            self.emit(tuple(sorted(same)), oldest.stream, oldest.text)


class Printer(LineMerger):
    """Output of ranks on this process's own stdout and stderr."""

    def emit(self, ranks: tuple[int, ...], stream: str, line: str) -> None:
        out = sys.stderr if stream == "stderr" else sys.stdout
        print(mark(ranks, self.ranks), line, file=out, flush=True)

    def show(self, ranks: Sequence[int], bundle: dict[str, Any]) -> None:
        """A value that ranks displayed: its text."""
        for line in str(bundle.get("text/plain", "")).splitlines():
            self.emit(tuple(ranks), "stdout", line)

    def notice(self, text: str) -> None:
        """A word of the launcher's own."""
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """The cell is over."""
        self.flush(everything=True)
