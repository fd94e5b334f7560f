"""``recshard selftest``: what works on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from recshard_lab.cli.options import OUTPUT, check_out, note_written

if TYPE_CHECKING:
    from recshard_lab.selftest import Result


def selftest(
    gpu: Annotated[bool, typer.Option("--gpu", help="Also check the GPUs. Fails where torch finds none.")] = False,
    skip: Annotated[
        list[str] | None,
        typer.Option(help="Leave out the checks whose name contains this text, such as notebook. Repeat it for more."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Path of the report, too: .md (as printed) or .json.", rich_help_panel=OUTPUT),
    ] = None,
) -> None:
    """Run this library on this machine and print a report to attach to an issue."""
    from recshard_lab.selftest import run_checks

    check_out([] if out is None else [out], {".md": "the report as printed", ".json": "one JSON object"})

    def show(result: Result) -> None:
        typer.echo(f"{result.status:14}  {result.seconds:6.1f} s  {result.name}", err=True)

    report = run_checks(gpu, show, skip=skip or ())
    print(report.as_json() if json else report.markdown())
    if out is not None:
        out.write_text((report.as_json() if out.suffix.lower() == ".json" else report.markdown()) + "\n")
        note_written(out)
    if not report.ok:
        raise typer.Exit(1)
