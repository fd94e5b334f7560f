"""``recshard demo``: parses the options. `training_demo` does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from recshard_lab.cli.options import OUTPUT, Plotly, check_out, note_written, ranks_option


def demo(
    data: Annotated[Path | None, typer.Option(help="MovieLens: a folder, zip or wheel that contains it.")] = None,
    ranks: Annotated[int | None, ranks_option("Number of ranks. Default: 2, or 4 with --full.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Every scheme, on both splits. Takes minutes.")] = False,
    out: Annotated[Path, typer.Option(help="Path of the report, .html.", rich_help_panel=OUTPUT)] = Path(
        "recshard_report.html"
    ),
    plotly: Plotly = "embed",
) -> None:
    """Train one model under several plans, compare with the prediction, write a report. Takes less than a minute."""
    check_out([out], {".html": "the report"})
    from recshard_lab.launcher import warm

    warm()  # the ranks' imports run beside this process's own
    from recshard_lab.cli.training_demo import run_demo

    holds = run_demo(data, ranks, out, Console(highlight=False), plotly, full)
    note_written(out)
    raise typer.Exit(0 if holds else 1)
