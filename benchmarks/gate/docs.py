"""The tables of docs/benchmarks.md and of the README, written from the recorded values and the targets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path

from benchmarks import Figure, benchmark_named, published
from benchmarks.apparatus.step_case import ROWWISE, SGD
from benchmarks.gate import IN_DOCS, IN_README
from benchmarks.gate.record import Record, Recorded
from benchmarks.train_step import cases, target

Rows = Callable[[Record], Iterable[str]]
HEAD = "| figure | value | target | recorded | command |", "|---|---|---|---|---|"


def write(root: Path, record: Record) -> None:
    """Writes the tables of every page anew."""
    for page, tables in PAGES.items():
        file = root / page
        file.write_text(with_tables(file.read_text(), tables, record))


def with_tables(text: str, tables: dict[str, Rows], record: Record) -> str:
    """A page with its tables written anew, each between a pair of markers.

    Args:
        text: of the page.
        tables: name of the markers -> the lines between them.
        record: of the values.

    Raises:
        ValueError: a pair of markers is absent, or a promised figure is not recorded.
    """
    for name, rows in tables.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"the page does not have one {begin} and one {end}. Fix: put them around the table.")
        before, _, rest = text.partition(begin)
        text = "\n".join([before + begin, *rows(record), end + rest.partition(end)[2]])
    return text


def figure_rows(record: Record) -> Iterator[str]:
    """All promised figures."""
    yield from HEAD
    for name in IN_DOCS:
        for figure, bound in benchmark_named(name).targets.items():
            yield _row(record, figure, name, figure, bound)


def readme_rows(record: Record) -> Iterator[str]:
    """The figures of the README."""
    yield from HEAD
    steps = {case.name: target(case) for case in cases()}
    for words, (name, figure, options) in IN_README.items():
        bounds = steps if name == "train_step" else benchmark_named(name).targets
        yield _row(record, words, name, figure, bounds[figure], options)


def _row(record: Record, words: str, name: str, figure: str, bound: float, options: str = "") -> str:
    known, day = _known(record, name, figure), str(record.entries[name]["date"])
    row = Figure(figure, known.value, known.unit, bound, known.at_most)
    value = f"{_number(known.value)} {known.unit}".strip() + ("" if row.ok else ", missed")
    recorded = known.note if day in known.note else ", ".join(filter(None, (day, known.note)))
    command = " ".join(filter(None, ("recshard bench", name.replace("_", "-"), options)))
    return f"| {words} | {value} | {row.bound} | {recorded} | `{command}` |"


def machine_rows(record: Record) -> Iterator[str]:
    """The machine of each benchmark."""
    machines: dict[object, list[str]] = {}
    for name in (*IN_DOCS, "train_step"):
        machines.setdefault(record.entries[name]["machine"], []).append(f"`{name.replace('_', '-')}`")
    for machine, names in machines.items():
        yield f"- {', '.join(names)}: {machine}."


def step_rows(record: Record) -> Iterator[str]:
    """Training steps beside TorchRec: a row for each layout, uniform ids / Zipf ids for each optimizer."""
    yield "| layout | SGD | row-wise Adagrad | target |"
    yield "|---|---|---|---|"
    for layout, group in groupby(cases(), key=lambda case: (case.layout, case.ranks, case.local_ranks, case.threads)):
        own = list(group)
        cells = []
        for optimizer in (SGD, ROWWISE):
            names = [case.name for case in own if case.optimizer == optimizer]
            cells.append(" / ".join(f"{_known(record, 'train_step', name).value:.3g}" for name in names))
        targets = " / ".join(f"{bound:g}" for bound in dict.fromkeys(target(case) for case in own))
        yield f"| {_words(*layout)} | {' | '.join(cells)} | {targets} |"


def published_rows(_: Record) -> Iterator[str]:
    """Every published step, and the recorded ratio of its prediction to it."""
    content = published.content()
    yield "| published step | published ms | predicted / published |"
    yield "|---|---|---|"
    for entry in content["points"]:
        ratio = content["recorded"][entry["name"]]
        yield f"| {entry['name']} | {published.published_ms(entry):.3g} | {ratio:.2f} |"


def executor_rows(_: Record) -> Iterator[str]:
    """The published steps of each executor and of all, and the error of their predictions."""
    content, ratios = published.content(), dict[str, list[float]]()
    for entry in content["points"]:
        apart = "" if entry["executor"] == "fused" else ", sparse Adagrad in separate operators"
        ratios.setdefault(entry["name"].partition(",")[0] + apart, []).append(content["recorded"][entry["name"]])
    yield "| executor | published steps | mean error | predicted / published |"
    yield "|---|---|---|---|"
    for name, found in (*ratios.items(), ("all", [ratio for each in ratios.values() for ratio in each])):
        yield f"| {name} | {len(found)} | {published.mean_error(found):.0f}% | {min(found):.2f} to {max(found):.2f} |"


def _known(record: Record, benchmark: str, figure: str) -> Recorded:
    known = record.figures(benchmark)
    if figure not in known:
        raise ValueError(f"{figure!r} is not recorded. Fix: python -m benchmarks.gate record {benchmark}")
    return known[figure]


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


PAGES: dict[str, dict[str, Rows]] = {
    "docs/benchmarks.md": {
        "figures": figure_rows,
        "machines": machine_rows,
        "training steps": step_rows,
        "published executors": executor_rows,
        "published steps": published_rows,
    },
    "docs/concepts/cost_model.md": {"published executors": executor_rows},
    "README.md": {"figures": readme_rows},
}
"""Page -> its tables, by the name of their markers."""
