"""``recshard bench``: runs the benchmarks of the checkout and compares their figures with the targets."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import recshard_lab
from recshard_lab.cores import machine

if TYPE_CHECKING:
    from benchmarks import Figure

FILE_COLUMNS = 200
"""Width of a table that is written to a file or a pipe."""


def bench(
    name: Annotated[str, typer.Argument(help="Which benchmark. Without a name, all benchmarks are listed.")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 when a target is missed.")] = False,
    with_peers: Annotated[
        bool, typer.Option("--with-peers", help="Also measure other launchers, installed in a temporary environment.")
    ] = False,
    with_torchrec: Annotated[
        bool, typer.Option("--with-torchrec", help="Alternate with TorchRec, installed in a temporary environment.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds.")] = False,
    only: Annotated[
        list[str] | None, typer.Option(help="Run the cases whose name contains this text. Repeat it for more cases.")
    ] = None,
    lines: Annotated[bool, typer.Option("--lines", help="Print the source lines behind each count.")] = False,
) -> None:
    """Measure the figures that this library promises. Needs a checkout of the repository."""
    benchmarks = find_benchmarks()
    console = Console(highlight=False)
    if not name:
        table = Table("benchmark", "measures", box=None, pad_edge=False)
        for known in benchmarks.benchmark_names():
            table.add_row(known, escape(benchmarks.benchmark_named(known).about))
        console.print(table)
        return
    refuse_shared_gpu()
    figures = benchmarks.benchmark_named(name).run(with_torchrec=with_torchrec, quick=quick, only=only, lines=lines)
    if with_peers:
        figures += benchmarks.benchmark_named(f"{name}_peers").figures()
    if json:
        print(benchmarks.as_json(figures))
    else:
        _print_table(figures, console if console.is_terminal else Console(highlight=False, width=FILE_COLUMNS))
    if check and not all(figure.ok for figure in figures):
        raise typer.Exit(1)


def refuse_shared_gpu() -> None:
    """Raises LaunchError if the ranks of a benchmark would share a GPU: it measures times."""
    from recshard_lab.launcher import LaunchError
    from recshard_lab.launcher.devices import SHARE_VARIABLE, TIMES_NOTE, shares_by_default, visible_gpus

    if shares_by_default(None, None, visible_gpus()):
        raise LaunchError(f"{SHARE_VARIABLE}=1: a benchmark measures times. {TIMES_NOTE}. Fix: unset {SHARE_VARIABLE}.")


def find_benchmarks() -> ModuleType:
    """The package ``benchmarks`` of the checkout that recshard_lab was imported from. Adds its folder to `sys.path`.

    Raises:
        FileNotFoundError: recshard_lab was not imported from a checkout; wheels contain no benchmarks.
    """
    root = Path(recshard_lab.__file__).resolve().parents[1]
    if not (root / "pyproject.toml").is_file() or not (root / "benchmarks").is_dir():
        raise FileNotFoundError(
            f"recshard bench found no benchmarks in {root}: the installed package does not contain them. "
            f"Fix: clone the repository, run pip install -e '.[cpu]' there, and repeat the command."
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    import benchmarks

    return benchmarks


def _print_table(figures: Sequence[Figure], console: Console) -> None:
    """A table for each run of figures with the same columns beside their values, so that no column is empty."""
    console.print(escape(machine()))
    for heads, rows in groupby(figures, key=lambda figure: tuple(figure.beside)):
        console.print()
        console.print(_table(heads, list(rows)))
    for line in dict.fromkeys(line for figure in figures for line in figure.note.splitlines()):
        console.print(escape(line))


def _table(heads: Sequence[str], figures: Sequence[Figure]) -> Table:
    table = Table(pad_edge=False, box=None)
    for head in ("figure", *heads, "value", "target", ""):
        table.add_column(head, justify="right" if head in ("value", *heads) else "left")
    for figure in figures:
        verdict = "" if figure.target is None else ("[green]kept[/]" if figure.ok else "[bold red]MISSED[/]")
        others = [f"{figure.beside[head]:,.4g}" for head in heads]
        value = f"{figure.value:,.4g} {figure.unit}" if figure.value == figure.value else "not run"
        table.add_row(escape(figure.name), *others, value, figure.bound, verdict)
    return table
