"""The command line ``recshard``: one function per subcommand. The rooms do the work.

No module of this room imports torch or numpy at its top: every ``--help`` must appear at once. A command imports what
it needs when it runs.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from recshard_lab.cli.bench import bench
from recshard_lab.cli.calibrate import calibrate
from recshard_lab.cli.compare import compare
from recshard_lab.cli.data import app as data
from recshard_lab.cli.export import export
from recshard_lab.cli.plan import plan
from recshard_lab.cli.selftest import selftest
from recshard_lab.cli.serve import serve
from recshard_lab.cli.train import train
from recshard_lab.cli.whatif import whatif

_TABLES_HELP = """tables.yaml, one table per line (recshard plan --example writes a longer one):

- {name: film, num_embeddings: 4000, embedding_dim: 64, feature_names: \\[seen]}

- {name: user, num_embeddings: 900, embedding_dim: 64, feature_names: \\[user]}

- {name: kind, num_embeddings: 20, embedding_dim: 16, feature_names: \\[kind]}

num_embeddings: rows. embedding_dim: columns. feature_names: the features whose ids are looked up in the table."""

_VERSIONED = ("torch", "fbgemm-gpu", "fbgemm-gpu-cpu", "numba")
"""Packages whose versions ``recshard --version`` prints, where they are installed."""

app = typer.Typer(
    help="Learn, explore and decide embedding sharding.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command()(bench)
app.command()(calibrate)
app.command()(compare)
app.command()(export)
app.command(epilog=_TABLES_HELP)(plan)
app.command()(selftest)
app.command()(serve)
app.command()(train)
app.command()(whatif)
app.add_typer(data, name="data")


def _print_version(requested: bool) -> None:
    if not requested:
        return
    import platform
    from contextlib import suppress
    from importlib.metadata import PackageNotFoundError, version

    import recshard_lab

    print(f"recshard {recshard_lab.__version__}")
    for name in _VERSIONED:
        with suppress(PackageNotFoundError):
            print(f"{name} {version(name)}")
    print(f"Python {platform.python_version()} on {platform.system()} {platform.machine()}")
    raise typer.Exit


@app.callback()
def _recshard(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the installed versions and exit.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    """Learn, explore and decide embedding sharding."""


@app.command()
def lab(
    notebook: Annotated[str, typer.Argument(help="A notebook, by its first letters.")] = "00",
    port: Annotated[int, typer.Option(help="Port to listen on. If it is taken, the next free one is used.")] = 8888,
    browser: Annotated[bool, typer.Option(help="Open a browser window.")] = True,
    folder: Annotated[
        Path | None,
        typer.Option(help="Copy the notebooks to this folder and open the copies. Existing files are kept."),
    ] = None,
) -> None:
    """Open JupyterLab on the notebooks. Only this machine can connect (loopback)."""
    from recshard_lab.lab.server import copied, find_notebook, serve

    source = find_notebook(notebook)
    serve(source if folder is None else copied(source, folder), port, browser)


@app.command()
def demo(
    data: Annotated[Path | None, typer.Option(help="MovieLens: a folder, zip or wheel that contains it.")] = None,
    ranks: Annotated[int | None, typer.Option(help="Number of ranks. Default: 2, or 4 with --full.", min=1)] = None,
    out: Annotated[Path, typer.Option(help="Path of the HTML report.")] = Path("recshard_report.html"),
    plotly: Annotated[
        str, typer.Option(help="Interactive pictures of the report: embed (opens offline), cdn, none.")
    ] = "embed",
    full: Annotated[bool, typer.Option("--full", help="Every scheme, on both splits. Takes minutes.")] = False,
) -> None:
    """Train one model under several plans, compare with the prediction, write a report. Takes less than a minute."""
    from recshard_lab.launcher import warm

    warm()  # the ranks' imports run beside this process's own
    from recshard_lab.lab.demo.command import run_demo

    raise typer.Exit(0 if run_demo(data, ranks, out, Console(highlight=False), plotly, full) else 1)


@app.command()
def topologies(
    name: Annotated[str, typer.Argument(help="A machine: prints each figure with its source. Default: list all.")] = "",
) -> None:
    """The machines that `plan --topology` accepts, with their published figures and sources."""
    from recshard_lab.sharding import preset_table

    print(preset_table(name or None))


@app.command()
def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Check this machine, launch two ranks, and print a fix for each finding."""
    from recshard_lab.launcher.doctor import as_json, as_table, checkup

    findings = checkup()
    if json:
        print(as_json(findings))
    else:
        Console(highlight=False).print(as_table(findings))
    if any(finding.ok is False for finding in findings):
        raise typer.Exit(1)


def main() -> None:
    """Runs the command line. A user's mistake prints one line instead of a traceback."""
    try:
        if not _print_help(sys.argv[1:]):
            app(prog_name="recshard")
    except (ValueError, OSError, ImportError) as error:
        from recshard_lab.planner.answers.refusals import PlanDoesNotFit

        stderr = Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)
        message = error.worded("command_line") if isinstance(error, PlanDoesNotFit) else str(error)
        if isinstance(error, FileNotFoundError) and error.filename is not None:
            message = f"{str(error.filename)!r} does not exist in {Path.cwd()}. Fix: correct the path"
        stderr.print(f"[bold red]{type(error).__name__}:[/] {escape(message)}")
        sys.exit(2)
    finally:
        gc.freeze()  # the interpreter would collect garbage at its end, which takes 1 s after import torch


def _print_help(words: list[str]) -> bool:
    """Prints the help of ``recshard [COMMAND...] --help``. Returns False for other words, and prints nothing.

    Typer would parse the options first, for which it loads pydantic. That alone takes 0.1 s.
    """
    *path, last = words or [""]
    if last != "--help":
        return False
    gc.disable()  # a tenth of the time, and the process ends here
    command: Any = typer.main.get_command(app)
    context = command.context_class(command, info_name="recshard")
    for name in path:
        command = getattr(command, "commands", {}).get(name)
        if command is None:
            return False
        context = command.context_class(command, info_name=name, parent=context)
    print(context.get_help())
    return True
