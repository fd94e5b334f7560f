"""``recshard plan sweep``: parses the options. `simulate` does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from recshard_lab.cli.options import MACHINE, STEP, Plotly, check_out, list_option, note_written, out_option
from recshard_lab.sizes import gigabytes

FORMATS = {".html": "a page with the Pareto picture", ".csv": "all points"}


def sweep(
    source: Annotated[str, typer.Argument(help="Tables: .yaml, .json or .csv, as `plan make` reads them.")] = "",
    example: Annotated[
        str, typer.Option(help="Built-in tables instead of a file: mlperf-dlrm-dcnv2, meta-1.25t, meta-3t.")
    ] = "",
    topology: Annotated[str, list_option("Machines by name, separated by commas: h100,a100.", MACHINE)] = "h100",
    ranks: Annotated[
        str, list_option("Numbers of ranks, separated by commas: 8,16,64.", MACHINE, "--ranks", "-n")
    ] = "",
    memory_gb: Annotated[
        str,
        list_option("Memory of one rank, in GB, separated by commas: 40,80. 80GB and 80GiB work too.", MACHINE),
    ] = "",
    sharding_group_size: Annotated[
        str, list_option("Ranks that share one copy of the tables. all: one copy.", MACHINE)
    ] = "",
    batch_size: Annotated[str, list_option("Samples per rank (weak scaling).", STEP)] = "",
    global_batch_size: Annotated[str, list_option("Samples of all ranks together (strong scaling): 64k.", STEP)] = "",
    codecs: Annotated[str, list_option("Formats of rows/gradients in messages: fp32,fp16/bf16.", STEP)] = "",
    optimizer: Annotated[str, list_option("Optimizers of the embeddings, by fbgemm's names.", STEP)] = "",
    pipeline: Annotated[str, list_option("Training pipelines: none, sparse_dist, prefetch.", STEP)] = "",
    sync_every: Annotated[
        int, typer.Option(help="Steps between two averages of the copies.", min=1, metavar="N", rich_help_panel=STEP)
    ] = 1,
    out: Annotated[list[Path] | None, out_option(FORMATS)] = None,
    plotly: Plotly = "embed",
) -> None:
    """Simulate plans for other machines: ranks, batches, memory, codecs. Nothing is launched."""
    from recshard_lab.cli.plan.simulate import run_whatif

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
