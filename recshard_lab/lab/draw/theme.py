"""How things look: colours that hold on light and dark pages, hatchings, and numbers as people read them.

Nothing here depends on colour alone: every scheme, memory category and phase has a hatching and a written label.
Fills are light enough for black labels on either page; everything outside a fill is drawn in the page's own ink
(``currentColor``), so one picture serves a light and a dark JupyterLab.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

LABEL_INK = "#14181d"  # text on a fill, in both themes
FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"
MIDDLE_INK = "#7a828c"  # readable on white and on near-black: plotly cannot inherit the page's ink
WARNING = "#d9480f"
MISSING = "n/a"


@dataclass(frozen=True)
class Look:
    """A fill, a hatching and a label: ``hatch`` is one of ``HATCHES``, and names plotly's pattern too."""

    label: str
    fill: str
    hatch: str


# hatch name -> (plotly's pattern shape, SVG strokes in a 8 x 8 tile)
HATCHES: dict[str, tuple[str, str]] = {
    "plain": ("", ""),
    "rows": ("-", "M0 4H8"),
    "columns": ("|", "M4 0V8"),
    "grid": ("+", "M0 4H8M4 0V8"),
    "rising": ("/", "M-2 2L2 -2M0 8L8 0M6 10L10 6"),
    "falling": ("\\", "M-2 6L2 10M0 0L8 8M6 -2L10 2"),
    "cross": ("x", "M0 0L8 8M0 8L8 0"),
    "dots": (".", "M2 2h1.6M6 6h1.6"),
}

SCHEMES: dict[str, Look] = {
    "table_wise": Look("table-wise", "#9cc4ee", "plain"),
    "row_wise": Look("row-wise", "#f6bd83", "rows"),
    "column_wise": Look("column-wise", "#9ad6ae", "columns"),
    "data_parallel": Look("data-parallel", "#d3bdea", "dots"),
    "table_row_wise": Look("table-row-wise", "#f1d774", "rising"),
    "table_column_wise": Look("table-column-wise", "#8fd6d6", "falling"),
    "grid_shard": Look("grid", "#f0a9b8", "grid"),
    "flex_shard": Look("flex (hot rows everywhere)", "#c9d68a", "cross"),
}

MEMORY: dict[str, Look] = {
    "weights": Look("weights", "#9cc4ee", "plain"),
    "optimizer_state": Look("optimizer state", "#f6bd83", "rising"),
    "index": Look("index of dynamic tables", "#e3a7d1", "cross"),
    "dense": Look("dense layers", "#d3bdea", "dots"),
    "input_buffers": Look("input buffers", "#9ad6ae", "rows"),
    "output_buffers": Look("output buffers", "#f1d774", "columns"),
    "gradients": Look("gradients", "#8fd6d6", "cross"),
    "exchange_buffers": Look("exchange buffers", "#c9d68a", "grid"),
    "activations": Look("activations", "#f0a9b8", "falling"),
    "allocator_cache": Look("allocator's cache", "#dcc8a0", "dots"),
    "process": Look("Python and libraries", "#c9ced6", "plain"),
}

PHASES: dict[str, Look] = {
    "input_dist": Look("input dist", "#9ad6ae", "rows"),
    "lookup": Look("lookup", "#9cc4ee", "plain"),
    "output_dist": Look("output dist", "#f1d774", "columns"),
    "dense": Look("dense", "#d3bdea", "dots"),
    "output_dist_backward": Look("output dist, backward", "#f0a9b8", "falling"),
    "lookup_backward": Look("lookup, backward", "#f6bd83", "rising"),
}

STAGES: dict[str, Look] = {  # of a pipeline, in the order in which a batch meets them
    "load": Look("load", "#c9ced6", "dots"),
    "copy": Look("copy", "#b3c1f2", "rising"),
    "agree": Look("agree", "#dcc8a0", "cross"),
    "sizes": Look("sizes", "#a8dccf", "columns"),
    "input_dist": Look("input dist", "#9ad6ae", "rows"),
    "prefetch": Look("prefetch rows", "#c3b6e8", "columns"),
    "lookup": Look("lookup", "#9cc4ee", "plain"),
    "output_dist": Look("output dist", "#f1d774", "columns"),
    "ids": Look("ids", "#c9d68a", "rising"),
    "rows": Look("rows", "#f1d774", "rows"),
    "gradients": Look("gradients", "#8fd6d6", "cross"),
    "wait": Look("wait", "#eceff3", "falling"),
    "forward": Look("forward", "#d3bdea", "plain"),
    "backward": Look("backward", "#f6bd83", "rising"),
    "optimizer": Look("optimizer", "#f0a9b8", "grid"),
    "step": Look("step", "#d3bdea", "plain"),
}

SPARE = (
    ("#b7d67a", "cross"),
    ("#e6b8d8", "grid"),
    ("#b3c1f2", "falling"),
    ("#dcc8a0", "dots"),
    ("#a8dccf", "rising"),
)

# lines have no area to hatch: colour, dash and marker differ together; each holds 3:1 on white and on #111
LINES = (
    ("#1f83d6", "", "circle"),
    ("#d9660f", "7 3", "square"),
    ("#2b9a57", "2 3", "diamond"),
    ("#a763d1", "9 3 2 3", "triangle-up"),
    ("#c2456f", "5 2", "cross"),
    ("#8a7a1d", "1 2", "x"),
    ("#2f939c", "12 4", "star"),
    ("#7482c4", "6 2 1 2", "triangle-down"),
    ("#b0703c", "4 4", "pentagon"),
    ("#6f8f2f", "10 2 2 2 2 2", "hexagon"),
)


def look_of(name: str, known: dict[str, Look]) -> Look:
    """The look of a scheme, category or phase; names nobody foresaw get one of the spare looks, always the same.

    >>> look_of("row_wise", SCHEMES).hatch
    'rows'
    >>> look_of("my_own_tiling", SCHEMES).label
    'my own tiling'
    """
    if name in known:
        return known[name]
    fill, hatch = SPARE[sum(name.encode()) % len(SPARE)]
    return Look(name.replace("_", " "), fill, hatch)


def number(value: float, digits: int = 3) -> str:
    """A number in ``digits`` significant figures, no exponent where a person would write none.

    >>> number(0.012345), number(1234.5), number(3.0), number(float("nan"))
    ('0.0123', '1,234', '3', 'n/a')
    """
    if not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    if size < 1e-4:
        return f"{value:.{digits - 1}g}"
    places = digits - 1 - math.floor(math.log10(size))
    text = f"{value:.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def bytes_text(value: float) -> str:
    """Bytes in decimal units, as memory is sold.

    >>> bytes_text(20_480_000_000), bytes_text(448), bytes_text(0)
    ('20.5 GB', '448 B', '0 B')
    """
    if not math.isfinite(value):
        return MISSING
    for unit, size in _UNITS:
        if abs(value) >= size * 0.9995:
            return f"{number(value / size)} {unit}"
    return f"{number(value)} B"


def bytes_unit(largest: float) -> tuple[float, str]:
    """One unit for a whole figure: ``(size, name)``, so that cells can hold bare numbers.

    >>> bytes_unit(3_500_000)
    (1000000.0, 'MB')
    """
    for unit, size in _UNITS:
        if math.isfinite(largest) and largest >= size:
            return size, unit
    return 1.0, "B"


_UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3))


def ms_text(value: float) -> str:
    """Milliseconds; microseconds below a tenth of one, seconds from ten thousand on.

    >>> ms_text(7.68), ms_text(0.0421), ms_text(12_345)
    ('7.68 ms', '42.1 µs', '12.3 s')
    """
    if not math.isfinite(value):
        return MISSING
    if abs(value) >= 1e4:
        return f"{number(value / 1e3)} s"
    return f"{number(value)} ms" if abs(value) >= 0.1 or value == 0 else f"{number(value * 1000)} µs"


def count_text(value: float) -> str:
    """Rows and columns, grouped in thousands; millions shortened.

    >>> count_text(1682), count_text(40_000_000)
    ('1,682', '40M')
    """
    if value >= 1e6:
        return f"{number(value / 1e6)}M"
    return f"{value:,.0f}"


def counted(count: int, noun: str) -> str:
    """A number and its noun.

    >>> counted(1, "piece"), counted(1200, "rank")
    ('1 piece', '1,200 ranks')
    """
    return f"{count:,} {noun}{'s' * (count != 1)}"


def as_sentence(words: str) -> str:
    """Words that may follow a full stop.

    >>> as_sentence("synthetic ratings.")
    'Synthetic ratings.'
    """
    return words[:1].upper() + words[1:]


def with_notes(words: str, notes: Iterable[str]) -> str:
    """Sentences, followed by each note as a sentence, once.

    >>> with_notes("Two ranks.", ["shared GPU: times are not real", "", "shared GPU: times are not real"])
    'Two ranks. Shared GPU: times are not real.'
    """
    return " ".join([*filter(None, [words]), *(f"{as_sentence(note)}." for note in dict.fromkeys(notes) if note)])


def ticks(low: float, high: float) -> list[float]:
    """About five round numbers between ``low`` and ``high``.

    >>> ticks(0, 9.8)
    [0.0, 2.0, 4.0, 6.0, 8.0]
    """
    if not high > low:
        return [low]
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * min((1, 2, 2.5, 5, 10), key=lambda factor: abs(factor * power - rough))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{i * step:.10g}") for i in range(first, last + 1)]
