"""``recshard plan explain`` and ``recshard plan diff``: why a plan is what it is, and what changes between two."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recshard_lab.cli.options import PlanFile, PlannerOptions, Source, with_options
from recshard_lab.cli.plan.planning import Planning, read_plan


@with_options
def explain(
    source: Source,
    options: PlannerOptions,
    tables: Annotated[list[str] | None, typer.Argument(help="Tables to explain, by name. Default: all.")] = None,
    why_not: Annotated[
        list[str] | None,
        typer.Option(help="TABLE=SCHEME: the cost of this change. Repeat it for changes together."),
    ] = None,
    plan: PlanFile = None,
) -> None:
    """Explain each table's scheme and ranks: the time and memory of every alternative."""
    schemes: dict[str, str] = {}
    for change in why_not or ():
        table, equals, scheme = change.partition("=")
        if not equals:
            raise ValueError(f"--why-not {change}: expected TABLE=SCHEME. Fix: --why-not {change}=row_wise")
        schemes[table] = scheme
    planning = Planning.of(source, options)
    planned = planning.plan(plan)
    names = tables or ([] if schemes else [table.name for table in planning.source.configs])
    for name in dict.fromkeys(names):
        print(planned.explain(name), end="\n\n")
    if schemes:
        print(planned.why_not(schemes))


@with_options
def diff(
    source: Source,
    options: PlannerOptions,
    old: Annotated[Path, typer.Argument(help="A plan (.json).")],
    new: Annotated[Path | None, typer.Argument(help="Another plan (.json). Default: the planner's plan.")] = None,
) -> None:
    """Print what changes from one plan to another: schemes, ranks, moved bytes, step time and memory."""
    before = read_plan(old)
    planning = Planning.of(source, options)
    print(before.diff(planning.plan(new)))
