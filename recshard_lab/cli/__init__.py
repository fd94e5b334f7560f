"""The command line ``recshard``: one subcommand a function, each in words; the rooms do the work."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from recshard_lab.cli.bench import bench
from recshard_lab.cli.calibrate import calibrate
from recshard_lab.cli.compare import compare
from recshard_lab.cli.data import app as data
from recshard_lab.cli.plan import plan
from recshard_lab.cli.train import train
from recshard_lab.cli.whatif import whatif

_TABLES_HELP = """tables.yaml, a table a line (recshard plan --example writes a longer one):

- {name: film, num_embeddings: 4000, embedding_dim: 64, feature_names: \\[seen]}

- {name: user, num_embeddings: 900, embedding_dim: 64, feature_names: \\[user]}

- {name: kind, num_embeddings: 20, embedding_dim: 16, feature_names: \\[kind]}

num_embeddings are rows, embedding_dim columns; ids of feature_names are looked up in the table."""

app = typer.Typer(
    help="Learn, explore and decide embedding sharding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command()(bench)
app.command()(calibrate)
app.command()(compare)
app.command(epilog=_TABLES_HELP)(plan)
app.command()(train)
app.command()(whatif)
app.add_typer(data, name="data")
console = Console(highlight=False)


@app.command()
def lab(
    notebook: Annotated[str, typer.Argument(help="A notebook of the folder; its first letters do.")] = "00",
    port: Annotated[int, typer.Option(help="Port to listen on; the next free one is taken.")] = 8888,
    browser: Annotated[bool, typer.Option(help="Open a browser window.")] = True,
    folder: Annotated[
        Path | None, typer.Option(help="Copy the notebooks there first, and open the copies; files there are kept.")
    ] = None,
) -> None:
    """Open JupyterLab on the notebooks, on this machine only (loopback)."""
    from recshard_lab.lab.server import copied, find_notebook, serve

    found = find_notebook(notebook)
    serve(found if folder is None else copied(found, folder), port, browser)


@app.command()
def demo(
    data: Annotated[Path | None, typer.Option(help="MovieLens: a folder, zip or wheel that holds it.")] = None,
    ranks: Annotated[int, typer.Option(help="How many ranks train together.", min=1)] = 4,
    out: Annotated[Path, typer.Option(help="Where the HTML report goes.")] = Path("recshard_report.html"),
    plotly: Annotated[
        str, typer.Option(help="The report's interactive pictures: embed (opens offline), cdn, none.")
    ] = "embed",
) -> None:
    """Train one model under every scheme, compare with the prediction, write a report."""
    from recshard_lab.lab.demo import run_demo

    raise typer.Exit(0 if run_demo(data, ranks, out, console, plotly) else 1)


@app.command()
def topologies(
    name: Annotated[
        str, typer.Argument(help="One of them: every figure with its source; left out, all are listed.")
    ] = "",
) -> None:
    """The machines that `plan --topology` knows, with their published figures and sources."""
    from recshard_lab.sharding import preset_table

    print(preset_table(name or None))


@app.command()
def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Tell what this machine has, try two ranks, and say what to do about what is missing."""
    from recshard_lab.launcher import checkup

    findings = checkup.checkup()
    if json:
        print(checkup.as_json(findings))
    else:
        console.print(checkup.as_table(findings))
    if any(finding.ok is False for finding in findings):
        raise typer.Exit(1)


def main() -> None:
    """Runs the command line; a user's mistake ends in one line, not in a traceback."""
    try:
        app()
    except (ValueError, OSError, ImportError) as error:
        from recshard_lab.planner.explain import Refusal

        told = Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)
        words = error.worded("command line") if isinstance(error, Refusal) else str(error)
        if isinstance(error, FileNotFoundError) and error.filename is not None:
            words = f"{str(error.filename)!r} does not exist in {Path.cwd()}. Fix: correct the path"
        told.print(f"[bold red]{type(error).__name__}:[/] {escape(words)}")
        sys.exit(2)
