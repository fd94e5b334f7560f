"""The model of a run, ended or still running, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from recshard_lab.arguments import checks_arguments
from recshard_lab.distributed.state.checkpoint import load_checkpoint, read_extra
from recshard_lab.saved.files import CheckpointError
from recshard_lab.sparse import KeyedJaggedTensor
from recshard_lab.train.job.build import brings_its_loss, build_sources, build_unsharded
from recshard_lab.train.job.config import TrainConfig, read_config
from recshard_lab.train.job.saved import FORMAT


class TrainedModel(NamedTuple):
    """A model with its trained weights.

    Attributes:
        model: unsharded, on CPU, in evaluation mode, without its loss. Takes ``(dense [B, I], features)``, or
            only features if the data have no dense columns.
        outputs: names of its outputs: ``("logit",)``, or the vectors of two towers.
        step: training steps of these weights.
        num_dense_features: I.
    """

    model: nn.Module
    outputs: tuple[str, ...]
    step: int
    num_dense_features: int


class WithoutDense(nn.Module):
    """A model of ``(dense, features)`` that is called with features only, for data without dense columns."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Calls the model with ``[B, 0]`` dense columns."""
        logits: Tensor = self.model(torch.zeros(features.stride(), 0, device=features.device()), features)
        return logits


@checks_arguments
def load_trained(path: str | Path) -> TrainedModel:
    """Loads the model of a training run from its checkpoint, saved by any number of ranks.

    Opens the data of the run, which determine the number of ids of each feature.

    Args:
        path: the checkpoint, or the file of the run, whose ``checkpoint.path`` is read.

    Raises:
        CheckpointError: no checkpoint, a checkpoint of something else, or a damaged one.
        ValueError: a file that does not describe a run, a run without a checkpoint, or data that do not fit the model.
    """
    place = Path(path)
    if place.is_file():
        run = read_config(place)
        if run.checkpoint is None:
            raise ValueError(
                f"{place} names no checkpoint, so the run saved no weights. Fix: add checkpoint: {{path: ...}}"
            )
        place = Path(run.checkpoint.path)
    saved = read_extra(place)
    if not isinstance(saved, dict) or saved.get("format") != FORMAT:
        raise CheckpointError(
            f"{place} is a checkpoint, but not of a training run. "
            f"Fix: load_checkpoint into the model, then save_bundle(model, path)"
        )
    config = TrainConfig.model_validate(saved["config"])
    source, _ = build_sources(config)
    model = build_unsharded(config.model, source)
    for module in model.modules():
        if any(each.is_meta for each in [*module.parameters(recurse=False), *module.buffers(recurse=False)]):
            module.to_empty(device="cpu", recurse=False)  # all values are read below
    load_checkpoint(place, model, optimizer_state=False)
    width, outputs = source.num_dense_features, ("logit",)
    if brings_its_loss(config.model):  # two towers, which take only features
        model, width, outputs = model.two_tower, 0, ("query", "candidate")  # type: ignore[assignment]
    elif not width:
        model = WithoutDense(model)
    return TrainedModel(model.cpu().eval(), outputs, saved["step"], width)
