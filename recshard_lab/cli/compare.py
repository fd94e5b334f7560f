"""``recshard compare``: prints several plans of the same tables side by side, and exports them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from recshard_lab.cli.plan import _read_plan, machine_of, note_written

if TYPE_CHECKING:
    from recshard_lab.sharding import ShardingPlan


def compare(
    source: Annotated[str, typer.Argument(help="Tables or a model, as `plan` reads them.")],
    plans: Annotated[
        list[str],
        typer.Argument(help="'planner', a scheme, or a plan's JSON file. NAME=PLAN gives it a name: mine=plan.json."),
    ],
    topology: Annotated[str, typer.Option(help="A machine by name, or a profile, as for `plan`.")] = "",
    ranks: Annotated[int | None, typer.Option(help="World size. Default: the topology's.", min=1)] = None,
    batch_size: Annotated[int, typer.Option(help="Samples per rank and step.", min=1)] = 512,
    memory_gb: Annotated[float | None, typer.Option(help="Memory of one rank, in GB.")] = None,
    optimizer: Annotated[str, typer.Option(help="Optimizer of the embeddings, by fbgemm's name.")] = "exact_sgd",
    to: Annotated[
        list[Path] | None,
        typer.Option(help="Output: .html, .svg, .png, .zip, or a folder. Repeat it for more outputs."),
    ] = None,
    plotly: Annotated[
        str, typer.Option(help="Interactive pictures of the page: embed (opens offline), cdn, none.")
    ] = "embed",
) -> None:
    """Predict several plans for the same ranks, print their figures, write them as one page."""
    from recshard_lab.lab import export
    from recshard_lab.lab.compare.plan_comparison import compare_plans
    from recshard_lab.sources import read_source

    read = read_source(source)
    machine = machine_of(topology, ranks, memory_gb)
    requested: dict[str, str | ShardingPlan] = {}
    for words in plans:
        name, plan = _named_plan(words)
        if name in requested:
            raise typer.BadParameter(f"two plans are named {name!r}. Fix: rename one, as in OTHER={words}")
        requested[name] = plan
    workload = read.workload(batch_size=batch_size, optimizer=optimizer)
    comparison = compare_plans(read.configs, machine, requested, workload)
    print(comparison)
    for path in to or ():
        export(comparison, path, plotly=plotly)
    note_written(*(to or ()))


def _named_plan(words: str) -> tuple[str, str | ShardingPlan]:
    """A plan's name, and the plan in a form that `compare_plans` accepts.

    >>> _named_plan("fast=row_wise"), _named_plan("planner")
    (('fast', 'row_wise'), ('planner', 'planner'))
    """
    name, equals, plan = words.partition("=")
    if not equals:
        name, plan = Path(words).stem, words
    return name, _read_plan(Path(plan)) if plan.endswith(".json") else plan
