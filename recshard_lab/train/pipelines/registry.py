"""Pipelines by name, for configs: ``{"name": "sparse_dist", "on_nan_loss": "error"}``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from recshard_lab.sharding.plan.types import nearest
from recshard_lab.train.pipelines.base import Pipeline
from recshard_lab.train.pipelines.semi_sync import TrainPipelineSemiSync
from recshard_lab.train.pipelines.train import (
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)

_TAKEN = ("self", "model", "optimizer", "device", "custom_model_fwd", "switches")


@dataclass(frozen=True)
class PipelineKind:
    """A pipeline that configs may name.

    Attributes:
        make: called with (model, optimizer, device, custom_model_fwd=, **settings).
        exact: whether its weights are those of a plain loop. One that is not is begun anew after every checkpoint, so
            that a run that goes on from there does what this one does.
        overlap: what of a step it hides, as of `Workload.pipeline`.
    """

    make: Callable[..., Pipeline]
    exact: bool = True
    overlap: str = "none"


_KINDS: dict[str, PipelineKind] = {
    "base": PipelineKind(TrainPipelineBase),
    "sparse_dist": PipelineKind(TrainPipelineSparseDist, overlap="sparse_dist"),
    "prefetch": PipelineKind(PrefetchTrainPipelineSparseDist, overlap="prefetch"),
    "semi_sync": PipelineKind(TrainPipelineSemiSync, exact=False, overlap="sparse_dist"),
}


def register_pipeline(name: str, kind: PipelineKind) -> None:
    """Makes a pipeline one that configs may name."""
    _KINDS[name] = kind


def pipeline_names() -> list[str]:
    """The names there are.

    >>> pipeline_names()[:2]
    ['base', 'prefetch']
    """
    return sorted(_KINDS)


def pipeline_kind(name: str) -> PipelineKind:
    """The pipeline of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in _KINDS:
        raise ValueError(f"no pipeline is named {name!r}{nearest(name, _KINDS)}; there are: {', '.join(_KINDS)}")
    return _KINDS[name]


def check_pipeline(config: Mapping[str, Any]) -> None:
    """Refuses a name that there is not, and settings that the pipeline does not have.

    >>> check_pipeline({"name": "base", "on_nan_los": "error"})
    Traceback (most recent call last):
    ...
    ValueError: pipeline 'base' has no setting 'on_nan_los' (did you mean 'on_nan_loss'?); it has: ...
    """
    settings = dict(config)
    name = settings.pop("name")
    own, shared = (inspect.signature(make).parameters for make in (pipeline_kind(name).make, Pipeline.__init__))
    known = sorted({*own, *(shared if "switches" in own else ())} - set(_TAKEN))
    for setting in settings:
        if setting not in known:
            near = nearest(setting, known)
            raise ValueError(f"pipeline {name!r} has no setting {setting!r}{near}; it has: {', '.join(known)}")
