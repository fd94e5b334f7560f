"""``recshard export``: parses the options. `train.job` loads the model, `serving` writes the bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recshard_lab.cli.options import OUTPUT, note_written


def export(
    run: Annotated[Path, typer.Argument(help="The checkpoint of a `recshard train` run, or the run's file.")],
    out: Annotated[
        Path,
        typer.Option(
            help="Folder of the bundle. Its name is the version. A bundle is replaced.",
            metavar="FOLDER",
            rich_help_panel=OUTPUT,
        ),
    ],
    dtype: Annotated[
        str, typer.Option(help="Number format of the tables: int8, int4, int2, fp8, fp16, bf16. Default: as trained.")
    ] = "",
    compile: Annotated[
        bool, typer.Option("--compile", help="Also compile it for this machine: a minute, and a C++ compiler.")
    ] = False,
) -> None:
    """Export a trained model as a bundle, which `recshard serve` serves. Opens the data of the run for its features."""
    import torch

    from recshard_lab.embedding import quantize_embeddings
    from recshard_lab.serving import Inputs, save_bundle
    from recshard_lab.train.job import load_trained

    trained = load_trained(run)
    model = quantize_embeddings(trained.model, dtype, inplace=True) if dtype else trained.model
    inputs = Inputs.of(model, [f"dense_{number}" for number in range(trained.num_dense_features)])
    outputs = {"probability": torch.sigmoid} if trained.outputs == ("logit",) else trained.outputs
    save_bundle(model, out, inputs=inputs, outputs=outputs, compile=compile)
    print(f"{out}: step {trained.step:,}. Serve it: recshard serve {out}")
    note_written(out)
