"""Tables as plain text and as HTML, and answers made of sentences and such tables. Imports nothing of this library."""

import csv
import textwrap
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from html import escape
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from typing import Any

WIDTH = 100  # characters of a line of text, or less: see `set_terminal_width`
_LEAST_WIDTH = 60
MOST_ROWS = 40  # of a table in the text of an answer; its HTML and its records have all
_NARROWEST = 16  # characters of the first column
_GAP = "  "
_line_width = WIDTH
_terminal: int | None = None


def set_terminal_width(columns: int | None) -> None:
    """Fits text to a terminal. The command line calls it. None: no terminal.

    Lines of `WIDTH` become as long as the terminal, from 60 columns up. Tables that are wider than it wrap their cells.
    """
    global _line_width, _terminal
    _terminal = None if columns is None else max(_LEAST_WIDTH, columns)
    _line_width = min(WIDTH, _terminal or WIDTH)


def line_width() -> int:
    """Characters of a line of text: `WIDTH`, or less in a narrow terminal."""
    return _line_width


@dataclass(frozen=True)
class TextTable:
    """A table of text: `text` for a terminal, `html` for a notebook or a page.

    Attributes:
        heads: C names of columns.
        rows: C cells each.
        caption: a line above the table.
        widest: the most characters of each column in `text`, whose lines are then within `line_width`. Longer cells
            end in an ellipsis. If space is short, the first column is shortened, then the last. Empty: no limit.
        right: indices of the columns that are aligned right.
        wraps: long cells take several lines instead of an ellipsis. Lines of `text` are within `line_width`.

    >>> table = TextTable(("rank", "ms"), [("0", "1.25"), ("1", "10.50")], right=[1])
    >>> print(table.text)
    rank     ms
    0      1.25
    1     10.50
    >>> "<td style=\\"text-align:left\\">&lt;b&gt;</td>" in TextTable(("a",), [("<b>",)]).html
    True
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    _: KW_ONLY
    caption: str = ""
    widest: Sequence[int] = ()
    right: Sequence[int] = ()
    wraps: bool = False

    @property
    def text(self) -> str:
        """Columns two spaces apart."""
        lines = [list(self.heads), *map(list, self.rows)]
        widths = [max(len(line[c]) for line in lines) for c in range(len(self.heads))]
        if self.widest or self.wraps:
            widths = [min(width, most) for width, most in zip(widths, self.widest or widths, strict=True)]
            missing = sum(widths) + len(_GAP) * (len(widths) - 1) - line_width()
            if missing > 0:
                first = 0 if self.wraps else min(missing, max(0, widths[0] - _NARROWEST))
                widths[0] -= first
                widths[-1] -= missing - first
        wraps = self.wraps
        if not self.widest and _terminal is not None:
            fitted = _fitted(widths, lines, _terminal)
            wraps, widths = wraps or fitted != widths, fitted
        text = [wrapped(self.caption)] if self.caption else []
        for line in lines:
            cells = [_cell_lines(cell, width, wraps) for cell, width in zip(line, widths, strict=True)]
            text += [self._joined(parts, widths) for parts in zip_longest(*cells, fillvalue="")]
        return "\n".join(text)

    @property
    def html(self) -> str:
        """The same with full cells, escaped."""
        head = "".join(f'<th scope="col" style="text-align:left">{escape(name)}</th>' for name in self.heads)
        body = "".join(
            "<tr>" + "".join(f'<td style="text-align:left">{escape(cell)}</td>' for cell in row) + "</tr>"
            for row in self.rows
        )
        kind = ' class="wraps"' if self.wraps else ""
        caption = f'<caption style="text-align:left">{escape(self.caption)}</caption>' if self.caption else ""
        return f"<table{kind}>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return self.html

    def _joined(self, cells: Sequence[str], widths: Sequence[int]) -> str:
        padded = [
            cell.rjust(width) if c in self.right else cell.ljust(width)
            for c, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return _GAP.join(padded).rstrip()


def _cell_lines(cell: str, width: int, wraps: bool) -> list[str]:
    return textwrap.wrap(cell, width, break_on_hyphens=False) if wraps else [shortened(cell, width)]


def _fitted(widths: Sequence[int], lines: Sequence[Sequence[str]], most: int) -> list[int]:
    """Widths of columns for lines of at most `most` characters, as far as no word is broken.

    >>> _fitted([4, 17], [("plan", "3,082 of 3,350 GB")], 16)
    [4, 10]
    """
    least = [max(len(word) for line in lines for word in [*line[c].split(), ""]) for c in range(len(widths))]
    fitted = list(widths)
    while sum(fitted) + len(_GAP) * (len(fitted) - 1) > most:
        spare = [c for c in range(len(fitted)) if fitted[c] > least[c]]
        if not spare:
            break
        fitted[max(spare, key=lambda c: fitted[c])] -= 1
    return fitted


class Printable:
    """An answer that prints as sentences and tables, in lines of at most `line_width` characters, and shows as HTML.

    A subclass defines `parts`, and `records` if its table has numbers.
    """

    def parts(self) -> Sequence[str | TextTable]:
        """The sentences and tables, in order. Tables without rows are left out."""
        raise NotImplementedError

    def records(self) -> list[dict[str, Any]]:
        """The first table as one dict per row. Subclasses with numbers return them unrounded."""
        table = next(part for part in self.parts() if isinstance(part, TextTable))
        return [dict(zip(table.heads, row, strict=True)) for row in table.rows]

    def to_pandas(self) -> Any:
        """`records` as a pandas DataFrame.

        Raises:
            ModuleNotFoundError: pandas is not installed.
        """
        try:
            pandas = import_module("pandas")
        except ModuleNotFoundError as error:
            if error.name != "pandas":
                raise
            raise ModuleNotFoundError(
                "to_pandas needs the package pandas. Fix: pip install pandas, or call records() for dicts",
                name="pandas",
            ) from None
        return pandas.DataFrame(self.records())

    def to_csv(self, path: str | Path) -> Path:
        """Writes `records` as a CSV file. Columns are the keys of all records.

        Raises:
            OSError: it cannot be written.
        """
        path, records = Path(path), self.records()
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, dict.fromkeys(key for one in records for key in one), lineterminator="\n")
            writer.writeheader()
            writer.writerows(records)
        return path

    def __str__(self) -> str:
        blocks: list[str] = []
        above: str | TextTable | None = None
        for part in self._shown():
            if isinstance(part, str):
                words = wrapped(part)
                if isinstance(above, str):  # sentences follow one another without a blank line
                    words = f"{blocks.pop()}\n{words}"
            else:
                left_out = len(part.rows) - MOST_ROWS
                words = replace(part, rows=part.rows[:MOST_ROWS]).text
                words += f"\n... and {left_out:,} more: records() has them all" if left_out > 0 else ""
            blocks.append(words)
            above = part
        return "\n\n".join(blocks)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What IPython shows in a terminal."""
        printer.text(str(self))

    def _repr_html_(self) -> str:
        return "".join(f"<p>{escape(part)}</p>" if isinstance(part, str) else part.html for part in self._shown())

    def _shown(self) -> list[str | TextTable]:
        return [part for part in self.parts() if isinstance(part, str) or part.rows]


def wrapped(text: str) -> str:
    """`text` in lines of at most `line_width` characters, without breaking words."""
    return "\n".join(textwrap.wrap(text, line_width(), break_long_words=False, break_on_hyphens=False))


def shortened(text: str, limit: int) -> str:
    """`text`, shortened to `limit` characters with an ellipsis if it is longer.

    >>> shortened("column_wise", 7)
    'column…'
    """
    return text if len(text) <= limit else text[: limit - 1] + "…"
