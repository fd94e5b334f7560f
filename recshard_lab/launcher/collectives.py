"""Records of the collectives that a rank entered: plain values sent from the rank to the notebook."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

__all__ = ["RING", "Entered", "Line", "Position", "Window"]

# Collectives in which all ranks must pass equal sizes. all_to_all, gather and scatter may differ.
_SAME_SIZES = frozenset({"all_reduce", "all_gather", "broadcast", "reduce", "reduce_scatter", "barrier"})
_TORCH_NAMES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
}
RING = "64"  # entries that torch keeps on a rank

_CELL = re.compile(r"<cell \[(\d+)\]>")


class Line(NamedTuple):
    """A line of source. text: its content, if known."""

    filename: str
    number: int
    text: str = ""

    def __str__(self) -> str:
        """
        >>> print(Line("<cell [7]>", 3, "dist.barrier()"))
        cell [7] line 3: dist.barrier()
        """
        cell = _CELL.fullmatch(self.filename)
        where = f"cell [{cell[1]}]" if cell else self.filename
        return f"{where} line {self.number}" + (f": {self.text}" if self.text else "")


class Entered(NamedTuple):
    """One collective that a rank entered. number: its position in its group, from 1. done: the rank left it."""

    op: str
    number: int
    dtypes: tuple[str, ...] = ()
    sizes: tuple[tuple[int, ...], ...] = ()
    line: Line | None = None
    done: bool = False

    @property
    def comparable(self) -> tuple[Any, ...]:
        """What must be the same on every rank of the group."""
        return (self.op, self.dtypes, self.sizes) if self.op in _SAME_SIZES else (self.op,)

    def __str__(self) -> str:
        """
        >>> print(Entered("all_reduce", 12, ("Long",), ((2, 3),)))
        all_reduce #12, int64[2, 3]
        >>> print(Entered("barrier", 13))
        barrier #13
        """
        shown = []
        for dtype, size in zip(self.dtypes, self.sizes, strict=False):
            shown.append(f"{_TORCH_NAMES.get(dtype, dtype)}[{', '.join(map(str, size))}]")
        if len(shown) > 2:
            shown[1:] = [f"and {len(shown) - 1} more"]
        return ", ".join([f"{self.op} #{self.number}", *shown])


class Window(NamedTuple):
    """The collectives of one group that a rank entered in one cell: numbers (since, entered] and their digest."""

    since: int
    entered: int
    digest: str


class Position(NamedTuple):
    """Where a rank is. cell: the cell it runs, None if idle. history: group -> its last collectives."""

    cell: int | None
    line: Line | None
    members: dict[str, list[int]]  # group -> global ranks
    history: dict[str, tuple[Entered, ...]]

    def entered(self, group: str) -> int:
        """How many collectives of the group it has entered."""
        history = self.history.get(group, ())
        return history[-1].number if history else 0

    def at(self, group: str, number: int) -> Entered | None:
        """The collective with that number, None if it is not recorded any more."""
        return next((entry for entry in reversed(self.history.get(group, ())) if entry.number == number), None)

    def with_lines(self, lines: dict[str, dict[int, Line | None]]) -> Position:
        """A copy in which each collective has its source line."""
        history = {
            name: tuple(entry._replace(line=lines.get(name, {}).get(entry.number)) for entry in entries)
            for name, entries in self.history.items()
        }
        return self._replace(history=history)
