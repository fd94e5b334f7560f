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
        exact: whether its weights are those of a plain loop. Otherwise it restarts after every checkpoint, so that a
            run that resumes there has the same results.
        overlap: the work that it hides, as in `Workload.pipeline`.
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
    """Registers a pipeline under a name for configs."""
    _KINDS[name] = kind


def pipeline_names() -> list[str]:
    """The registered names.

    >>> pipeline_names()[:2]
    ['base', 'prefetch']
    """
    return sorted(_KINDS)


def pipeline_kind(name: str) -> PipelineKind:
    """The pipeline with this name.

    Raises:
        ValueError: an unknown name.
    """
    if name not in _KINDS:
        raise ValueError(
            f"pipeline {name!r} does not exist{nearest(name, _KINDS)}. Fix: use one of {', '.join(_KINDS)}"
        )
    return _KINDS[name]


def check_pipeline(config: Mapping[str, Any]) -> None:
    """Raises ValueError for an unknown name, and for settings that the pipeline does not have.

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
