"""``recshard plan compare``: prints several plans of the same tables side by side, and exports them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from recshard_lab.cli.options import (
    Plotly,
    Source,
    StepOptions,
    check_out,
    machine_of,
    note_written,
    out_option,
    with_options,
)
from recshard_lab.cli.plan.planning import read_plan

if TYPE_CHECKING:
    from recshard_lab.sharding import ShardingPlan

FORMATS = {".html": "a page", ".svg": "the pictures", ".png": "the pictures", ".zip": "all of them, with the plans"}


@with_options
def compare(
    source: Source,
    options: StepOptions,
    plans: Annotated[
        list[str],
        typer.Argument(help="'planner', a scheme, or a plan's .json file. NAME=PLAN gives it a name: mine=plan.json."),
    ],
    out: Annotated[list[Path] | None, out_option(FORMATS, folder=True)] = None,
    plotly: Plotly = "embed",
) -> None:
    """Predict several plans for the same ranks, print their figures side by side, write them as one page."""
    from recshard_lab.lab import export
    from recshard_lab.lab.compare.plan_comparison import compare_plans
    from recshard_lab.sources import read_source

    outputs = out or []
    check_out(outputs, FORMATS, "all of them, with the plans")
    read = read_source(source)
    machine = machine_of(options)
    requested: dict[str, str | ShardingPlan] = {}
    for words in plans:
        name, plan = _named_plan(words)
        if name in requested:
            raise ValueError(f"two plans are named {name!r}: a name must be unique. Fix: OTHER={words}")
        requested[name] = plan
    workload = read.workload(batch_size=options.batch_size, optimizer=options.optimizer)
    comparison = compare_plans(read.configs, machine, requested, workload)
    print(comparison)
    for path in outputs:
        export(comparison, path, plotly=plotly)
    note_written(*outputs)


def _named_plan(words: str) -> tuple[str, str | ShardingPlan]:
    """A plan's name, and the plan in a form that `compare_plans` accepts.

    >>> _named_plan("fast=row_wise"), _named_plan("planner")
    (('fast', 'row_wise'), ('planner', 'planner'))
    """
    name, equals, plan = words.partition("=")
    if not equals:
        name, plan = Path(words).stem, words
    if plan.endswith(".json"):
        return name, read_plan(Path(plan))
    from recshard_lab.sharding import scheme_names
    from recshard_lab.sharding.plan.types import nearest

    known = ["planner", *scheme_names()]
    if plan not in known:
        raise ValueError(
            f"plan {plan!r} is neither 'planner', a scheme nor a .json file{nearest(plan, known)}. "
            f"Fix: use one of {', '.join(known)}, or a file."
        )
    return name, plan
