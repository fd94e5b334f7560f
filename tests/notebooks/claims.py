"""What the stored outputs of a notebook say, so that a test can hold a notebook's prose to it.

::

    notebook = stored("05")
    cell = notebook.cell("rs.plan(")                # the one code cell with these words
    assert cell.number("ids") == 29                 # the number before a word: "29 ids"
    assert cell.number(after="AUC") == 0.7331       # the number after it: "test AUC 0.7331"
    assert cell.row("row_wise") == [4.0, 1.25]      # numbers of the first line that has the words
    assert "29" in notebook.prose("Things to notice")
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import nbformat

from tests.notebooks.outputs import text_of
from tests.notebooks.refresh import paths_of

NUMBER = re.compile(r"(?<![\w.])[-−]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?!\d)", re.IGNORECASE)


def numbers_in(text: str) -> list[float]:
    """All numbers of a text, in order. Thousands may be separated by commas.

    >>> numbers_in("row_wise moved 1,280.5 MB in 3 steps, 1e-7 apart; t16")
    [1280.5, 3.0, 1e-07]
    """
    return [_float(found) for found in NUMBER.findall(text)]


def _float(digits: str) -> float:
    return float(digits.replace(",", "").replace("−", "-"))


@dataclass(frozen=True)
class Cell:
    """A code cell and the text of its stored outputs.

    Attributes:
        source: its code.
        output: printed lines; of pictures the description; of tables a line per row.
        tags: its tags.
    """

    source: str
    output: str
    tags: tuple[str, ...] = ()

    def line(self, words: str) -> str:
        """The first line of the output that has these words."""
        for line in self.output.splitlines():
            if words in line:
                return line
        raise AssertionError(f"no line of the output has {words!r}:\n{self.output}")

    def row(self, words: str) -> list[float]:
        """The numbers of the first line with these words, without those in the words themselves."""
        return numbers_in(self.line(words).replace(words, " ", 1))

    def number(self, before: str = "", after: str = "") -> float:
        """The first number that stands directly before, or directly after, some words."""
        left = re.escape(after) + r"\W{0,3}" if after else ""
        right = r"\s*" + re.escape(before) if before else ""
        found = re.search(rf"{left}({NUMBER.pattern}){right}", self.output, re.IGNORECASE)
        assert found, f"no number {'before ' + repr(before) if before else 'after ' + repr(after)}:\n{self.output}"
        return _float(found[1])

    @property
    def numbers(self) -> list[float]:
        """All numbers of the output, in order."""
        return numbers_in(self.output)


@dataclass(frozen=True)
class Stored:
    """A notebook of the repository, with its stored outputs."""

    name: str
    notebook: Any

    def cell(self, words: str) -> Cell:
        """The one code cell whose source has these words."""
        found = [c for c in self.notebook.cells if c.cell_type == "code" and words in c.source]
        assert len(found) == 1, f"{self.name}: {len(found)} code cells have {words!r}, expected one"
        text = "\n".join(map(text_of, found[0].outputs))
        return Cell(found[0].source, text, tuple(found[0].metadata.get("tags", [])))

    def output_of(self, words: str) -> str:
        """The output of the one code cell whose source has these words."""
        return self.cell(words).output

    def prose(self, words: str) -> str:
        """The one markdown cell that has these words, its white space as single spaces."""
        texts = [" ".join(c.source.split()) for c in self.notebook.cells if c.cell_type == "markdown"]
        found = [text for text in texts if words in text]
        assert len(found) == 1, f"{self.name}: {len(found)} markdown cells have {words!r}, expected one"
        return found[0]


def stored(name: str) -> Stored:
    """A notebook by the beginning of its name, such as ``"05"``."""
    (path,) = paths_of([name])
    return Stored(path.stem, nbformat.read(path, as_version=4))
