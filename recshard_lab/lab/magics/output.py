"""How what ranks print, show and return appears in a notebook."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.display import DisplayHandle, display

from recshard_lab.launcher import CellResult, Printer
from recshard_lab.launcher.collectives import Line
from recshard_lab.launcher.lines import mark

__all__ = ["NotebookPrinter", "time_bars"]

REDRAW_S = 0.1  # progress bars are redrawn no more often


class NotebookPrinter(Printer):
    """Lines marked by rank, values as rich as their repr, progress bars in a block that redraws itself.

    quiet: shows nothing (an error still shows, being an exception).
    """

    def __init__(self, ranks: Sequence[int], quiet: bool = False) -> None:
        super().__init__(ranks)
        self.quiet = quiet
        self._bars: dict[int, str] = {}
        self._block: DisplayHandle | None = None
        self._stale, self._drawn = False, 0.0

    def emit(self, ranks: tuple[int, ...], stream: str, content: Any) -> None:
        if self.quiet:
            return
        if stream == "display" and set(content) - {"text/plain"}:
            print(mark(ranks, self.ranks), flush=True)
            display(content, raw=True)
        else:
            super().emit(ranks, stream, content)

    def progress(self, rank: int, text: str) -> None:
        if text:
            self._bars[rank] = text
        else:
            self._bars.pop(rank, None)
        self._stale = True

    def flush(self, everything: bool = False) -> None:
        super().flush(everything)
        if self._stale and not self.quiet and time.monotonic() - self._drawn > REDRAW_S:
            self._draw()

    def card(self, bundle: dict[str, str]) -> None:
        if not self.quiet:
            display(bundle, raw=True)

    def place(self, line: Line) -> str:
        """As the notebook's tracebacks do, by the cell's number."""
        shell = get_ipython()
        number = getattr(getattr(shell, "compile", None), "_filename_map", {}).get(line.filename)
        return str(line if number is None else line._replace(filename=f"<cell [{number}]>"))

    def results(self, results: Sequence[CellResult]) -> None:
        """The last expression of a cell, once for the ranks that agree."""
        for result in results:
            if result.data:
                self.display(result.rank, result.data)
        self.flush(everything=True)

    def close(self) -> None:
        super().close()
        self._bars.clear()
        if self._block is not None:
            self._draw()

    def _draw(self) -> None:
        self._stale, self._drawn = False, time.monotonic()
        text = "\n".join(f"[{rank}] {bar}" for rank, bar in sorted(self._bars.items()))
        bundle = {"text/plain": text}
        if self._block is None:
            self._block = DisplayHandle()
            self._block.display(bundle, raw=True)
        else:
            self._block.update(bundle, raw=True)


def time_bars(results: Sequence[CellResult], note: str = "", width: int = 40) -> str:
    """One bar per rank, scaled to the slowest rank's time; note: a last line about the times (`Ranks.times_note`).

    >>> print(time_bars([CellResult(0, {}, 0.5), CellResult(1, {}, 1.0)], width=8))
    [0] ████       500.0 ms
    [1] ████████  1000.0 ms
    """
    slowest = max((result.seconds for result in results), default=0.0) or 1.0
    rows = []
    for result in results:
        bar = "█" * max(1, round(width * result.seconds / slowest))
        rows.append(f"[{result.rank}] {bar:{width}} {result.seconds * 1e3:7.1f} ms")
    return "\n".join([*rows, note] if note else rows)
