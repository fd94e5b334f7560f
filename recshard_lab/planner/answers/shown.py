"""Answers of the planner as text of at most 100 columns, as HTML, as dicts and, where it is installed, for pandas."""

import html
import textwrap
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from recshard_lab.sharding.export.text_table import WIDTH, align

MOST_LINES = 40  # of a text table; HTML and `records` have all


class Shown:
    """What an answer looks like: sentences, then a table. An answer says `_sentences` and `_tables`."""

    def records(self) -> list[dict[str, Any]]:
        """The table as one dict a line, numbers unrounded."""
        raise NotImplementedError

    def _sentences(self) -> list[str]:
        raise NotImplementedError

    def _tables(self) -> list[tuple[Sequence[int], Sequence[Sequence[str]]]]:
        """Tables: how wide each column may be, and lines of cells, the header first."""
        raise NotImplementedError

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
                "to_pandas needs the package pandas: pip install pandas; records() gives the same lines as dicts",
                name="pandas",
            ) from None
        return pandas.DataFrame(self.records())

    def __str__(self) -> str:
        tables = []
        for widest, lines in self._tables():
            if len(lines) > 1:
                left_out = len(lines) - 1 - MOST_LINES
                more = [f"... and {left_out} more: records() has them all"] if left_out > 0 else []
                tables.append("\n".join([align(lines[: MOST_LINES + 1], widest, WIDTH), *more]))
        return "\n\n".join(["\n".join(wrapped(text) for text in self._sentences()), *tables])

    def _repr_html_(self) -> str:
        parts = [f"<p>{html.escape(text)}</p>" for text in self._sentences()]
        for _, lines in self._tables():
            if len(lines) > 1:
                parts.append(_html_table(lines))
        return "".join(parts)


def wrapped(text: str) -> str:
    """`text` in lines of at most `WIDTH`; a longer word is broken."""
    return "\n".join(textwrap.wrap(text, WIDTH))


def _html_table(lines: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        inside = "".join(f'<{tag} style="text-align:left">{html.escape(cell)}</{tag}>' for cell in cells)
        return f"<tr>{inside}</tr>"

    body = "".join(line(cells, "td") for cells in lines[1:])
    return f"<table><thead>{line(lines[0], 'th')}</thead><tbody>{body}</tbody></table>"
