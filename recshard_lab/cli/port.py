"""``recshard port``: parses the options. `compat.port` reads the script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from recshard_lab.cli.options import MachineOptions, check_out, machine_of, note_written, out_option, with_options

if TYPE_CHECKING:
    from recshard_lab.compat.port import PortReport
    from recshard_lab.sharding import ShardingPlan

FORMATS = {".txt": "what is printed", ".json": "the report and the plan"}


@with_options
def port(
    script: Annotated[Path, typer.Argument(help="A Python script or a notebook that imports torchrec.")],
    options: MachineOptions,
    values: Annotated[
        list[str] | None,
        typer.Option("--set", help="The value of an expression in the script. Repeat it.", metavar="EXPRESSION=VALUE"),
    ] = None,
    out: Annotated[list[Path] | None, out_option(FORMATS)] = None,
) -> None:
    """Read a script for TorchRec: report which calls run here, which differ, and the plan of its tables.

    Nothing is run. Exits with 1 if a name is refused.
    """
    from recshard_lab.compat.port import read_script

    outputs = out or []
    check_out(outputs, FORMATS)
    report = read_script(script, dict(_value(text) for text in values or []))
    machine = machine_of(options)
    print(report)
    plan = report.plan(machine) if report.tables else None
    text = [str(report)]
    if plan is not None:
        text.append(f"The plan of these tables on {machine.world_size} ranks:\n{plan.show()}")
    if not report.of("refused"):
        text.append(f"Run it: {report.command}")
    print("", "\n\n".join(text[1:]), sep="\n")
    for path in outputs:
        is_json = path.suffix.lower() == ".json"
        path.write_text((_json(report, plan, machine.world_size) if is_json else "\n\n".join(text)) + "\n")
    note_written(*outputs)
    if report.of("refused"):
        raise typer.Exit(1)


def _value(text: str) -> tuple[str, Any]:
    """The expression and the value of ``--set``. Other values than Python literals are strings."""
    import ast

    expression, found, value = text.partition("=")
    try:
        expression = ast.unparse(ast.parse(expression.strip(), mode="eval"))
        valid = bool(found and value)
    except SyntaxError:
        valid = False
    if not valid:
        raise ValueError(f"--set {text!r}: expected EXPRESSION=VALUE. Fix: --set 'args.rows=1000'.")
    try:
        return expression, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return expression, value


def _json(report: PortReport, plan: ShardingPlan | None, ranks: int) -> str:
    planned = None if plan is None else json.loads(plan.to_json())
    return json.dumps({**report.to_dict(), "ranks": ranks, "plan": planned}, indent=2)
