"""The README's tables of figures, written from the recorded values and the targets in the benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from benchmarks import Figure, benchmark_named
from benchmarks.apparatus.step_case import ROWWISE, SGD
from benchmarks.gate import IN_README
from benchmarks.gate.record import Record
from benchmarks.train_step import cases, target


def with_tables(text: str, record: Record) -> str:
    """The README with its tables written anew, each between a pair of markers.

    Raises:
        ValueError: a pair of markers is absent, or a promised figure is not recorded.
    """
    for name, lines in (("figures", figure_rows(record)), ("training steps", step_rows(record))):
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"the README does not have one {begin} and one {end}. Fix: put them around the table.")
        before, _, rest = text.partition(begin)
        text = "\n".join([before + begin, *lines, end + rest.partition(end)[2]])
    return text


def figure_rows(record: Record) -> Iterator[str]:
    """The table of the promised figures."""
    yield "| figure | value | target | recorded |"
    yield "|---|---|---|---|"
    for name in IN_README:
        known = record.figures(name)
        for figure, bound in benchmark_named(name).targets.items():
            if figure not in known:
                raise ValueError(_unrecorded(name, figure))
            own = known[figure]
            row = Figure(figure, own.value, own.unit, bound, own.at_most)
            recorded = own.note or record.entries[name]["date"]
            yield f"| {figure} | {_number(own.value)} {own.unit} | {row.bound} | {recorded} |".replace("  ", " ")


def step_rows(record: Record) -> Iterator[str]:
    """The table of training steps beside TorchRec: a row for each layout, uniform ids / Zipf ids for each optimizer."""
    known = record.figures("train_step")
    yield "| layout | SGD | row-wise Adagrad | target |"
    yield "|---|---|---|---|"
    for layout, group in groupby(cases(), key=lambda case: (case.layout, case.ranks, case.local_ranks, case.threads)):
        own = list(group)
        cells = []
        for optimizer in (SGD, ROWWISE):
            names = [case.name for case in own if case.optimizer == optimizer]
            for name in names:
                if name not in known:
                    raise ValueError(_unrecorded("train_step", name))
            cells.append(" / ".join(f"{known[name].value:.3g}" for name in names))
        targets = " / ".join(f"{bound:g}" for bound in dict.fromkeys(target(case) for case in own))
        yield f"| {_words(*layout)} | {' | '.join(cells)} | {targets} |"


def _words(layout: str, ranks: int, local_ranks: int, threads: int) -> str:
    if layout == "fused":
        return f"one process, {threads} thread{'s' if threads > 1 else ''}"
    nodes = f", {ranks // local_ranks} nodes of {local_ranks}" if ranks > local_ranks else ""
    return f"{'four schemes mixed' if layout == 'mixed' else layout}{nodes}"


def _number(value: float) -> str:
    """Three digits, and never an exponent.

    >>> _number(5100.0), _number(0.0234)
    ('5,100', '0.0234')
    """
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _unrecorded(benchmark: str, figure: str) -> str:
    return f"{figure!r} is not recorded. Fix: python -m benchmarks.gate record {benchmark}"
