"""``recshard plan make``: plans the tables of a file or a model, prints the plan, and writes it to files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from recshard_lab.cli.options import (
    OUTPUT,
    PlanFile,
    PlannerOptions,
    Plotly,
    Source,
    check_out,
    note_written,
    out_option,
    with_options,
)
from recshard_lab.cli.plan.planning import Planning

if TYPE_CHECKING:
    from recshard_lab.lab.exporting.exportable import Exportable
    from recshard_lab.sharding import ShardingPlan

FORMATS = {
    ".json": "the plan",
    ".html": "a report",
    ".svg": "its pictures",
    ".png": "its pictures",
    ".py": "a torchrun script that trains under the plan",
    ".sh": "the same, run by the shell",
    ".pt": "TorchRec's ShardingPlan by torch.save; needs torchrec",
    ".zip": "all of them",
}
PLAIN = (".json", ".py", ".sh", ".pt")  # without pictures
NEXT_STEPS = """tables are missing: recshard plan make needs a file or a model. Fix: write an example and plan it:

    recshard plan make --example > tables.yaml
    recshard plan make tables.yaml

For a model that Python can import: recshard plan make package.module:factory
For another machine: recshard plan make tables.yaml --topology h100x8"""


@with_options
def make(
    options: PlannerOptions,
    source: Source = "",
    plan: PlanFile = None,
    out: Annotated[list[Path] | None, out_option(FORMATS, folder=True)] = None,
    plotly: Plotly = "embed",
    example: Annotated[
        bool, typer.Option("--example", help="Print an example file of tables.", rich_help_panel=OUTPUT)
    ] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of a file of tables.", rich_help_panel=OUTPUT)
    ] = False,
) -> None:
    """Choose each table's scheme and ranks, predict the step, print the plan and write it to files."""
    from recshard_lab.planner.read.table_files import SCHEMA

    if example:
        from recshard_lab.shipped import example_text

        print(example_text("tables.yaml"), end="")
        return
    if schema:
        print(json.dumps(SCHEMA, indent=2))
        return
    if not source:
        raise ValueError(NEXT_STEPS)
    outputs = out or []
    check_out(outputs, FORMATS, "all of them")
    planning = Planning.of(source, options, keep_search=any(path.suffix.lower() not in PLAIN for path in outputs))
    planned = planning.plan(plan)
    near = f"no plan of the proposed shards is shorter than {planned.bound_ms:.2f} ms: gap {planned.gap:.1%}"
    for part in (planned.show(), planned.estimate, near):
        print(part, end="\n\n")
    page: Exportable | None = None
    for path in outputs:
        if path.suffix.lower() in PLAIN:
            _write(path, planned, planning)
        else:
            from recshard_lab.lab import export

            page = page or _page(planned, planning)
            export(page, path, plotly=plotly, model=_factory(planning))
    note_written(*outputs)


def _write(path: Path, planned: ShardingPlan, planning: Planning) -> None:
    """Writes a plan in a format that needs no pictures."""
    machine, suffix = planning.planner.topology, path.suffix.lower()
    if suffix == ".json":
        path.write_text(planned.to_json(indent=2) + "\n")
    elif suffix == ".pt":
        import torch

        theirs = planned.to_torchrec(machine.world_size, machine.local_world_size, machine.compute_device)
        for entry in (entry for tables in theirs.plan.values() for entry in tables.values()):
            # a class of this library, by which from_torchrec recognises the plan
            vars(entry).pop("_recshard_lab", None)
        torch.save(theirs, path)
    else:
        script = planned.to_script(_factory(planning))
        if suffix == ".sh":
            from recshard_lab.sharding.export.script import shell_of

            script = shell_of(script, machine.world_size, machine.local_world_size)
        path.write_text(script)


def _page(planned: ShardingPlan, planning: Planning) -> Exportable:
    from recshard_lab.lab.exporting.exportable import Candidate
    from recshard_lab.lab.exporting.plan_report import plan_page

    by, more = planning.planner, {} if planned.search is None else {"search": planned.search}
    found = Candidate.of("plan", planned, planning.source.tables, by.topology, by.workload, more=more)
    return plan_page(found, planning.topology)


def _factory(planning: Planning) -> str | None:
    """The name of the model that a script imports; None for a file of tables."""
    return planning.source.name if planning.source.module is not None else None
