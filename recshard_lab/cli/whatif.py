"""``recshard whatif``: options in words; `lab.whatif` does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from recshard_lab.cli.plan import note_written


def whatif(
    tables: Annotated[Path | None, typer.Argument(help="Tables: .yaml, .json or .csv, as `plan` reads them.")] = None,
    example: Annotated[str, typer.Option(help="In place of tables: mlperf-dlrm-dcnv2.")] = "",
    topology: Annotated[str, typer.Option(help="Machines by name, divided by commas: h100,a100.")] = "h100",
    world_size: Annotated[str, typer.Option(help="Ranks, divided by commas: 8,16,64.")] = "",
    batch_size: Annotated[str, typer.Option(help="Samples of one rank (weak scaling).")] = "",
    global_batch_size: Annotated[str, typer.Option(help="Samples of all ranks (strong scaling): 64k.")] = "",
    memory_gb: Annotated[str, typer.Option(help="Memory of one rank, in GB.")] = "",
    codecs: Annotated[str, typer.Option(help="Rows/gradients on the wire: fp32,fp16/bf16.")] = "",
    optimizer: Annotated[str, typer.Option(help="Of the embeddings, fbgemm's names.")] = "",
    pipeline: Annotated[str, typer.Option(help="none, sparse_dist, prefetch.")] = "",
    sharding_group_size: Annotated[str, typer.Option(help="Ranks that share a copy of the tables; all is one.")] = "",
    sync_every: Annotated[int, typer.Option(help="Steps between syncs of the copies.", min=1)] = 1,
    html: Annotated[Path | None, typer.Option(help="Where a page with the Pareto picture goes.")] = None,
    plotly: Annotated[str, typer.Option(help="Of the page: embed (opens offline), cdn, none.")] = "embed",
    csv: Annotated[Path | None, typer.Option(help="Where all points go, as CSV.")] = None,
) -> None:
    """Simulate plans for other machines: more ranks, larger batches, less memory, other codecs; none of it is run."""
    from recshard_lab.lab.whatif import run_whatif

    axes = {
        "world_size": world_size,
        "batch_size": batch_size,
        "global_batch_size": global_batch_size,
        "memory_gb": memory_gb,
        "codecs": codecs,
        "optimizer": optimizer,
        "pipeline": pipeline,
        "sharding_group_size": sharding_group_size,
    }
    run_whatif(tables, example, topology, axes, sync_every, html, csv, Console(highlight=False), plotly)
    note_written(html, csv)
