"""``recshard compare``: several plans of the same tables side by side, printed, and exported as a page or a picture."""

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
        typer.Argument(help="'planner', a scheme, or a plan's JSON file; each may be named: mine=plan.json."),
    ],
    topology: Annotated[str, typer.Option(help="A machine by name, or a profile, as for `plan`.")] = "",
    ranks: Annotated[int | None, typer.Option(help="World size, where the topology does not say it.", min=1)] = None,
    batch_size: Annotated[int, typer.Option(help="Samples of one rank in a step.", min=1)] = 512,
    memory_gb: Annotated[float | None, typer.Option(help="Memory of one rank, in GB.")] = None,
    optimizer: Annotated[str, typer.Option(help="Of the embeddings, fbgemm's name.")] = "exact_sgd",
    to: Annotated[
        list[Path] | None,
        typer.Option(help="Where it goes: .html, .svg, .png, .zip, or a folder; may be given again."),
    ] = None,
    plotly: Annotated[str, typer.Option(help="Of the page: embed (opens offline), cdn, none.")] = "embed",
) -> None:
    """Predict several plans for the same ranks, print their figures, and write them as one page."""
    from recshard_lab.lab import export
    from recshard_lab.lab.plan_comparison import compare_plans
    from recshard_lab.planner import read_source

    read = read_source(source)
    machine = machine_of(topology, ranks, memory_gb)
    wishes: dict[str, str | ShardingPlan] = {}
    for words in plans:
        name, wish = _wish(words)
        if name in wishes:
            raise typer.BadParameter(f"two plans are called {name!r}: give one another name, as NAME={words}")
        wishes[name] = wish
    workload = read.workload(batch_size=batch_size, optimizer=optimizer)
    found = compare_plans(read.configs, machine, wishes, workload)
    print(found)
    for path in to or ():
        export(found, path, plotly=plotly)
    note_written(*(to or ()))


def _wish(words: str) -> tuple[str, str | ShardingPlan]:
    """A plan's name, and what `compare_plans` takes for it.

    >>> _wish("fast=row_wise"), _wish("planner")
    (('fast', 'row_wise'), ('planner', 'planner'))
    """
    name, equals, wish = words.partition("=")
    if not equals:
        name, wish = Path(words).stem, words
    return name, _read_plan(Path(wish)) if wish.endswith(".json") else wish
