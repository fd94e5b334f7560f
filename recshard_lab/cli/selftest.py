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
    full: Annotated[
        bool,
        typer.Option(
            "--full",
            help="Every scheme, optimizer and codec, resharding, checkpoints: a minute on a CPU. --out FILE.json is "
            "written after every check, and the same command continues it.",
        ),
    ] = False,
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
    from recshard_lab.selftest import Report, run_checks
    from recshard_lab.selftest.checks import command
    from recshard_lab.selftest.report import facts

    check_out([] if out is None else [out], {".md": "the report as printed", ".json": "one JSON object"})
    kept = out if full and out is not None and out.suffix.lower() == ".json" else None
    so_far: list[Result] = []
    now = Report(facts(command()), so_far)
    known: dict[str, Result] = {}
    if kept is not None and kept.exists():
        before = Report.read(kept)
        if not before.same_build(now):
            raise ValueError(
                f"{kept} has results of another machine, or of other sources. Fix: name a new file, or delete this one"
            )
        known = {result.name: result for result in before.results}

    def show(result: Result) -> None:
        typer.echo(f"{result.status:14}  {result.seconds:6.1f} s  {result.name}", err=True)
        so_far.append(result)
        if kept is not None:
            written = {result.name for result in so_far}
            rest = [result for name, result in known.items() if name not in written]
            part = kept.with_name(kept.name + ".part")  # a run that is killed leaves the whole file before
            part.write_text(Report(now.facts, [*so_far, *rest]).as_json() + "\n")
            part.replace(kept)

    report = run_checks(gpu, show, skip=skip or (), full=full, known=known)
    print(report.as_json() if json else report.markdown())
    if out is not None:
        out.write_text((report.as_json() if out.suffix.lower() == ".json" else report.markdown()) + "\n")
        note_written(out)
    if not report.ok:
        raise typer.Exit(1)
