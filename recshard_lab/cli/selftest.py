"""``recshard selftest``: what works on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from recshard_lab.selftest import Result


def selftest(
    gpu: Annotated[bool, typer.Option("--gpu", help="Also check the GPUs. Fails where torch finds none.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the report to this file too.")] = None,
) -> None:
    """Run this library on this machine and print a report to attach to an issue."""
    from recshard_lab.selftest import run_checks

    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)

    def show(result: Result) -> None:
        typer.echo(f"{result.status:14}  {result.seconds:6.1f} s  {result.name}", err=True)

    report = run_checks(gpu, show)
    text = report.as_json() if json else report.markdown()
    print(text)
    if out is not None:
        out.write_text(text + "\n")
    if not report.ok:
        raise typer.Exit(1)
