"""``recshard train``: a run that a file describes, on one rank or as one of torchrun's ranks."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from recshard_lab.cli.options import StepOptions, machine_of, note_written, ranks_option

_EXPORT = "Export for other machines"


def train(
    config: Annotated[Path | None, typer.Option("--config", "-c", help="The run: a .yaml or .json file.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Only check the config.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of a config.")] = False,
    backend: Annotated[str | None, typer.Option(help="gloo or nccl. Default: nccl if each rank has a GPU.")] = None,
    share_gpu: Annotated[
        bool, typer.Option("--share-gpu", help="Let several ranks compute on one GPU; their times are not real.")
    ] = False,
    export: Annotated[
        Path | None,
        typer.Option(help="Folder for config, plan and script. Nothing is trained.", rich_help_panel=_EXPORT),
    ] = None,
    launcher: Annotated[
        str | None, typer.Option(help="What starts the script: torchrun, slurm or ray.", rich_help_panel=_EXPORT)
    ] = None,
    topology: Annotated[
        str, typer.Option(help="The machine, by name (recshard topologies).", rich_help_panel=_EXPORT)
    ] = "",
    ranks: Annotated[int | None, ranks_option("Number of ranks.", _EXPORT)] = None,
) -> None:
    """Train a model as a file describes, on one rank or under torchrun. An interrupted run resumes."""
    from recshard_lab.launcher import join
    from recshard_lab.train.job import TrainConfig, export_run, read_config, run_training
    from recshard_lab.train.pipelines import StageError

    if schema:
        print(json.dumps(TrainConfig.model_json_schema(), indent=2))
        return
    if config is None:
        raise ValueError("a run is missing: recshard train needs a config. Fix: recshard train --config run.yaml")
    run = read_config(config)
    if check:
        print(f"{config}: {run.model.name} on {run.data.name}, every field is right")
        return
    if export is not None:
        options: Any = {"launcher": launcher} if launcher is not None else {}
        note_written(*export_run(run, export, topology=machine_of(StepOptions(topology, ranks)), **options))
        return
    if topology or ranks is not None or launcher is not None:
        raise ValueError(
            "--topology, --ranks and --launcher belong to --export: without it, torchrun sets the ranks. "
            "Fix: add --export FOLDER, or leave them out."
        )
    try:
        with join(backend, share_gpu=share_gpu):
            done = run_training(run)
    except StageError as error:
        print(f"{'rank ' + os.environ['RANK'] + ': ' if 'RANK' in os.environ else ''}{error}", file=sys.stderr)
        raise typer.Exit(1) from None
    if done.unsaved is not None:
        raise OSError(f"the run ended at step {done.step:,} and is not saved: {done.unsaved}")
