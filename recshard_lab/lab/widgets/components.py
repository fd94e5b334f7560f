"""The parts of widgets that have JavaScript: ``static/NAME.js`` and ``static/NAME.css`` for each component NAME."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from recshard_lab.lab.draw.theme import HATCHES, LABEL_INK, SCHEMES, WARNING

STATIC = Path(__file__).parent / "static"
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./(\w+)\.js";$', re.M)
_LOOK = {
    "fills": [*[look.fill for look in SCHEMES.values()][:7], "#c9ced6"],
    "strokes": [strokes for _, strokes in HATCHES.values()],
    "ink": LABEL_INK,
    "warning": WARNING,
}


def script(name: str) -> str:
    """The JavaScript of ``static/NAME.js``, with the modules that it imports in place of its import lines.

    A widget's script has no address on the page, so it cannot import files.

    >>> "import " in script("tile_canvas"), "function hatched" in script("tile_canvas")
    (False, True)
    """

    def inlined(found: re.Match[str]) -> str:
        return re.sub(r"^export ", "", script(found[1]), flags=re.M)

    return _IMPORT.sub(inlined, (STATIC / f"{name}.js").read_text())


def style(name: str) -> str:
    """The style sheet ``static/NAME.css``."""
    return (STATIC / f"{name}.css").read_text()


class Keys(anywidget.AnyWidget):
    """Invisible: keeps JupyterLab's shortcuts away from a widget's controls, and has the style sheet of all widgets."""

    _esm = script("keys")
    _css = style("widget")


class StepSlider(anywidget.AnyWidget):
    """A slider with named steps. The arrow keys, Home and End move it.

    ipywidgets' sliders have no accessible name, and screen readers read their index: "27" for 40 GB. This one is a
    labelled ``<input type="range">`` with the name of the step as its value text.

    Args:
        description: the label.
        options: ``(name, value)`` of each step, in order.
        value: the first value.
        tooltip: shown on hover.

    Raises:
        ValueError: `value` is not the value of a step.

    >>> slider = StepSlider("Ranks", [("1", 1), ("2", 2)], 2)
    >>> slider.index
    1
    """

    _esm = script("step_slider")
    _css = style("step_slider")
    description = traitlets.Unicode().tag(sync=True)
    tooltip = traitlets.Unicode().tag(sync=True)
    labels = traitlets.List(traitlets.Unicode()).tag(sync=True)
    index = traitlets.Int(0).tag(sync=True)
    value = traitlets.Any()

    def __init__(
        self, description: str, options: Sequence[tuple[str, Any]], value: Any, tooltip: str = "", **layout: Any
    ) -> None:
        self.options = list(options)
        self._values = [step for _, step in self.options]
        names, index = [name for name, _ in self.options], self._index_of(value)
        super().__init__(description=description, tooltip=tooltip, labels=names, index=index, value=value, **layout)
        self.observe(self._index_moved, names="index")
        self.observe(self._value_moved, names="value")

    def _index_of(self, value: Any) -> int:
        if value not in self._values:
            raise ValueError(f"{value!r} is not a step of this slider: its steps are {self._values}")
        return self._values.index(value)

    @traitlets.validate("value")
    def _validate_value(self, proposal: Any) -> Any:
        self._index_of(proposal["value"])
        return proposal["value"]

    def _index_moved(self, change: Any) -> None:
        self.value = self._values[change["new"]]

    def _value_moved(self, change: Any) -> None:
        self.index = self._index_of(change["new"])


class FileButton(anywidget.AnyWidget):
    """A button with which the reader chooses a file, whose text is sent to Python.

    Args:
        description: on the button.
        tooltip: shown on hover.
        accept: suffixes and types of the offered files, as in HTML.

    >>> button, received = FileButton("Plan from JSON"), []
    >>> button.on_file(lambda name, text: received.append((name, text)))
    >>> button.receive("mine.json", "{}")
    >>> received
    [('mine.json', '{}')]
    """

    _esm = script("file_button")
    _css = style("file_button")
    description = traitlets.Unicode().tag(sync=True)
    tooltip = traitlets.Unicode().tag(sync=True)
    accept = traitlets.Unicode().tag(sync=True)
    disabled = traitlets.Bool(False).tag(sync=True)

    def __init__(self, description: str, tooltip: str = "", accept: str = "", **layout: Any) -> None:
        self._callbacks: list[Callable[[str, str], None]] = []
        super().__init__(description=description, tooltip=tooltip, accept=accept, **layout)
        self.on_msg(lambda _, message, __: self.receive(str(message["name"]), str(message["text"])))

    def on_file(self, callback: Callable[[str, str], None]) -> None:
        """Calls `callback` with the name and the text of every chosen file."""
        self._callbacks.append(callback)

    def receive(self, name: str, text: str) -> None:
        """Calls the callbacks with a file, as choosing it does."""
        for callback in self._callbacks:
            callback(name, text)


class SplitLines(anywidget.AnyWidget):
    """Row shards of one table and the lines between them. Arrow keys move a line by 1% of the rows, 0.1% with Shift.

    Args:
        table: its name.
        rows: number of its rows, E.
        ends: rows of the W - 1 lines, ascending.
        ranks: of the W row shards.

    Attributes:
        hint: if not empty, the table is not split at these lines: the shards are grey, and the hint is below them.

    Raises:
        ValueError: lines that do not ascend from 0 to `rows`, or not one fewer than ranks.

    >>> lines = SplitLines("movies", 100, [40], [0, 1])
    >>> lines.ends = [250]
    Traceback (most recent call last):
    ...
    ValueError: split lines must ascend from 0 to 100, got [250]
    """

    _esm = script("split_lines")
    _css = style("split_lines")
    look = traitlets.Dict(_LOOK).tag(sync=True)
    table = traitlets.Unicode().tag(sync=True)
    rows = traitlets.Int(1).tag(sync=True)
    ends = traitlets.List(traitlets.Int()).tag(sync=True)
    ranks = traitlets.List(traitlets.Int()).tag(sync=True)
    hint = traitlets.Unicode().tag(sync=True)

    def __init__(self, table: str, rows: int, ends: Sequence[int], ranks: Sequence[int], **layout: Any) -> None:
        self._check(rows, ends, ranks)
        super().__init__(table=table, rows=rows, ends=list(ends), ranks=list(ranks), **layout)

    def show(self, table: str, rows: int, ends: Sequence[int], ranks: Sequence[int]) -> None:
        """Shows another table, with one message to the page: no key moves a line between two messages."""
        self._check(rows, ends, ranks)
        with self.hold_sync(), self.hold_trait_notifications():
            self.table, self.rows, self.ranks, self.ends = table, rows, list(ranks), list(ends)

    @staticmethod
    def _check(rows: int, ends: Sequence[int], ranks: Sequence[int]) -> None:
        if any(a > b for a, b in pairwise([0, *ends, rows])):
            raise ValueError(f"split lines must ascend from 0 to {rows}, got {list(ends)}")
        if len(ends) + 1 != len(ranks):
            raise ValueError(f"{len(ends)} lines make {len(ends) + 1} row shards, got {len(ranks)} ranks")

    @traitlets.validate("ends")
    def _validate_ends(self, proposal: Any) -> Any:
        self._check(self.rows, proposal["value"], self.ranks)
        return proposal["value"]


class TileCanvas(anywidget.AnyWidget):
    """One table on which the reader draws shards, with the pointer or the keys that are listed below it.

    Args:
        table: its name.
        rows, cols: its size, E and D.
        tiles: shards ``[rank, r0, r1, c0, c1]``, half open.
        world_size: number of ranks, W.
        row_step, col_step: the grid to which the pointer snaps, and how far a key moves an edge.

    >>> TileCanvas("movies", 100, 8, [[0, 0, 100, 0, 8]], 2, 5, 4).tiles
    [[0, 0, 100, 0, 8]]
    """

    _esm = script("tile_canvas")
    _css = style("tile_canvas")
    look = traitlets.Dict(_LOOK).tag(sync=True)
    table = traitlets.Unicode().tag(sync=True)
    rows = traitlets.Int(1).tag(sync=True)
    cols = traitlets.Int(1).tag(sync=True)
    row_step = traitlets.Int(1).tag(sync=True)
    col_step = traitlets.Int(1).tag(sync=True)
    world_size = traitlets.Int(1).tag(sync=True)
    rank = traitlets.Int(0, help="rank of the next drawn shard").tag(sync=True)
    overwrites = traitlets.Bool(True, help="whether a drawn shard is cut out of the shards under it").tag(sync=True)
    tiles = traitlets.List(traitlets.List(traitlets.Int(), minlen=5, maxlen=5)).tag(sync=True)
    details = traitlets.List(traitlets.Unicode(), help="per shard: its size, and below it lines of its tooltip").tag(
        sync=True
    )
    fault = traitlets.List(traitlets.Int(), help="r0, r1, c0, c1 of the fault; empty without one").tag(sync=True)

    def __init__(
        self,
        table: str,
        rows: int,
        cols: int,
        tiles: Sequence[Sequence[int]],
        world_size: int,
        row_step: int,
        col_step: int,
        **layout: Any,
    ) -> None:
        size = {"table": table, "rows": rows, "cols": cols, "world_size": world_size}
        steps = {"row_step": row_step, "col_step": col_step}
        super().__init__(tiles=[list(tile) for tile in tiles], **size, **steps, **layout)
