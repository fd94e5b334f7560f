"""``recshard whatif``: parses the options. `lab.whatif` does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from recshard_lab.cli.plan import note_written


def whatif(
    tables: Annotated[Path | None, typer.Argument(help="Tables: .yaml, .json or .csv, as `plan` reads them.")] = None,
    example: Annotated[
        str, typer.Option(help="Built-in tables instead of a file: mlperf-dlrm-dcnv2, meta-1.25t, meta-3t.")
    ] = "",
    topology: Annotated[str, typer.Option(help="Machines by name, separated by commas: h100,a100.")] = "h100",
    world_size: Annotated[str, typer.Option(help="World sizes, separated by commas: 8,16,64.")] = "",
    batch_size: Annotated[str, typer.Option(help="Samples per rank (weak scaling).")] = "",
    global_batch_size: Annotated[str, typer.Option(help="Samples of all ranks together (strong scaling): 64k.")] = "",
    memory_gb: Annotated[str, typer.Option(help="Memory of one rank, in GB.")] = "",
    codecs: Annotated[str, typer.Option(help="Formats of rows/gradients in messages: fp32,fp16/bf16.")] = "",
    optimizer: Annotated[str, typer.Option(help="Optimizers of the embeddings, by fbgemm's names.")] = "",
    pipeline: Annotated[str, typer.Option(help="Training pipelines: none, sparse_dist, prefetch.")] = "",
    sharding_group_size: Annotated[
        str, typer.Option(help="Ranks that share one copy of the tables. all: one copy.")
    ] = "",
    sync_every: Annotated[int, typer.Option(help="Steps between two averages of the copies.", min=1)] = 1,
    html: Annotated[Path | None, typer.Option(help="Path of a page with the Pareto picture, HTML.")] = None,
    plotly: Annotated[
        str, typer.Option(help="Interactive pictures of the page: embed (opens offline), cdn, none.")
    ] = "embed",
    csv: Annotated[Path | None, typer.Option(help="Path of all points, CSV.")] = None,
) -> None:
    """Simulate plans for other machines: ranks, batches, memory, codecs. Nothing is launched."""
    from recshard_lab.lab.exporting.sweep_report import run_whatif

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
