"""``recshard plan sweep``: parses the options. `lab.exporting.sweep_report` does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from recshard_lab.cli.options import MACHINE, OUTPUT, STEP, Plotly, check_out, note_written
from recshard_lab.sizes import gigabytes

FORMATS = {".html": "a page with the Pareto picture", ".csv": "all points"}


def sweep(
    source: Annotated[str, typer.Argument(help="Tables: .yaml, .json or .csv, as `plan make` reads them.")] = "",
    example: Annotated[
        str, typer.Option(help="Built-in tables instead of a file: mlperf-dlrm-dcnv2, meta-1.25t, meta-3t.")
    ] = "",
    topology: Annotated[
        str,
        typer.Option(help="Machines by name, separated by commas: h100,a100.", metavar="LIST", rich_help_panel=MACHINE),
    ] = "h100",
    ranks: Annotated[
        str,
        typer.Option(
            "--ranks",
            "-n",
            help="Numbers of ranks, separated by commas: 8,16,64.",
            metavar="LIST",
            rich_help_panel=MACHINE,
        ),
    ] = "",
    memory_gb: Annotated[
        str,
        typer.Option(
            help="Memory of one rank, in GB, separated by commas: 40,80. 80GB and 80GiB work too.",
            metavar="LIST",
            rich_help_panel=MACHINE,
        ),
    ] = "",
    sharding_group_size: Annotated[
        str,
        typer.Option(
            help="Ranks that share one copy of the tables. all: one copy.", metavar="LIST", rich_help_panel=MACHINE
        ),
    ] = "",
    batch_size: Annotated[
        str, typer.Option(help="Samples per rank (weak scaling).", metavar="LIST", rich_help_panel=STEP)
    ] = "",
    global_batch_size: Annotated[
        str,
        typer.Option(help="Samples of all ranks together (strong scaling): 64k.", metavar="LIST", rich_help_panel=STEP),
    ] = "",
    codecs: Annotated[
        str,
        typer.Option(
            help="Formats of rows/gradients in messages: fp32,fp16/bf16.", metavar="LIST", rich_help_panel=STEP
        ),
    ] = "",
    optimizer: Annotated[
        str, typer.Option(help="Optimizers of the embeddings, by fbgemm's names.", metavar="LIST", rich_help_panel=STEP)
    ] = "",
    pipeline: Annotated[
        str, typer.Option(help="Training pipelines: none, sparse_dist, prefetch.", metavar="LIST", rich_help_panel=STEP)
    ] = "",
    sync_every: Annotated[
        int, typer.Option(help="Steps between two averages of the copies.", min=1, metavar="N", rich_help_panel=STEP)
    ] = 1,
    out: Annotated[
        list[Path] | None,
        typer.Option(
            help="Path of an output: .html (page with the Pareto picture) or .csv (all points). Repeat it for both.",
            metavar="FILE",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    plotly: Plotly = "embed",
) -> None:
    """Simulate plans for other machines: ranks, batches, memory, codecs. Nothing is launched."""
    from recshard_lab.lab.exporting.sweep_report import run_whatif

    files = _one_of_each(out or [])
    axes = {
        "world_size": ranks,
        "batch_size": batch_size,
        "global_batch_size": global_batch_size,
        "memory_gb": ",".join(repr(gigabytes(part)) for part in memory_gb.split(",") if memory_gb),
        "codecs": codecs,
        "optimizer": optimizer,
        "pipeline": pipeline,
        "sharding_group_size": sharding_group_size,
    }
    html, csv = files.get(".html"), files.get(".csv")
    path = Path(source) if source else None
    run_whatif(path, example, topology, axes, sync_every, html, csv, Console(highlight=False), plotly)
    note_written(html, csv)


def _one_of_each(paths: list[Path]) -> dict[str, Path]:
    """Suffix -> the output. Raises ValueError for two outputs of one format."""
    check_out(paths, FORMATS)
    files: dict[str, Path] = {}
    for path in paths:
        suffix = path.suffix.lower()
        if suffix in files:
            raise ValueError(f"--out {path}: {files[suffix]} already has this content. Fix: one {suffix} file.")
        files[suffix] = path
    return files
