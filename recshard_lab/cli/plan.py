"""``recshard plan``: plans the tables of a file or a model, explains the plan, and writes it to files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from recshard_lab.planner import Workload
    from recshard_lab.planner.search.trace import SearchTrace
    from recshard_lab.sharding import ShardingPlan, Topology
    from recshard_lab.sources import Source

_MORE = "More of the plan"


def plan(
    source: Annotated[
        str, typer.Argument(help="Tables (.yaml, .json, .csv), or a model: package.module:factory, file.py:factory.")
    ] = "",
    topology: Annotated[
        str,
        typer.Option(
            help="A machine by name (recshard topologies): h100x8, cpu-laptop ... Or a profile (recshard calibrate)."
        ),
    ] = "",
    ranks: Annotated[int | None, typer.Option(help="World size. Default: the topology's.", min=1)] = None,
    batch_size: Annotated[int, typer.Option(help="Samples per rank and step.", min=1)] = 512,
    memory_gb: Annotated[float | None, typer.Option(help="Memory of one rank, in GB.")] = None,
    optimizer: Annotated[str, typer.Option(help="Optimizer of the embeddings, by fbgemm's name.")] = "exact_sgd",
    pipeline: Annotated[
        str, typer.Option(help="Training pipeline, which decides what overlaps: none, sparse_dist, prefetch.")
    ] = "none",
    constraints: Annotated[
        Path | None, typer.Option(help="Constraints: table -> ParameterConstraints, .yaml, .json.")
    ] = None,
    solver: Annotated[str, typer.Option(help="greedy, or exact (improves greedy's plan by a MILP).")] = "greedy",
    cost_model: Annotated[
        str, typer.Option(help="recshard, latency (inference), or torchrec (the model of TorchRec 1.8).")
    ] = "recshard",
    given: Annotated[Path | None, typer.Option("--plan", help="Use this plan (JSON) instead of planning.")] = None,
    out: Annotated[Path | None, typer.Option(help="Path of the plan, JSON.")] = None,
    html: Annotated[Path | None, typer.Option(help="Path of a report with pictures, HTML.")] = None,
    plotly: Annotated[
        str,
        typer.Option(
            help="Interactive pictures of the report: embed (opens offline), cdn, none.", rich_help_panel=_MORE
        ),
    ] = "embed",
    script: Annotated[Path | None, typer.Option(help="Path of a torchrun script that trains under the plan.")] = None,
    torchrec: Annotated[
        Path | None, typer.Option(help="Path of the plan as TorchRec's ShardingPlan (torch.save). Needs torchrec.")
    ] = None,
    explain: Annotated[
        list[str] | None, typer.Option(help="A table: explain its scheme and ranks.", rich_help_panel=_MORE)
    ] = None,
    why_not: Annotated[
        list[str] | None, typer.Option(help="TABLE=SCHEME: the cost of this change.", rich_help_panel=_MORE)
    ] = None,
    diff: Annotated[
        Path | None,
        typer.Option(help="Another plan (JSON): print the changes from it to this plan.", rich_help_panel=_MORE),
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option(help="A plan (JSON) to check. With tables: against their sizes.", rich_help_panel=_MORE),
    ] = None,
    schema: Annotated[
        bool,
        typer.Option(
            "--schema", help="Print the JSON Schema of a plan. For tables: --schema tables.", rich_help_panel=_MORE
        ),
    ] = False,
    example: Annotated[
        bool, typer.Option("--example", help="Print an example file: recshard plan --example > tables.yaml.")
    ] = False,
) -> None:
    """Choose each table's scheme and ranks, predict the step, explain and export the plan."""
    from recshard_lab.planner import EmbeddingShardingPlanner, read_constraints
    from recshard_lab.planner.answers.text import gigabytes
    from recshard_lab.planner.read.table_files import EXAMPLE, SCHEMA
    from recshard_lab.sharding import ShardingPlan
    from recshard_lab.sources import read_source

    if example:
        print(EXAMPLE, end="")
        return
    if schema:
        if source not in ("", "plan", "tables"):
            raise typer.BadParameter(f"--schema prints the schema of 'plan' or 'tables', got {source!r}")
        print(json.dumps(SCHEMA if source == "tables" else ShardingPlan.json_schema(), indent=2))
        return
    if check is not None:
        _check(check, source, ranks)
        return
    if not source:
        raise typer.BadParameter(
            "tables are missing. Fix: recshard plan tables.yaml (recshard plan --example > tables.yaml writes one), or "
            "recshard plan package.module:factory"
        )
    read = read_source(source)
    for note in read.notes:
        note_on_stderr(note)
    machine = machine_of(topology, ranks, memory_gb)
    if not topology and ranks is None:
        note_on_stderr(
            f"planned for {machine.world_size} CPU ranks of this machine, {gigabytes(machine.memory_cap_bytes)} each. "
            f"--ranks changes their number; --topology h100x8 plans for another machine."
        )
    workload = read.workload(batch_size=batch_size, optimizer=optimizer, pipeline=pipeline)
    table_constraints = (
        read_constraints(constraints, [t.name for t in read.configs]) if constraints is not None else None
    )
    planner = EmbeddingShardingPlanner(
        machine, None, table_constraints, workload, solver=solver, cost_model=cost_model, keep_search=html is not None
    )
    if given is None:
        planned = read.plan(planner)
    else:
        planned = _read_plan(given).resolved(read.by_module, machine.world_size, machine.local_world_size)
        planned.planned = planner.record(planned, read.by_module)
    for part in _printed(planned, explain or (), why_not or (), diff):
        print(part, end="\n\n")
    search = planned.search
    files = {"out": out, "html": html, "script": script, "torchrec": torchrec}
    _write(planned, read, machine, workload, topology, search, **files, plotly=plotly)
    note_written(*files.values())


def note_on_stderr(note: str) -> None:
    """Prints a note on stderr, so that pipes do not receive it."""
    Console(stderr=True, highlight=False, emoji=False, soft_wrap=True).print(f"[yellow]note:[/] {escape(note)}")


def note_written(*paths: Path | None) -> None:
    """Names the files that were written, with their sizes, on stderr."""
    written = [path for path in paths if path is not None]
    if not written:
        return
    from recshard_lab.planner.answers.text import gigabytes

    names = [str(p) if p.is_dir() or not p.is_file() else f"{p} ({gigabytes(p.stat().st_size)})" for p in written]
    Console(stderr=True, highlight=False, emoji=False, soft_wrap=True).print(escape(f"Wrote {', '.join(names)}"))


def machine_of(topology: str, ranks: int | None, memory_gb: float | None = None) -> Topology:
    """The machine of the options ``--topology``, ``--ranks`` and ``--memory-gb``."""
    from recshard_lab.sharding import Topology

    given = {} if ranks is None else {"world_size": ranks}
    if topology.endswith(".json"):
        machine = Topology.from_profile(topology, **given)
    else:
        machine = Topology.preset(topology, **given) if topology else Topology(ranks or 2)
    return machine if memory_gb is None else machine.with_memory(memory_gb)


def _printed(planned: ShardingPlan, explain: Any, why_not: Any, diff: Path | None) -> list[Any]:
    """The printed parts: the plan, its estimate, and the answers to `--explain`, `--why-not` and `--diff`."""
    answers: list[Any] = [planned.explain(table) for table in explain]
    schemes: dict[str, str] = {}
    for change in why_not:
        table, equals, scheme = change.partition("=")
        if not equals:
            raise typer.BadParameter(f"--why-not takes TABLE=SCHEME, got {change!r}")
        schemes[table] = scheme
    if schemes:
        answers.append(planned.why_not(schemes))
    if diff is not None:
        answers.append(_read_plan(diff).diff(planned))
    near = f"no plan of the proposed shards is shorter than {planned.bound_ms:.2f} ms: gap {planned.gap:.1%}"
    return [planned.show(), planned.estimate, near, *answers]


def _read_plan(path: Path) -> ShardingPlan:
    from recshard_lab.documents import read_text
    from recshard_lab.sharding import PlanError, ShardingPlan

    try:
        return ShardingPlan.from_json(read_text(path, (".json",))[1])
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None


def _write(
    planned: ShardingPlan,
    read: Source,
    machine: Topology,
    workload: Workload,
    preset: str,
    search: SearchTrace | None,
    *,
    out: Path | None,
    html: Path | None,
    script: Path | None,
    torchrec: Path | None,
    plotly: str,
) -> None:
    if out is not None:
        out.write_text(planned.to_json(indent=2))
    if script is not None:
        script.write_text(planned.to_script(read.name if read.module is not None else None))
    if torchrec is not None:
        import torch

        theirs = planned.to_torchrec(machine.world_size, machine.local_world_size, machine.compute_device)
        for entry in (entry for tables in theirs.plan.values() for entry in tables.values()):
            vars(entry).pop(
                "_recshard_lab", None
            )  # a class of this library, by which from_torchrec recognises the plan
        torch.save(theirs, torchrec)
    if html is not None:
        from recshard_lab.lab.exporting.exportable import Candidate
        from recshard_lab.lab.exporting.exporting import write_page
        from recshard_lab.lab.exporting.plan_report import plan_page

        more = {} if search is None else {"search": search}
        found = Candidate.of("plan", planned, read.tables, machine, workload, more=more)
        write_page(html, plan_page(found, preset), plotly)


def _check(path: Path, source: str, ranks: int | None) -> None:
    """Checks that a plan tiles its tables; without tables, that no shard is missing between or before others."""
    from recshard_lab.sharding import PlanError
    from recshard_lab.sources import read_source

    found = _read_plan(path)
    count = sum(map(len, found.plan.values()))
    words = f"{path}: a plan of {count:,} table{'s' * (count != 1)}"
    world_size = ranks or found.world_size
    try:
        if source:
            found.resolved(read_source(source).by_module, world_size)
            words += f" that tiles every table of {source} on {world_size} ranks"
        else:
            found.validate(None, world_size)
            words += f" without holes or overlaps on {world_size} ranks; pass its tables to check their sizes too"
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None
    print(words)
