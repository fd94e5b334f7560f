"""``recshard train``: a run that a file describes, alone or as one of torchrun's ranks."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from recshard_lab.cli.plan import machine_of


def train(
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="What to train on what, and how: .yaml or .json.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Only read the config and say what is wrong.")] = False,
    export: Annotated[
        Path | None, typer.Option(help="A folder for config, plan and script, to train elsewhere; no training here.")
    ] = None,
    topology: Annotated[str, typer.Option(help="With --export: the machine, by name (recshard topologies).")] = "",
    ranks: Annotated[int | None, typer.Option(help="With --export: how many ranks to plan for.", min=1)] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of a config.")] = False,
    backend: Annotated[str | None, typer.Option(help="gloo or nccl; left out: nccl where GPUs are.")] = None,
) -> None:
    """Train a model as a file says: alone, under torchrun on any number of nodes, going on where a run was killed.

    Under torchrun: torchrun --nproc-per-node 4 --no-python recshard train --config run.yaml
    """
    from recshard_lab.launcher import join
    from recshard_lab.train.job import TrainConfig, export_run, read_config, run_training
    from recshard_lab.train.pipelines import StageError

    if schema:
        print(json.dumps(TrainConfig.model_json_schema(), indent=2))
        return
    if config is None:
        raise typer.BadParameter("which run? Give --config run.yaml.")
    asked = read_config(config)
    if check:
        print(f"{config}: {asked.model.name} on {asked.data.name}, every field is right")
        return
    if export is not None:
        for path in export_run(asked, export, topology=machine_of(topology, ranks)):
            print(path)
        return
    if topology or ranks is not None:
        raise typer.BadParameter("--topology and --ranks belong to --export; torchrun says how many ranks train.")
    try:
        with join(backend):
            done = run_training(asked)
    except StageError as error:
        print(f"{'rank ' + os.environ['RANK'] + ': ' if 'RANK' in os.environ else ''}{error}", file=sys.stderr)
        raise typer.Exit(1) from None
    if done.unsaved is not None:
        raise OSError(f"the run ended at step {done.step:,} and is not saved: {done.unsaved}")
