"""``recshard plan check``: checks a plan that was written elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from recshard_lab.cli.options import ranks_option
from recshard_lab.cli.plan.planning import read_plan
from recshard_lab.text_table import wrapped


def check(
    plan: Annotated[Path | None, typer.Argument(help="A plan (.json).", show_default=False)] = None,
    source: Annotated[
        str, typer.Argument(help="Its tables or model, as `plan make` reads them: their sizes are checked too.")
    ] = "",
    ranks: Annotated[int | None, ranks_option("Number of ranks. Default: the plan's.")] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of a plan.")] = False,
) -> None:
    """Check that a plan tiles its tables: no hole, no overlap, no rank that does not exist."""
    from recshard_lab.sharding import PlanError, ShardingPlan
    from recshard_lab.sources import read_source

    if schema:
        print(json.dumps(ShardingPlan.json_schema(), indent=2))
        return
    if plan is None:
        raise ValueError("a plan is missing. Fix: recshard plan check plan.json")
    read = read_plan(plan)
    count = sum(map(len, read.plan.values()))
    words = f"{plan}: a plan of {count:,} table{'s' * (count != 1)}"
    world_size = ranks or read.world_size
    try:
        if source:
            read.resolved(read_source(source).by_module, world_size)
            words += f" that tiles every table of {source} on {world_size} ranks"
        else:
            read.validate(None, world_size)
            words += f" without holes or overlaps on {world_size} ranks. Pass its tables to check their sizes too."
    except PlanError as error:
        raise PlanError(f"{plan}: {error}") from None
    print(wrapped(words))
