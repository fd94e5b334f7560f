"""The command line ``recshard``: one function per subcommand. The rooms do the work.

Walking order: `options` (options that several commands have, and outputs), `errors` (of words that the user typed),
one file a command, and `plan`, a group of commands. Every ``--help`` must appear at once, so these import neither torch
nor numpy at their top. A command imports what it needs when it runs, such as `training_demo` and `plan.simulate`.

Exit codes: 0 after success, 1 if a check or a run failed, 2 for a mistake in the command or a file, 130 after Ctrl-C.
"""

from __future__ import annotations

import gc
import sys
from shutil import get_terminal_size
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from recshard_lab.cli.bench import bench
from recshard_lab.cli.calibrate import calibrate
from recshard_lab.cli.data import app as data
from recshard_lab.cli.demo import demo
from recshard_lab.cli.errors import UsageError, error_text, usage_text
from recshard_lab.cli.export import export
from recshard_lab.cli.lab import lab
from recshard_lab.cli.options import examples, stderr
from recshard_lab.cli.plan import app as plan
from recshard_lab.cli.port import port
from recshard_lab.cli.selftest import selftest
from recshard_lab.cli.serve import serve
from recshard_lab.cli.train import train
from recshard_lab.text_table import set_terminal_width

_VERSIONED = ("torch", "fbgemm-gpu", "fbgemm-gpu-cpu", "numba")
"""Packages whose versions ``recshard --version`` prints, where they are installed."""
_LEARN, _DECIDE, _RUN, _CHECK = "Learn", "Plan", "Train and serve", "Check this machine"
_EXIT_CODES = {
    "Exit codes": (
        "0    success",
        "1    a check failed, or a run failed",
        "2    a mistake in the command or in a file that it reads",
        "130  interrupted by Ctrl-C",
    )
}

app = typer.Typer(
    help="Learn, explore and decide embedding sharding.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    epilog=examples(
        "recshard demo",
        "recshard lab",
        "recshard plan make --example > tables.yaml",
        "recshard plan make tables.yaml --topology h100x8 --out report.html",
        more=_EXIT_CODES,
    ),
)


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


app.command(
    rich_help_panel=_LEARN,
    epilog=examples(
        "recshard lab", "recshard lab 05", "recshard lab --folder my_course", "recshard lab --copy-only --yes"
    ),
)(lab)


app.command(
    rich_help_panel=_LEARN,
    epilog=examples("recshard demo", "recshard demo -n 4 --out report.html", "recshard demo --full --data ml-100k.zip"),
)(demo)
app.add_typer(plan, name="plan", rich_help_panel=_DECIDE)


@app.command(rich_help_panel=_DECIDE, epilog=examples("recshard topologies", "recshard topologies h100"))
def topologies(
    name: Annotated[str, typer.Argument(help="A machine: prints each figure with its source. Default: list all.")] = "",
) -> None:
    """The machines that `plan make --topology` accepts, with their published figures and sources."""
    from recshard_lab.sharding import preset_table

    print(preset_table(name or None))


app.command(
    rich_help_panel=_DECIDE,
    epilog=examples(
        "recshard calibrate -n 4 --out here.json",
        "recshard plan make tables.yaml --topology here.json",
        "recshard calibrate --check here.json",
    ),
)(calibrate)
app.command(
    rich_help_panel=_DECIDE,
    epilog=examples(
        "recshard port train.py -n 8",
        "recshard port train.py --set 'args.rows=1000' --out report.json",
    ),
)(port)
app.command(
    rich_help_panel=_RUN,
    epilog=examples(
        "recshard train --config run.yaml",
        "recshard train --config run.yaml --check",
        "torchrun --nproc-per-node 4 --no-python recshard train --config run.yaml",
        "recshard train --config run.yaml --export cluster --topology h100x16",
    ),
)(train)
app.add_typer(data, name="data", rich_help_panel=_RUN)
app.command(
    rich_help_panel=_RUN,
    epilog=examples(
        "recshard export run/checkpoint --out model/v1", "recshard export run.yaml --out model/v2 --dtype int8"
    ),
)(export)
app.command(
    rich_help_panel=_RUN,
    epilog=examples("recshard serve model/", "recshard serve model/v1 --port 0 --workers 2 --delay-ms 2"),
)(serve)


@app.command(rich_help_panel=_CHECK, epilog=examples("recshard doctor", "recshard doctor --json"))
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


app.command(
    rich_help_panel=_CHECK,
    epilog=examples("recshard selftest", "recshard selftest --gpu --out report.md"),
)(selftest)
app.command(
    rich_help_panel=_CHECK,
    epilog=examples(
        "recshard bench", "recshard bench plan --check", "recshard bench train-step --with-torchrec --json"
    ),
)(bench)


def main() -> None:
    """Runs the command line. A user's mistake prints one message instead of a traceback."""
    try:
        if not _print_help(sys.argv[1:]):
            set_terminal_width(get_terminal_size((0, 0)).columns or None)
            sys.exit(app(prog_name="recshard", standalone_mode=False) or 0)
    except UsageError as error:
        if type(error).__name__ != "NoArgsIsHelpError":  # whose help is printed by now
            stderr().print(f"[bold red]Error:[/] {escape(usage_text(error, sys.argv[1:]))}")
        sys.exit(2)
    except (ValueError, OSError, ImportError) as error:
        kind = "Error" if type(error).__module__ == "builtins" else type(error).__name__
        stderr().print(f"[bold red]{kind}:[/] {escape(error_text(error))}")
        sys.exit(2)
    finally:
        set_terminal_width(None)
        gc.freeze()  # the interpreter would collect garbage at its end, which takes 1 s after import torch
        gc.enable()


def _print_help(words: list[str]) -> bool:
    """Prints the help of ``recshard [COMMAND...] --help``. Returns False for other words, and prints nothing.

    Typer would parse the options first, for which it loads pydantic. That alone takes 0.1 s.
    """
    *path, last = words or [""]
    if last != "--help":
        return False
    gc.disable()  # a tenth of the time; `main` enables it again
    command: Any = typer.main.get_command(app)
    context = command.context_class(command, info_name="recshard")
    for name in path:
        command = getattr(command, "commands", {}).get(name)
        if command is None:
            return False
        context = command.context_class(command, info_name=name, parent=context)
    print(context.get_help())
    return True
